//! Projection heads.

use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::activation::relu;

use super::layers::{Affine, BatchNorm, Linear};
use super::pass::Pass;
use super::scope::Scope;

/// Structure of a projection head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProjectionHeadArch {
    /// Widths, from the features to the projections.
    pub dims: Vec<usize>,
    /// Biases of the hidden layers.
    pub hidden_bias: bool,
    /// Batch norm between a hidden layer and its `ReLU`.
    pub hidden_norm: bool,
    /// The last layer.
    pub last: LastLayer,
}

/// The last layer of a projection head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastLayer {
    /// A linear layer, with or without bias.
    Linear {
        /// Has a bias.
        bias: bool,
    },
    /// A linear layer without bias, then batch norm.
    Norm(Affine),
}

impl ProjectionHeadArch {
    /// SimCLR (Chen et al., 2020, <https://arxiv.org/abs/2002.05709>) as google-research/simclr `model_util.py` has it: every
    /// linear layer is without bias and followed by batch norm, whose last one has no offset. Two layers in the paper, three in
    /// the released code.
    #[must_use]
    pub fn simclr(inputs: usize, hidden: usize, out: usize, layers: usize) -> Self {
        Self::mlp(inputs, hidden, out, layers, LastLayer::Norm(Affine::Scale))
    }

    /// `layers` linear layers; the hidden ones without bias, with batch norm and `ReLU`.
    #[must_use]
    pub fn mlp(inputs: usize, hidden: usize, out: usize, layers: usize, last: LastLayer) -> Self {
        let mut dims = vec![inputs];
        dims.extend(std::iter::repeat_n(hidden, layers.saturating_sub(1)));
        dims.push(out);
        Self { dims, hidden_bias: false, hidden_norm: true, last }
    }

    /// The same with biases in the hidden layers.
    #[must_use]
    pub fn with_hidden_bias(self) -> Self {
        Self { hidden_bias: true, ..self }
    }

    /// The same with biases instead of batch norms in the hidden layers.
    #[must_use]
    pub fn without_norm(self) -> Self {
        Self { hidden_bias: true, hidden_norm: false, ..self }
    }
}

/// Linear, batch norm and `ReLU`, repeated; the last layer as its structure says.
///
/// Weights are drawn as torch's default linear layers (SimCLR's own code draws them from a normal of deviation 0.01, which
/// the norm behind them undoes).
#[derive(Module, Debug)]
pub struct ProjectionHead {
    layers: Vec<ProjectionLayer>,
}

#[derive(Module, Debug)]
struct ProjectionLayer {
    linear: Linear,
    norm: Option<BatchNorm>,
}

impl ProjectionHead {
    /// Builds a head.
    ///
    /// # Panics
    /// When there are fewer than two widths.
    #[must_use]
    pub fn new(arch: &ProjectionHeadArch, scope: &Scope) -> Self {
        let count =
            arch.dims.len().checked_sub(1).filter(|&count| count > 0).expect("a head has an input and an output");
        let layers = arch.dims.windows(2).enumerate().map(|(index, dims)| {
            let scope = scope.enter("layers").enter(index);
            let (bias, affine) = match arch.last {
                _ if index + 1 < count => (arch.hidden_bias, arch.hidden_norm.then_some(Affine::Full)),
                LastLayer::Linear { bias } => (bias, None),
                LastLayer::Norm(affine) => (false, Some(affine)),
            };
            ProjectionLayer {
                linear: Linear::torch_default(dims[0], dims[1], bias, &scope.enter("linear")),
                norm: affine.map(|affine| BatchNorm::new(dims[1], affine, &scope.enter("norm"))),
            }
        });
        Self { layers: layers.collect() }
    }

    /// Projects features.
    ///
    /// # Shapes
    /// `[batch, in]` to `[batch, out]`.
    #[must_use]
    pub fn forward(&self, features: Tensor<2>, pass: &mut Pass) -> Tensor<2> {
        let mut x = features;
        for (index, layer) in self.layers.iter().enumerate() {
            let hidden = index + 1 < self.layers.len();
            x = layer.linear.forward(x);
            x = match &layer.norm {
                Some(norm) if hidden => norm.forward_relu(x, pass),
                Some(norm) => norm.forward(x, pass),
                None if hidden => relu(x),
                None => x,
            };
        }
        x
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::model::params::Layout;

    fn paths(arch: &ProjectionHeadArch) -> Vec<String> {
        let head = ProjectionHead::new(arch, &Scope::new(0, &Device::flex()));
        Layout::of(&head).entries().iter().map(|entry| format!("{} {:?}", entry.path, entry.shape)).collect()
    }

    #[test]
    fn simclr_has_no_biases_and_no_last_offset() {
        assert_eq!(
            paths(&ProjectionHeadArch::simclr(8, 6, 4, 2)),
            [
                "layers.0.linear.weight [6, 8]",
                "layers.0.norm.weight [6]",
                "layers.0.norm.bias [6]",
                "layers.0.norm.running_mean [6]",
                "layers.0.norm.running_var [6]",
                "layers.1.linear.weight [4, 6]",
                "layers.1.norm.weight [4]",
                "layers.1.norm.running_mean [4]",
                "layers.1.norm.running_var [4]",
            ]
        );
        assert_eq!(ProjectionHeadArch::simclr(8, 6, 4, 3).dims, [8, 6, 6, 4]);
    }

    #[test]
    fn a_linear_end_has_no_norm() {
        let last = LastLayer::Linear { bias: true };
        let paths = paths(&ProjectionHeadArch { dims: vec![3, 2], hidden_bias: true, hidden_norm: true, last });
        assert_eq!(paths, ["layers.0.linear.weight [2, 3]", "layers.0.linear.bias [2]"]);
    }
}
