//! Vision transformers with timm's structure and key names.
//!
//! Dosovitskiy et al., 2020, <https://arxiv.org/abs/2010.11929>; options as in timm's `VisionTransformer`.

use std::ops::Range;
use std::rc::Rc;

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, TensorData};

use super::block::{Block, BlockArch};
use super::config::{Pool, PositionEmbedding, VitInit};
use super::error::ConfigError;
use super::layers::{Conv2d, ConvArch, LayerNorm, Linear};
use super::macs::multiplied;
use super::pass::Pass;
use super::position::{resize_matrix, sincos_table};
use super::recompute;
use super::rope::Rotary;
use super::scope::{Init, Scope};
use super::segment::{Boundary, Features, Segmented};
use super::trace::seen;
use super::vit_arch::VitArch;
use crate::ops::{self, in_backbone};

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
        multiplied(&x, flat);
        seen(self.proj.weight.id, &x);
        x.reshape([batch, rows * columns, dim])
    }
}

/// A vision transformer. Its module paths are timm's keys.
#[derive(Module, Debug)]
pub struct Vit {
    cls_token: Option<Param<Tensor<3>>>,
    reg_token: Option<Param<Tensor<3>>>,
    pos_embed: Option<Param<Tensor<3>>>,
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
            mlp: arch.mlp,
            qkv_bias: arch.qkv_bias,
            key_bias: arch.key_bias,
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
                PositionEmbedding::Learned => Some(scope.param("pos_embed", positions, Init::TruncatedNormal(0.02))),
                PositionEmbedding::Sincos => {
                    let mut table = vec![0.0; prefix * dim];
                    table.extend(sincos_table(arch.grid(), dim));
                    Some(scope.buffer("pos_embed", table, positions))
                }
                PositionEmbedding::Rope => None,
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
        let grid = self.grid_of(&images);
        in_backbone(|| self.placed(self.patch_embed.forward(images), grid))
    }

    /// As [`embed_patches`](Self::embed_patches), with `mask_token` in place of the projection of the patches where `masked` is
    /// one (`SimMIM`, iBOT); the position is added to either.
    ///
    /// # Shapes
    /// `[batch, channels, h, w]`, `[1, 1, dim]` and `[batch, patches, 1]` to `[batch, patches, dim]`.
    #[must_use]
    pub fn embed_masked(&self, images: Tensor<4>, mask_token: Tensor<3>, masked: Tensor<3>) -> Tensor<3> {
        let grid = self.grid_of(&images);
        let seen = masked.clone().neg() + 1.0;
        in_backbone(|| self.placed(self.patch_embed.forward(images) * seen + mask_token * masked, grid))
    }

    /// Encodes patch tokens: puts class and register tokens in front, runs the blocks and the final norm.
    ///
    /// # Shapes
    /// `[batch, tokens, dim]` to `[batch, prefix + tokens, dim]`.
    ///
    /// # Panics
    /// When positions are rotary and these are not the patches of images of the network's own size: then see
    /// [`encode_tokens_at`](Self::encode_tokens_at).
    #[must_use]
    pub fn encode_tokens(&self, tokens: Tensor<3>, pass: &mut Pass) -> Tensor<3> {
        self.encode_tokens_at(tokens, self.arch.grid(), None, pass)
    }

    /// As [`encode_tokens`](Self::encode_tokens), for the patches of a grid of any size, row by row; or for those of each image that are
    /// `kept`, in that order.
    ///
    /// # Shapes
    /// As [`encode_tokens`](Self::encode_tokens).
    ///
    /// # Panics
    /// When positions are rotary and the tokens are not those named.
    #[must_use]
    pub fn encode_tokens_at(
        &self,
        tokens: Tensor<3>,
        grid: [usize; 2],
        kept: Option<&[Vec<usize>]>,
        pass: &mut Pass,
    ) -> Tensor<3> {
        let x = self.with_prefix(tokens);
        let Some(count) = recompute::blocks() else {
            let x = self.through(0..self.blocks.len(), x, grid, kept, pass);
            return in_backbone(|| self.final_norm(x));
        };
        let net = Rc::new(self.clone());
        let kept: Option<Rc<[Vec<usize>]>> = kept.map(Into::into);
        let x = (0..self.blocks.len()).step_by(count).fold(x, |x, first| {
            let (blocks, kept) = (first..self.blocks.len().min(first + count), kept.clone());
            let run = move |net: &Self, x, pass: &mut Pass| net.through(blocks.clone(), x, grid, kept.as_deref(), pass);
            recompute::part(&net, x, pass, run)
        });
        in_backbone(|| self.final_norm(x))
    }

    /// Runs some of the blocks.
    fn through(
        &self,
        blocks: Range<usize>,
        x: Tensor<3>,
        grid: [usize; 2],
        kept: Option<&[Vec<usize>]>,
        pass: &mut Pass,
    ) -> Tensor<3> {
        let rotary = self.rotary(grid, kept, &x);
        let run = |x, block: &Block| block.forward_rotary(x, rotary.as_ref(), pass);
        in_backbone(|| self.blocks[blocks].iter().fold(x, run))
    }

    /// Returns the tokens after each of the first `count` blocks, without the final norm.
    ///
    /// # Shapes
    /// Each `[batch, prefix + patches, dim]`.
    #[must_use]
    pub fn block_outputs(&self, images: Tensor<4>, count: usize, pass: &mut Pass) -> Vec<Tensor<3>> {
        let grid = self.grid_of(&images);
        let mut x = self.with_prefix(self.embed_patches(images));
        let mut outputs = Vec::with_capacity(count);
        let net = recompute::blocks().map(|_| Rc::new(self.clone()));
        for index in 0..count {
            let run = move |net: &Self, x, pass: &mut Pass| net.through(index..index + 1, x, grid, None, pass);
            x = match &net {
                Some(net) => recompute::part(net, x, pass, run),
                None => run(self, x, pass),
            };
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

    /// Rows and columns of patches.
    pub(super) fn grid_of(&self, images: &Tensor<4>) -> [usize; 2] {
        let [_, _, height, width] = images.dims();
        [height / self.arch.patch, width / self.arch.patch]
    }

    /// Angles of the tokens, where positions are rotary.
    fn rotary(&self, grid: [usize; 2], kept: Option<&[Vec<usize>]>, x: &Tensor<3>) -> Option<Rotary> {
        let VitArch { dim, heads, rope_base, .. } = self.arch;
        (self.arch.position == PositionEmbedding::Rope)
            .then(|| Rotary::new(self.arch.num_prefix(), grid, kept, dim / heads, rope_base, &x.device()))
    }

    /// Adds the positions of a grid of patches, unless they are rotary. `[batch, patches, dim]`
    fn placed(&self, x: Tensor<3>, grid: [usize; 2]) -> Tensor<3> {
        let Some(table) = &self.pos_embed else { return x };
        let own = self.arch.grid();
        let prefix = if self.arch.prefix_positions { self.arch.num_prefix() } else { 0 };
        let patches = own[0] * own[1];
        let table = table.val().narrow(1, prefix, patches);
        if grid == own {
            return x + table;
        }
        let count = grid[0] * grid[1];
        let matrix = TensorData::new(resize_matrix(own, grid, self.arch.resize), [count, patches]);
        let matrix = Tensor::<2>::from_data(matrix, &table.device());
        x + matrix.matmul(table.reshape([patches, self.arch.dim])).reshape([1, count, self.arch.dim])
    }

    /// Puts class and register tokens with their positions in front, then the norm before the blocks.
    fn with_prefix(&self, tokens: Tensor<3>) -> Tensor<3> {
        let [batch, _, dim] = tokens.dims();
        let prefix: Vec<_> = self.cls_token.iter().chain(&self.reg_token).map(Param::val).collect();
        let x = if prefix.is_empty() {
            tokens
        } else {
            let mut prefix = Tensor::cat(prefix, 1);
            if let Some(table) = self.pos_embed.as_ref().filter(|_| self.arch.prefix_positions) {
                prefix = prefix + table.val().narrow(1, 0, self.arch.num_prefix());
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
            let images = x.into_map();
            let grid = self.grid_of(&images);
            return Boundary::Tokens(self.with_prefix(self.embed_patches(images)), grid);
        }
        let (x, grid) = x.into_tokens();
        if let Some(block) = self.blocks.get(index - 1) {
            let rotary = self.rotary(grid, None, &x);
            return Boundary::Tokens(block.forward_rotary(x, rotary.as_ref(), pass), grid);
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
    use crate::model::VitConfig;

    fn config() -> VitConfig {
        toml::from_str("patch = 8").unwrap()
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
