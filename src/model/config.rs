//! The `[backbone.*]` table of a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::position::Bicubic;

/// The network that is pretrained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BackboneConfig {
    /// Residual network (He et al., 2015, <https://arxiv.org/abs/1512.03385>), torchvision's variant.
    Resnet(ResNetConfig),
    /// Vision transformer (Dosovitskiy et al., 2020, <https://arxiv.org/abs/2010.11929>), timm's variant.
    Vit(VitConfig),
    /// `ConvNeXt` (Liu et al., 2022, <https://arxiv.org/abs/2201.03545>), timm's variant.
    Convnext(ConvNextConfig),
}

impl BackboneConfig {
    /// Returns the name of its table.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Resnet(_) => "resnet",
            Self::Vit(_) => "vit",
            Self::Convnext(_) => "convnext",
        }
    }

    /// Lists what differs in the network of `other`; how it is drawn or regularised is no difference.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let table = |config: &Self| -> Option<toml::Table> {
            let mut config = config.clone();
            config.spell_out();
            let mut table = toml::Table::try_from(&config).ok()?.remove(config.name())?.as_table()?.clone();
            table.retain(|key, _| !["drop_path", "init", "zero_init_residual", "size"].contains(&key));
            Some(table)
        };
        if self.name() != other.name() {
            return vec![format!("it is a {}, the recipe's a {}", self.name(), other.name())];
        }
        let (Some(mine), Some(theirs)) = (table(self), table(other)) else { return Vec::new() };
        let mut keys: Vec<&String> = mine.keys().chain(theirs.keys()).collect();
        keys.sort();
        keys.dedup();
        let shown = |value: Option<&toml::Value>| value.map_or_else(|| "absent".to_owned(), ToString::to_string);
        keys.into_iter()
            .filter(|key| mine.get(*key) != theirs.get(*key))
            .map(|key| format!("`{key}` is {} there and {} here", shown(mine.get(key)), shown(theirs.get(key))))
            .collect()
    }

    /// Writes out the sizes that a named size stands for.
    pub fn spell_out(&mut self) {
        match self {
            Self::Resnet(_) => {}
            Self::Vit(vit) => {
                let (dim, depth, heads) = vit.sizes();
                (vit.dim, vit.depth, vit.heads) = (Some(dim), Some(depth), Some(heads));
                vit.prefix_positions = Some(vit.has_prefix_positions());
            }
            Self::Convnext(convnext) => {
                let (depths, dims) = convnext.sizes();
                (convnext.depths, convnext.dims) = (Some(depths), Some(dims));
            }
        }
    }
}

/// A residual network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResNetConfig {
    /// 18, 34, 50, 101 or 152.
    pub depth: usize,
    /// Multiplies the number of channels of every layer (64 in the first stage).
    #[serde(default = "unit")]
    pub width: f64,
    /// First layers.
    #[serde(default)]
    pub stem: Stem,
    /// The last norm of each block starts with a scale of zero, so that every block is the identity at first (Goyal et al., 2017,
    /// <https://arxiv.org/abs/1706.02677>, section 5.1; torchvision's option of that name).
    #[serde(default)]
    pub zero_init_residual: bool,
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
#[expect(clippy::struct_excessive_bools, reason = "independent options, as timm has them")]
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
    /// Hidden width of the MLP as a multiple of `dim`; each half of a gated MLP has two thirds of it.
    #[serde(default = "four")]
    pub mlp_ratio: f64,
    /// Kind of the MLP.
    #[serde(default)]
    pub mlp: MlpKind,
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
    /// Biases of the keys among them; `DINOv3` has none.
    #[serde(default = "yes")]
    pub key_bias: bool,
    /// Layer norm of queries and keys of each head.
    #[serde(default)]
    pub qk_norm: bool,
    /// What stands for the image.
    #[serde(default)]
    pub pool: Pool,
    /// The final norm comes after pooling instead of before (timm's `fc_norm`).
    #[serde(default)]
    pub fc_norm: bool,
    /// A norm in front of the blocks too, and no bias in the patch projection (CLIP's, timm's `pre_norm`).
    #[serde(default)]
    pub pre_norm: bool,
    /// Position embedding.
    #[serde(default)]
    pub position: PositionEmbedding,
    /// How positions are resized for images of another size: `"antialias"` as timm, `"plain"` as MAE, `"offset"` as the code of DINO, iBOT and `DINOv2`.
    #[serde(default)]
    pub resize_positions: Bicubic,
    /// Class token and registers have learned positions too (timm: not `no_embed_class`); absent: unless there are registers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_positions: Option<bool>,
    /// Base of the periods of rotary positions.
    #[serde(default = "hundred")]
    pub rope_base: f64,
    /// Epsilon of the layer norms (timm: 1e-6, `DINOv3`: 1e-5).
    #[serde(default = "millionth")]
    pub norm_eps: f64,
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
            VitSize::Huge => (1280, 32, 16),
            VitSize::Giant => (1536, 40, 24),
        };
        (self.dim.unwrap_or(dim), self.depth.unwrap_or(depth), self.heads.unwrap_or(heads))
    }

    /// Tells whether class token and registers have positions: as written, else unless there are registers.
    pub fn has_prefix_positions(&self) -> bool {
        self.prefix_positions.unwrap_or(self.registers == 0)
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
    /// 1280, 32, 16.
    Huge,
    /// 1536, 40, 24 (`DINOv2`; with `mlp = "swiglu"`).
    Giant,
}

