//! Vision transformers with timm's structure and key names.
//!
//! Dosovitskiy et al., 2020, <https://arxiv.org/abs/2010.11929>; options as in timm's `VisionTransformer`.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, TensorData};

use super::config::{Pool, PositionEmbedding, VitConfig, VitInit};
use super::error::ConfigError;
use super::layers::{Block, BlockArch, Conv2d, ConvArch, LayerNorm, Linear, LinearInit};
use super::pass::Pass;
use super::position::{Bicubic, resize_matrix, sincos_table};
use super::scope::{Init, Scope};
use super::segment::{Boundary, Features, Segmented};
use crate::ops;

/// Structure of a vision transformer.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "independent options, as timm has them")]
pub struct VitArch {
    /// Height and width of the images that the position embedding is made for.
    pub image: [usize; 2],
    /// Patch side.
    pub patch: usize,
    /// Channels of the images.
    pub channels: usize,
    /// Width of the tokens.
    pub dim: usize,
    /// Blocks.
    pub depth: usize,
    /// Attention heads.
    pub heads: usize,
    /// Outputs of the first layer of the MLP.
    pub hidden: usize,
    /// `SwiGLU` MLP.
    pub gated: bool,
    /// Class token.
    pub class_token: bool,
    /// Register tokens.
    pub registers: usize,
    /// Class and register tokens have positions too (timm: not `no_embed_class`).
    pub prefix_positions: bool,
    /// Biases of the qkv projections.
    pub qkv_bias: bool,
    /// Layer norm of queries and keys.
    pub qk_norm: bool,
    /// Initial LayerScale.
    pub layer_scale: Option<f64>,
    /// Stochastic depth rate of the last block.
    pub drop_path: f64,
    /// Norm before the blocks, and no bias in the patch projection (timm: `pre_norm`).
    pub pre_norm: bool,
    /// What stands for the image.
    pub pool: Pool,
    /// The final norm comes after pooling instead of before (timm: `fc_norm`).
    pub fc_norm: bool,
    /// Outputs of the classifier `head`; 0: no classifier.
    pub num_classes: usize,
    /// Position embedding.
    pub position: PositionEmbedding,
    /// Resizing of the position embedding for images of another size.
    pub resize: Bicubic,
    /// How weights are drawn.
    pub init: VitInit,
    /// Epsilon of the layer norms.
    pub eps: f64,
}

