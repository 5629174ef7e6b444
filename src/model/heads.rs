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
    /// Biases of the linear layers in front of a norm and ReLU.
    pub hidden_bias: bool,
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
        let mut dims = vec![inputs];
        dims.extend(std::iter::repeat_n(hidden, layers.saturating_sub(1)));
        dims.push(out);
        Self { dims, hidden_bias: false, last: LastLayer::Norm(Affine::Scale) }
    }
}

/// Linear, batch norm and ReLU, repeated; the last layer as its structure says.
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
                _ if index + 1 < count => (arch.hidden_bias, Some(Affine::Full)),
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
            x = layer.linear.forward(x);
            if let Some(norm) = &layer.norm {
                x = norm.forward(x, pass);
            }
            if index + 1 < self.layers.len() {
                x = relu(x);
            }
        }
        x
    }
}