/// Kind of a transformer's MLP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MlpKind {
    /// GELU between two layers.
    #[default]
    Gelu,
    /// Gated by `SiLU` (Shazeer, 2020, <https://arxiv.org/abs/2002.05202>).
    Swiglu,
    /// Gated by GELU.
    Geglu,
}

impl MlpKind {
    /// Tells whether the first layer puts out gates and values.
    #[must_use]
    pub fn is_gated(self) -> bool {
        self != Self::Gelu
    }
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
    /// None; queries and keys of patches are turned by their place instead, as in `DINOv3` (<https://arxiv.org/abs/2508.10104>).
    Rope,
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

/// A `ConvNeXt`; depths and widths default to those of `size`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConvNextConfig {
    /// Named size that sets `depths` and `dims`.
    #[serde(default)]
    pub size: ConvNextSize,
    /// Blocks of each stage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depths: Option<[usize; 4]>,
    /// Channels of each stage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dims: Option<[usize; 4]>,
    /// Side of the stem's patches in pixels; 1 suits images of about 32 px. After 2 the first stage shrinks its input, too, as in timm.
    #[serde(default = "four_pixels")]
    pub patch: usize,
    /// Side of the depthwise convolutions, odd.
    #[serde(default = "seven")]
    pub kernel: usize,
    /// Initial LayerScale (Touvron et al., 2021, <https://arxiv.org/abs/2103.17239>); 0: no LayerScale.
    #[serde(default = "millionth")]
    pub layer_scale: f64,
    /// Stochastic depth rate of the last block, linear from 0 (Huang et al., 2016, <https://arxiv.org/abs/1603.09382>).
    #[serde(default)]
    pub drop_path: f64,
}

impl ConvNextConfig {
    /// Returns depths and widths: what is written, else what the named size says.
    pub fn sizes(&self) -> ([usize; 4], [usize; 4]) {
        let (middle, dim) = match self.size {
            ConvNextSize::Tiny => (9, 96),
            ConvNextSize::Small => (27, 96),
            ConvNextSize::Base => (27, 128),
            ConvNextSize::Large => (27, 192),
        };
        (self.depths.unwrap_or([3, 3, middle, 3]), self.dims.unwrap_or([dim, 2 * dim, 4 * dim, 8 * dim]))
    }
}

/// Named sizes: depths, channels of the first stage, doubled by each further one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ConvNextSize {
    /// 3, 3, 9, 3; 96.
    #[default]
    Tiny,
    /// 3, 3, 27, 3; 96.
    Small,
    /// 3, 3, 27, 3; 128.
    Base,
    /// 3, 3, 27, 3; 192.
    Large,
}

fn four_pixels() -> usize {
    4
}

fn seven() -> usize {
    7
}

fn hundred() -> f64 {
    100.0
}

fn millionth() -> f64 {
    1e-6
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
