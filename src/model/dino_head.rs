//! DINO's head: an MLP, then cosine similarities to prototypes.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::activation::gelu;

use super::layers::Linear;
use super::macs::multiplied;
use super::scope::{Init, Scope};
use super::trace::seen;

/// Structure of the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DinoHeadArch {
    /// Width of the features.
    pub inputs: usize,
    /// Width of the hidden layers.
    pub hidden: usize,
    /// Linear layers in front of the prototypes.
    pub layers: usize,
    /// Width of the bottleneck.
    pub bottleneck: usize,
    /// Prototypes.
    pub prototypes: usize,
    /// All prototypes have length 1; otherwise each has a trained length that starts at 1.
    pub norm_last_layer: bool,
}

/// Linear layers with GELU between them, the result scaled to length 1, and its products with prototypes of length 1.
///
/// Caron et al., 2021, <https://arxiv.org/abs/2104.14294>, appendix C; `DINOHead` of the official code with `use_bn=False`. torch's weight norm
/// keeps lengths (`weight_g`) and directions (`weight_v`) apart; with `norm_last_layer` the lengths are 1 and no parameter. iBOT and
/// `DINOv2` use the same head, `DINOv2` always with trained lengths.
#[derive(Module, Debug)]
pub struct DinoHead {
    mlp: Vec<Linear>,
    last_layer: Prototypes,
}

#[derive(Module, Debug)]
struct Prototypes {
    weight_g: Option<Param<Tensor<2>>>,
    weight_v: Param<Tensor<2>>,
}

impl DinoHead {
    /// Builds a head.
    ///
    /// Linear layers are drawn from a truncated normal of deviation 0.02 without biases' offset, prototypes as torch's default layer.
    #[must_use]
    pub fn new(arch: &DinoHeadArch, scope: &Scope) -> Self {
        let DinoHeadArch { inputs, hidden, layers, bottleneck, prototypes, norm_last_layer } = *arch;
        let layers = layers.max(1);
        let dim = |index| match index {
            0 => inputs,
            _ if index == layers => bottleneck,
            _ => hidden,
        };
        let mlp = (0..layers).map(|index| {
            let scope = scope.enter("mlp").enter(index);
            Linear::new(dim(index), dim(index + 1), Init::TruncatedNormal(0.02), Some(Init::Zeros), &scope)
        });
        let init = Init::Uniform(1.0 / (bottleneck as f64).sqrt());
        let scope = scope.enter("last_layer");
        let weight_v = scope.param("weight_v", [prototypes, bottleneck], init);
        let weight_g = (!norm_last_layer).then(|| scope.param("weight_g", [prototypes, 1], Init::Ones));
        Self { mlp: mlp.collect(), last_layer: Prototypes { weight_g, weight_v } }
    }

    /// Compares features with the prototypes.
    ///
    /// # Shapes
    /// `[batch, in]` to `[batch, prototypes]`.
    #[must_use]
    pub fn forward(&self, features: Tensor<2>) -> Tensor<2> {
        let mut x = features;
        for (index, layer) in self.mlp.iter().enumerate() {
            x = layer.forward(if index == 0 { x } else { gelu(x) });
        }
        let Prototypes { weight_g, weight_v } = &self.last_layer;
        let directions = unit_rows(weight_v.val());
        let prototypes = match weight_g {
            Some(lengths) => directions * lengths.val(),
            None => directions,
        };
        let similarities = crate::ops::linear(unit_rows(x), prototypes, None);
        multiplied(&similarities, weight_v.dims()[1]);
        seen(weight_v.id, &similarities);
        similarities
    }
}

/// Scales rows to length 1. The smallest squared norm is 1e-12 (torch: a norm of 1e-12, whose square `f32` has no number for).
fn unit_rows(x: Tensor<2>) -> Tensor<2> {
    let norm = x.clone().square().sum_dim(1).clamp_min(1e-12).sqrt();
    x / norm
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::model::params::Layout;

    #[test]
    fn keys_shapes_and_cosines() {
        let arch =
            DinoHeadArch { inputs: 6, hidden: 8, layers: 3, bottleneck: 4, prototypes: 10, norm_last_layer: true };
        let head = DinoHead::new(&arch, &Scope::new(1, &Device::flex()));
        let paths: Vec<String> =
            Layout::of(&head).entries().iter().map(|entry| format!("{} {:?}", entry.path, entry.shape)).collect();
        assert_eq!(
            paths,
            [
                "mlp.0.weight [8, 6]",
                "mlp.0.bias [8]",
                "mlp.1.weight [8, 8]",
                "mlp.1.bias [8]",
                "mlp.2.weight [4, 8]",
                "mlp.2.bias [4]",
                "last_layer.weight_v [10, 4]",
            ]
        );
        let x = Tensor::<2>::from_data([[1.0f32, -2.0, 0.5, 0.0, 3.0, 1.0], [0.0; 6]], &Device::flex());
        let cosines: Vec<f32> = head.forward(x.clone()).into_data().try_to_vec().unwrap();
        assert!(cosines.iter().all(|c| c.abs() <= 1.0 + 1e-6) && cosines[..10].iter().any(|c| c.abs() > 0.1));
        assert!(cosines[10..].iter().all(|c| *c == 0.0), "the zero vector is like nothing, and finite");

        let with_lengths =
            DinoHead::new(&DinoHeadArch { norm_last_layer: false, ..arch }, &Scope::new(1, &Device::flex()));
        let layout = Layout::of(&with_lengths);
        let lengths = layout.entries().iter().find(|entry| entry.path == "last_layer.weight_g").unwrap();
        assert_eq!(lengths.shape, [10, 1]);
        assert_eq!(with_lengths.forward(x).into_data().try_to_vec::<f32>().unwrap(), cosines, "lengths start at 1");
    }
}