impl VitArch {
    /// Resolves a recipe's table for square images.
    ///
    /// Mean pooling averages tokens that went through the final norm (timm's `fc_norm=False`), because masked modelling needs
    /// that norm on the tokens. Registers have no positions, as in every timm model that has registers.
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn from_config(config: &VitConfig, image_size: u32) -> Result<Self, ConfigError> {
        let (dim, depth, heads) = config.sizes();
        let side = image_size as usize;
        let arch = Self {
            image: [side, side],
            patch: config.patch,
            channels: 3,
            dim,
            depth,
            heads,
            hidden: (dim as f64 * config.mlp_ratio) as usize,
            gated: false,
            class_token: config.class_token,
            registers: config.registers,
            prefix_positions: config.registers == 0,
            qkv_bias: config.qkv_bias,
            qk_norm: config.qk_norm,
            layer_scale: config.layer_scale,
            drop_path: config.drop_path,
            pre_norm: false,
            pool: config.pool,
            fc_norm: false,
            num_classes: 0,
            position: config.position,
            resize: Bicubic::Antialias,
            init: config.init,
            eps: 1e-6,
        };
        arch.check()?;
        Ok(arch)
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// Names the key of the `[backbone.vit]` table that does not fit.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Self { image: [height, width], patch, dim, depth, heads, .. } = *self;
        let fail = |key: &str, problem: String, hint: String| {
            Err(ConfigError::new(&format!("backbone.vit.{key}"), problem, hint))
        };
        for (key, value) in [("patch", patch), ("dim", dim), ("depth", depth), ("heads", heads)] {
            if value == 0 {
                return fail(key, "0 is too small".to_owned(), "set it to 1 or more".to_owned());
            }
        }
        for side in [height, width] {
            if side == 0 || !side.is_multiple_of(patch) {
                let fitting: Vec<_> =
                    (2..=32).filter(|p| side > 0 && side.is_multiple_of(*p)).map(|p| p.to_string()).collect();
                return fail(
                    "patch",
                    format!("images of {side} px are not a whole number of patches of {patch} px"),
                    if fitting.is_empty() {
                        format!("choose an image size that is a multiple of {patch}")
                    } else {
                        format!(
                            "choose an image size that is a multiple of {patch}, or a patch of {}",
                            fitting.join(", ")
                        )
                    },
                );
            }
        }
        if !dim.is_multiple_of(heads) {
            return fail(
                "heads",
                format!("a width of {dim} does not divide into {heads} heads"),
                format!("use a `dim` that is a multiple of {heads}, such as {}", dim.next_multiple_of(heads)),
            );
        }
        if self.position == PositionEmbedding::Sincos && !dim.is_multiple_of(4) {
            return fail(
                "position",
                format!("a sine-cosine embedding needs a width divisible by 4, `dim` is {dim}"),
                format!("set `dim` to {}, or `position` to \"learned\"", dim.next_multiple_of(4)),
            );
        }
        if self.hidden == 0 || (self.gated && !self.hidden.is_multiple_of(2)) {
            return fail(
                "mlp_ratio",
                format!("the MLP would have {} hidden channels", self.hidden),
                "4 is usual".to_owned(),
            );
        }
        if !(0.0..1.0).contains(&self.drop_path) {
            return fail(
                "drop_path",
                format!("{} is no probability below 1", self.drop_path),
                "0.1 is usual for fine-tuning, 0 for pretraining".to_owned(),
            );
        }
        if self.pool == Pool::Class && !self.class_token {
            return fail(
                "pool",
                "there is no class token to stand for the image".to_owned(),
                "set `pool` to \"mean\", or `class_token` to true".to_owned(),
            );
        }
        Ok(())
    }

    /// Rows and columns of patches.
    #[must_use]
    pub fn grid(&self) -> [usize; 2] {
        self.image.map(|side| side / self.patch)
    }

    /// Class and register tokens.
    #[must_use]
    pub fn num_prefix(&self) -> usize {
        usize::from(self.class_token) + self.registers
    }

    fn linear_init(&self) -> LinearInit {
        match self.init {
            VitInit::Normal => LinearInit::TruncatedNormal(0.02),
            VitInit::Xavier => LinearInit::Xavier,
        }
    }
}

/// Patches to tokens.
#[derive(Module, Debug)]
pub struct PatchEmbed {
    /// Convolution whose stride is its kernel.
    pub proj: Conv2d,
}

impl PatchEmbed {
    fn new(arch: &VitArch, scope: &Scope) -> Self {
        let fan_in = arch.channels * arch.patch * arch.patch;
        let torch_default = Init::Uniform(1.0 / (fan_in as f64).sqrt());
        let weight = match arch.init {
            VitInit::Normal => torch_default,
            VitInit::Xavier => Init::Uniform((6.0 / (fan_in + arch.dim) as f64).sqrt()),
        };
        let (kernel, stride) = (arch.patch, arch.patch);
        let conv = ConvArch { inputs: arch.channels, outputs: arch.dim, kernel, stride, padding: 0 };
        Self { proj: Conv2d::new(conv, weight, (!arch.pre_norm).then_some(torch_default), &scope.enter("proj")) }
    }

