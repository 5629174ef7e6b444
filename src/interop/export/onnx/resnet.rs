//! A residual network as nodes. Batch norms are nodes of their own, so that every tensor keeps its name; programs that run ONNX fold them.

use super::graph::{Graph, Value};
use super::layers::{Builder, Window};
use crate::model::{ResNetArch, ResidualKind, Stem};

/// Returns the features of `[batch, channels, h, w]`, `[batch, dim]`.
pub(super) fn features(builder: &mut Builder<'_>, net: &ResNetArch) -> Value {
    let (kernel, stride) = match net.stem {
        Stem::Imagenet => (7, 2),
        Stem::Cifar => (3, 1),
    };
    let mut x = convolved(builder, ["conv1", "bn1"], &Graph::images(), kernel, stride);
    x = relu(builder, "bn1", &x);
    if net.stem == Stem::Imagenet {
        x = builder.max_pool("maxpool", &x, Window { kernel: 3, stride: 2, padding: 1 });
    }
    for (stage, &blocks) in net.layers.iter().enumerate() {
        for index in 0..blocks {
            let stride = if stage > 0 && index == 0 { 2 } else { 1 };
            x = block(builder, net.block, &format!("layer{}.{index}", stage + 1), &x, stride);
        }
    }
    builder.mean_pool("avgpool", &x)
}

fn block(builder: &mut Builder<'_>, kind: ResidualKind, at: &str, x: &Value, stride: usize) -> Value {
    // kernel and stride; the stride of a bottleneck is in its middle (`model::ResNet`)
    let layers: &[(usize, usize)] = match kind {
        ResidualKind::Basic => &[(3, stride), (3, 1)],
        ResidualKind::Bottleneck => &[(1, 1), (3, stride), (1, 1)],
    };
    let mut y = x.clone();
    for (index, &(kernel, stride)) in layers.iter().enumerate() {
        let names = ["conv", "bn"].map(|name| format!("{at}.{name}{}", index + 1));
        y = convolved(builder, names.each_ref().map(String::as_str), &y, kernel, stride);
        if index + 1 < layers.len() {
            y = relu(builder, &names[1], &y);
        }
    }
    let names = ["0", "1"].map(|name| format!("{at}.downsample.{name}"));
    let shortcut = if builder.has(&format!("{}.weight", names[0])) {
        convolved(builder, names.each_ref().map(String::as_str), x, 1, stride)
    } else {
        x.clone()
    };
    let y = builder.add(at, &y, &shortcut);
    relu(builder, at, &y)
}

/// A convolution that keeps the size at stride 1, and its norm.
fn convolved(builder: &mut Builder<'_>, [conv, norm]: [&str; 2], x: &Value, kernel: usize, stride: usize) -> Value {
    let x = builder.conv(conv, x, Window { kernel, stride, padding: kernel / 2 }, 1);
    builder.batch_norm(norm, &x)
}

fn relu(builder: &mut Builder<'_>, at: &str, x: &Value) -> Value {
    builder.graph.node(at, "Relu", &[x], &[])
}
