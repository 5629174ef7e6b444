//! The `[backbone.*]` table of a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The network that is pretrained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BackboneConfig {
    /// Residual network (He et al., 2015, <https://arxiv.org/abs/1512.03385>), torchvision's variant.
    Resnet(ResNetConfig),
    /// Vision transformer (Dosovitskiy et al., 2020, <https://arxiv.org/abs/2010.11929>), timm's variant.
    Vit(VitConfig),
}

/// A residual network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResNetConfig {
    /// 18, 34 or 50.
    pub depth: usize,
    /// Multiplies the number of channels of every layer (64 in the first stage).
    #[serde(default = "unit")]
    pub width: f64,
    /// First layers.
    #[serde(default)]
    pub stem: Stem,
}

/// First layers of a residual network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Stem {
    /// 7x7 convolution with stride 2 and 3x3 max-pooling.
    #[default]
    Imagenet,
    /// 3x3 convolution with stride 1 and no pooling, for images of about 32 px (SimCLR, appendix B.9).
    Cifar,
}

/// A vision transformer; the sizes default to those of `size`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VitConfig {
    /// Named size that sets `dim`, `depth` and `heads`.
    #[serde(default)]
    pub size: VitSize,
    /// Patch side in pixels.
    pub patch: usize,
    /// Width of the tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dim: Option<usize>,
    /// Number of blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<usize>,
    /// Attention heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Hidden width of the MLP as a multiple of `dim`.
    #[serde(default = "four")]
    pub mlp_ratio: f64,
    /// Learned class token in front of the patches.
    #[serde(default = "yes")]
    pub class_token: bool,
    /// Register tokens (Darcet et al., 2023, <https://arxiv.org/abs/2309.16588>).
    #[serde(default)]
    pub registers: usize,
    /// Initial LayerScale (Touvron et al., 2021, <https://arxiv.org/abs/2103.17239>); absent: no LayerScale.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_scale: Option<f64>,
    /// Stochastic depth rate of the last block, linear from 0 (Huang et al., 2016, <https://arxiv.org/abs/1603.09382>).
    #[serde(default)]
    pub drop_path: f64,
    /// Biases of the qkv projection.
    #[serde(default = "yes")]
    pub qkv_bias: bool,
    /// Layer norm of queries and keys of each head.
    #[serde(default)]
    pub qk_norm: bool,
    /// What stands for the image.
    #[serde(default)]
    pub pool: Pool,
    /// Position embedding.
    #[serde(default)]
    pub position: PositionEmbedding,
    /// How the weights are drawn.
    #[serde(default)]
    pub init: VitInit,
}

impl VitConfig {
    /// Returns dim, depth and heads: what is written, else what the named size says.
    pub fn sizes(&self) -> (usize, usize, usize) {
        let (dim, depth, heads) = match self.size {
            VitSize::Tiny => (192, 12, 3),
            VitSize::Small => (384, 12, 6),
            VitSize::Base => (768, 12, 12),
            VitSize::Large => (1024, 24, 16),
        };
        (self.dim.unwrap_or(dim), self.depth.unwrap_or(depth), self.heads.unwrap_or(heads))
    }
}

/// Named sizes: (dim, depth, heads).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VitSize {
    /// 192, 12, 3.
    Tiny,
    /// 384, 12, 6.
    #[default]
    Small,
    /// 768, 12, 12.
    Base,
    /// 1024, 24, 16.
    Large,
}

/// What stands for the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Pool {
    /// The class token.
    #[default]
    Class,
    /// The mean of the patch tokens.
    Mean,
}

/// Position embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PositionEmbedding {
    /// Learned, drawn from a truncated normal of deviation 0.02.
    #[default]
    Learned,
    /// Fixed two-dimensional sines and cosines in MAE's layout, zero for the class token; not trained.
    Sincos,
}

/// How the weights of a vision transformer are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VitInit {
    /// timm: linear weights from a normal of deviation 0.02, the patch projection as torch's convolutions.
    #[default]
    Normal,
    /// MAE: linear weights and the patch projection Xavier-uniform, tokens from a normal of deviation 0.02.
    Xavier,
}

fn unit() -> f64 {
    1.0
}

fn four() -> f64 {
    4.0
}

fn yes() -> bool {
    true
}