    /// Projects every patch. A matrix product over unfolded patches: windows do not overlap, so that is the convolution.
    ///
    /// # Shapes
    /// `[batch, channels, h, w]` to `[batch, patches, dim]`, patches row by row.
    ///
    /// # Panics
    /// When the image is not a whole number of patches.
    fn forward(&self, images: Tensor<4>) -> Tensor<3> {
        let [dim, channels, patch, _] = self.proj.weight.dims();
        let [batch, image_channels, height, width] = images.dims();
        assert_eq!(image_channels, channels, "images have {image_channels} channels, the network takes {channels}");
        assert!(
            height.is_multiple_of(patch) && width.is_multiple_of(patch),
            "an image of {height}x{width} px is not a whole number of patches of {patch} px"
        );
        let (rows, columns) = (height / patch, width / patch);
        let flat = channels * patch * patch;
        let x = images.reshape([batch, channels, rows, patch, columns, patch]).permute([0, 2, 4, 1, 3, 5]);
        let x = x.reshape([batch * rows * columns, flat]);
        let x = ops::linear(x, self.proj.weight.val().reshape([dim, flat]), self.proj.bias.as_ref().map(Param::val));
        x.reshape([batch, rows * columns, dim])
    }
}

/// A vision transformer. Its module paths are timm's keys.
#[derive(Module, Debug)]
pub struct Vit {
    cls_token: Option<Param<Tensor<3>>>,
    reg_token: Option<Param<Tensor<3>>>,
    pos_embed: Param<Tensor<3>>,
    patch_embed: PatchEmbed,
    norm_pre: Option<LayerNorm>,
    blocks: Vec<Block>,
    norm: Option<LayerNorm>,
    fc_norm: Option<LayerNorm>,
    head: Option<Linear>,
    #[module(skip)]
    arch: VitArch,
}

impl Vit {
    /// Builds a network.
    ///
    /// # Errors
    /// When the sizes do not fit together ([`VitArch::check`]).
    pub fn new(arch: &VitArch, scope: &Scope) -> Result<Self, ConfigError> {
        arch.check()?;
        let VitArch { dim, depth, .. } = *arch;
        let [rows, columns] = arch.grid();
        let prefix = if arch.prefix_positions { arch.num_prefix() } else { 0 };
        let positions = [1, prefix + rows * columns, dim];
        let token_std = match arch.init {
            VitInit::Normal => 1e-6,
            VitInit::Xavier => 0.02,
        };
        let block = BlockArch {
            dim,
            heads: arch.heads,
            hidden: arch.hidden,
            gated: arch.gated,
            qkv_bias: arch.qkv_bias,
            qk_norm: arch.qk_norm,
            layer_scale: arch.layer_scale,
            eps: arch.eps,
            init: arch.linear_init(),
        };
        let drop_rate = |index: usize| arch.drop_path * index as f64 / (depth - 1).max(1) as f64;
        let norm = |name, present: bool| present.then(|| LayerNorm::new(dim, arch.eps, &scope.enter(name)));
        Ok(Self {
            cls_token: arch.class_token.then(|| scope.param("cls_token", [1, 1, dim], Init::Normal(token_std))),
            reg_token: (arch.registers > 0)
                .then(|| scope.param("reg_token", [1, arch.registers, dim], Init::Normal(token_std))),
            pos_embed: match arch.position {
                PositionEmbedding::Learned => scope.param("pos_embed", positions, Init::TruncatedNormal(0.02)),
                PositionEmbedding::Sincos => {
                    let mut table = vec![0.0; prefix * dim];
                    table.extend(sincos_table(arch.grid(), dim));
                    scope.buffer(table, positions)
                }
            },
            patch_embed: PatchEmbed::new(arch, &scope.enter("patch_embed")),
            norm_pre: norm("norm_pre", arch.pre_norm),
            blocks: (0..depth)
                .map(|index| Block::new(&block, index, drop_rate(index), &scope.enter("blocks").enter(index)))
                .collect(),
            norm: norm("norm", !arch.fc_norm),
            fc_norm: norm("fc_norm", arch.fc_norm),
            head: (arch.num_classes > 0)
                .then(|| arch.linear_init().linear(dim, arch.num_classes, true, &scope.enter("head"))),
            arch: arch.clone(),
        })
    }

