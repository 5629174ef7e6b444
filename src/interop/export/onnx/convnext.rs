//! A `ConvNeXt` as nodes. Maps are channels-first between blocks, and channels-last where norms and MLPs take pixels.

use super::graph::{Graph, Value};
use super::layers::{Builder, Window};
use crate::model::ConvNextArch;

/// Returns the features of `[batch, channels, h, w]`, `[batch, dim]`.
pub(super) fn features(builder: &mut Builder<'_>, net: &ConvNextArch) -> Value {
    let x = builder.conv("stem.0", &Graph::images(), Window::tiles(net.patch), 1);
    let mut x = pixel_norm(builder, "stem.1", &x, net.eps);
    for (stage, (&depth, &dim)) in net.depths.iter().zip(&net.dims).enumerate() {
        let at = format!("stages.{stage}");
        if stage > 0 || net.shrink_first {
            x = pixel_norm(builder, &format!("{at}.downsample.0"), &x, net.eps);
            x = builder.conv(&format!("{at}.downsample.1"), &x, Window::tiles(2), 1);
        }
        for index in 0..depth {
            x = block(builder, net, dim, &format!("{at}.blocks.{index}"), &x);
        }
    }
    let x = builder.mean_pool("head", &x);
    builder.layer_norm("head.norm", &x, net.head_eps)
}

fn block(builder: &mut Builder<'_>, net: &ConvNextArch, dim: usize, at: &str, x: &Value) -> Value {
    let window = Window { kernel: net.kernel, stride: 1, padding: net.kernel / 2 };
    let y = builder.conv(&format!("{at}.conv_dw"), x, window, dim);
    let y = builder.transpose(at, &y, &[0, 2, 3, 1]); // [batch, h, w, dim]
    let y = builder.layer_norm(&format!("{at}.norm"), &y, net.eps);
    let y = builder.linear(&format!("{at}.mlp.fc1"), &y, None);
    let y = builder.gelu(&format!("{at}.mlp"), &y);
    let scale = net.layer_scale.map(|_| format!("{at}.gamma"));
    let y = builder.linear(&format!("{at}.mlp.fc2"), &y, scale.as_deref());
    let y = builder.transpose(at, &y, &[0, 3, 1, 2]); // [batch, dim, h, w]
    builder.add(at, x, &y)
}

/// A norm of each pixel of `[batch, channels, h, w]`.
fn pixel_norm(builder: &mut Builder<'_>, path: &str, x: &Value, eps: f64) -> Value {
    let x = builder.transpose(path, x, &[0, 2, 3, 1]);
    let x = builder.layer_norm(path, &x, eps);
    builder.transpose(path, &x, &[0, 3, 1, 2])
}