    /// Returns the structure.
    #[must_use]
    pub fn arch(&self) -> &VitArch {
        &self.arch
    }

    /// Embeds the patches: projection plus position, without class and register tokens.
    ///
    /// Images of another size than the network's own get resized positions.
    ///
    /// # Shapes
    /// `[batch, channels, h, w]` to `[batch, patches, dim]`, patches row by row.
    #[must_use]
    pub fn embed_patches(&self, images: Tensor<4>) -> Tensor<3> {
        let [_, _, height, width] = images.dims();
        let grid = [height / self.arch.patch, width / self.arch.patch];
        self.patch_embed.forward(images) + self.patch_positions(grid)
    }

    /// As [`embed_patches`](Self::embed_patches), with `mask_token` in place of the projection of the patches where `masked` is
    /// one (`SimMIM`, iBOT); the position is added to either.
    ///
    /// # Shapes
    /// `[batch, channels, h, w]`, `[1, 1, dim]` and `[batch, patches, 1]` to `[batch, patches, dim]`.
    #[must_use]
    pub fn embed_masked(&self, images: Tensor<4>, mask_token: Tensor<3>, masked: Tensor<3>) -> Tensor<3> {
        let [_, _, height, width] = images.dims();
        let grid = [height / self.arch.patch, width / self.arch.patch];
        let seen = masked.clone().neg() + 1.0;
        self.patch_embed.forward(images) * seen + mask_token * masked + self.patch_positions(grid)
    }

    /// Encodes patch tokens: puts class and register tokens in front, runs the blocks and the final norm.
    ///
    /// # Shapes
    /// `[batch, tokens, dim]` to `[batch, prefix + tokens, dim]`.
    #[must_use]
    pub fn encode_tokens(&self, tokens: Tensor<3>, pass: &mut Pass) -> Tensor<3> {
        let x = self.with_prefix(tokens);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x, pass));
        self.final_norm(x)
    }

    /// Returns the tokens after each of the first `count` blocks, without the final norm.
    ///
    /// # Shapes
    /// Each `[batch, prefix + patches, dim]`.
    #[must_use]
    pub fn block_outputs(&self, images: Tensor<4>, count: usize, pass: &mut Pass) -> Vec<Tensor<3>> {
        let mut x = self.with_prefix(self.embed_patches(images));
        let mut outputs = Vec::with_capacity(count);
        for block in &self.blocks[..count] {
            x = block.forward(x, pass);
            outputs.push(x.clone());
        }
        outputs
    }

    /// Pools encoded tokens into one vector per image.
    ///
    /// # Shapes
    /// `[batch, prefix + patches, dim]` to `[batch, dim]`.
    #[must_use]
    pub fn pool(&self, tokens: Tensor<3>) -> Tensor<2> {
        let [batch, _, dim] = tokens.dims();
        let pooled = match self.arch.pool {
            Pool::Class => tokens.narrow(1, 0, 1),
            Pool::Mean => self.patches(tokens).mean_dim(1),
        };
        let pooled = pooled.reshape([batch, dim]);
        match &self.fc_norm {
            Some(norm) => norm.forward(pooled),
            None => pooled,
        }
    }

    /// Drops class and register tokens.
    ///
    /// # Shapes
    /// `[batch, prefix + patches, dim]` to `[batch, patches, dim]`.
    #[must_use]
    pub fn patches(&self, tokens: Tensor<3>) -> Tensor<3> {
        let (prefix, all) = (self.arch.num_prefix(), tokens.dims()[1]);
        if prefix == 0 { tokens } else { tokens.narrow(1, prefix, all - prefix) }
    }

    /// Runs the whole network.
    ///
    /// # Shapes
    /// `[batch, channels, h, w]` to features `[batch, dim]` and `[batch, patches, dim]`.
    #[must_use]
    pub fn forward(&self, images: Tensor<4>, pass: &mut Pass) -> Features {
        self.forward_segments(images, pass)
    }

    /// Classifies pooled features when the network has a classifier.
    ///
    /// # Shapes
    /// `[batch, dim]` to `[batch, num_classes]`.
    #[must_use]
    pub fn logits(&self, pooled: Tensor<2>) -> Option<Tensor<2>> {
        self.head.as_ref().map(|head| head.forward(pooled))
    }

    /// Positions of the class and register tokens in the table.
    fn prefix_positions(&self) -> usize {
        if self.arch.prefix_positions { self.arch.num_prefix() } else { 0 }
    }

    /// Positions of a grid of patches, `[1, patches, dim]`.
    fn patch_positions(&self, grid: [usize; 2]) -> Tensor<3> {
        let own = self.arch.grid();
        let (prefix, patches) = (self.prefix_positions(), own[0] * own[1]);
        let table = self.pos_embed.val().narrow(1, prefix, patches);
        if grid == own {
            return table;
        }
        let count = grid[0] * grid[1];
        let matrix = TensorData::new(resize_matrix(own, grid, self.arch.resize), [count, patches]);
        let matrix = Tensor::<2>::from_data(matrix, &table.device());
        matrix.matmul(table.reshape([patches, self.arch.dim])).reshape([1, count, self.arch.dim])
    }

    /// Puts class and register tokens with their positions in front, then the norm before the blocks.
    fn with_prefix(&self, tokens: Tensor<3>) -> Tensor<3> {
        let [batch, _, dim] = tokens.dims();
        let prefix: Vec<_> = self.cls_token.iter().chain(&self.reg_token).map(Param::val).collect();
        let x = if prefix.is_empty() {
            tokens
        } else {
            let mut prefix = Tensor::cat(prefix, 1);
            if self.arch.prefix_positions {
                prefix = prefix + self.pos_embed.val().narrow(1, 0, self.arch.num_prefix());
            }
            Tensor::cat(vec![prefix.expand([batch, self.arch.num_prefix(), dim]), tokens], 1)
        };
        match &self.norm_pre {
            Some(norm) => norm.forward(x),
            None => x,
        }
    }

    fn final_norm(&self, x: Tensor<3>) -> Tensor<3> {
        match &self.norm {
            Some(norm) => norm.forward(x),
            None => x,
        }
    }
}

impl Segmented for Vit {
    fn num_segments(&self) -> usize {
        self.blocks.len() + 2
    }

    fn segment_name(&self, index: usize) -> String {
        match index {
            0 => "embed".to_owned(),
            index if index <= self.blocks.len() => format!("blocks.{}", index - 1),
            _ => "pool".to_owned(),
        }
    }

    fn segment_of(&self, path: &str) -> usize {
        if ["norm.", "fc_norm.", "head."].iter().any(|last| path.starts_with(last)) {
            return self.blocks.len() + 1;
        }
        let block = path.strip_prefix("blocks.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        block.map_or(0, |block| block + 1)
    }

    fn forward_segment(&self, index: usize, x: Boundary, pass: &mut Pass) -> Boundary {
        if index == 0 {
            return Boundary::Tokens(self.with_prefix(self.embed_patches(x.into_map())));
        }
        let x = x.into_tokens();
        if let Some(block) = self.blocks.get(index - 1) {
            return Boundary::Tokens(block.forward(x, pass));
        }
        let tokens = self.final_norm(x);
        let pooled = self.pool(tokens.clone());
        Boundary::Features(Features { pooled, patches: Some(self.patches(tokens)) })
    }
}

/// Picks tokens of each image, in the order given.
///
/// # Shapes
/// `[batch, tokens, dim]` and `batch` lists of `k` indices to `[batch, k, dim]`.
///
/// # Panics
/// When there is not one list per image, or the lists differ in length, or an index is not below `tokens`.
#[must_use]
pub fn gather_tokens(tokens: Tensor<3>, kept: &[Vec<usize>]) -> Tensor<3> {
    let [batch, count, dim] = tokens.dims();
    assert_eq!(kept.len(), batch, "one list of tokens per image");
    let each = kept.first().map_or(0, Vec::len);
    let mut rows = Vec::with_capacity(batch * each);
    for (image, list) in kept.iter().enumerate() {
        assert_eq!(list.len(), each, "every image keeps the same number of tokens");
        for &index in list {
            assert!(index < count, "token {index} of {count}");
            rows.push(i64::try_from(image * count + index).expect("a tensor has fewer rows than 2^63"));
        }
    }
    let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [batch * each]), &tokens.device());
    tokens.reshape([batch * count, dim]).select(0, rows).reshape([batch, each, dim])
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn config() -> VitConfig {
        toml::from_str("patch = 8").unwrap()
    }

    #[test]
    fn errors_name_the_key_the_value_and_the_fix() {
        let fail = |config: VitConfig, size| VitArch::from_config(&config, size).unwrap_err().to_string();
        assert_eq!(
            fail(VitConfig { patch: 16, ..config() }, 100),
            "`backbone.vit.patch`: images of 100 px are not a whole number of patches of 16 px\n\
             hint: choose an image size that is a multiple of 16, or a patch of 2, 4, 5, 10, 20, 25"
        );
        assert_eq!(
            fail(VitConfig { dim: Some(100), heads: Some(3), ..config() }, 32),
            "`backbone.vit.heads`: a width of 100 does not divide into 3 heads\n\
             hint: use a `dim` that is a multiple of 3, such as 102"
        );
        assert!(fail(VitConfig { class_token: false, ..config() }, 32).contains("`backbone.vit.pool`"));
        assert!(fail(VitConfig { drop_path: 1.0, ..config() }, 32).contains("`backbone.vit.drop_path`"));
        assert!(fail(VitConfig { depth: Some(0), ..config() }, 32).contains("`backbone.vit.depth`"));
        let sincos = VitConfig { dim: Some(6), heads: Some(2), position: PositionEmbedding::Sincos, ..config() };
        assert!(fail(sincos, 32).contains("set `dim` to 8"));
    }

    #[test]
    fn gathering_is_picking_and_its_gradient_is_putting_back() {
        let device = Device::flex().autodiff();
        let x = Tensor::<3>::from_data([[[1.0f32], [2.0], [3.0]], [[4.0], [5.0], [6.0]]], &device).require_grad();
        let picked = gather_tokens(x.clone(), &[vec![2, 0], vec![1, 2]]);
        assert_eq!(picked.clone().into_data().try_to_vec::<f32>().unwrap(), [3.0, 1.0, 5.0, 6.0]);
        let weights = Tensor::<3>::from_data([[[10.0f32], [20.0]], [[30.0], [40.0]]], &device);
        let gradients = (picked * weights).sum().backward();
        let gradient = x.grad(&gradients).unwrap().into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(gradient, [20.0, 0.0, 10.0, 0.0, 30.0, 40.0]);
    }

    #[test]
    fn stochastic_depth_grows_linearly() {
        let arch = VitArch::from_config(
            &VitConfig { drop_path: 0.2, depth: Some(3), dim: Some(8), heads: Some(1), ..config() },
            16,
        );
        let net = Vit::new(&arch.unwrap(), &Scope::new(0, &Device::flex())).unwrap();
        let debug = format!("{:?}", net.blocks.iter().map(Block::drop_path).collect::<Vec<_>>());
        assert_eq!(debug, format!("{:?}", [[0.0, 0.0], [0.1, 0.1], [0.2, 0.2]]));
    }
}
