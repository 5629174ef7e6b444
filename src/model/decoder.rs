//! MAE's decoder.
//!
//! He, Chen, Xie, Li, Dollar, Girshick, 2021, <https://arxiv.org/abs/2111.06377>; structure, initialization and key names of
//! facebookresearch/mae `models_mae.py`.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::block::{Block, BlockArch, LinearInit};
use super::config::MlpKind;
use super::error::ConfigError;
use super::layers::{LayerNorm, Linear};
use super::pass::Pass;
use super::position::sincos_table;
use super::scope::{Init, Scope};
use super::vit::gather_tokens;
use super::vit_arch::VitArch;
use crate::mask::removed;

/// Structure of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderArch {
    /// Width of the encoder's tokens.
    pub encoder_dim: usize,
    /// The encoder puts out a class token first.
    pub class_token: bool,
    /// Register tokens that follow; the decoder ignores them.
    pub registers: usize,
    /// Rows and columns of patches.
    pub grid: [usize; 2],
    /// Values per patch: side * side * channels.
    pub patch_values: usize,
    /// Width of the decoder's tokens.
    pub dim: usize,
    /// Blocks.
    pub depth: usize,
    /// Attention heads.
    pub heads: usize,
    /// Hidden width of the MLP (MAE: four times `dim`).
    pub hidden: usize,
    /// Epsilon of the layer norms (MAE: 1e-6).
    pub eps: f64,
}

impl DecoderArch {
    /// Resolves a decoder for an encoder.
    ///
    /// # Errors
    /// When the sizes do not fit together; keys are those of `[method.mae]`.
    pub fn for_encoder(encoder: &VitArch, dim: usize, depth: usize, heads: usize) -> Result<Self, ConfigError> {
        let arch = Self {
            encoder_dim: encoder.dim,
            class_token: encoder.class_token,
            registers: encoder.registers,
            grid: encoder.grid(),
            patch_values: encoder.patch * encoder.patch * encoder.channels,
            dim,
            depth,
            heads,
            hidden: 4 * dim,
            eps: 1e-6,
        };
        arch.check()?;
        Ok(arch)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let Self { dim, heads, .. } = *self;
        if dim == 0 || !dim.is_multiple_of(4) {
            return Err(ConfigError::new(
                "method.mae.decoder_dim",
                format!("the sine-cosine embedding needs a positive width divisible by 4, got {dim}"),
                format!("set it to {}", dim.max(1).next_multiple_of(4)),
            ));
        }
        if heads == 0 || !dim.is_multiple_of(heads) {
            return Err(ConfigError::new(
                "method.mae.decoder_heads",
                format!("a decoder width of {dim} does not divide into {heads} heads"),
                "use a number of heads that divides `decoder_dim`",
            ));
        }
        Ok(())
    }
}

/// Predicts the pixels of every patch from the encoded visible ones. Its module paths are MAE's keys.
#[derive(Module, Debug)]
#[expect(clippy::struct_field_names, reason = "the keys of MAE's checkpoints")]
pub struct Decoder {
    decoder_embed: Linear,
    mask_token: Param<Tensor<3>>,
    decoder_pos_embed: Param<Tensor<3>>,
    decoder_blocks: Vec<Block>,
    decoder_norm: LayerNorm,
    decoder_pred: Linear,
    #[module(skip)]
    arch: DecoderArch,
}

impl Decoder {
    /// Builds a decoder.
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn new(arch: &DecoderArch, scope: &Scope) -> Result<Self, ConfigError> {
        arch.check()?;
        let DecoderArch { dim, heads, hidden, eps, .. } = *arch;
        let init = LinearInit::Xavier;
        let block = BlockArch {
            dim,
            heads,
            hidden,
            mlp: MlpKind::Gelu,
            qkv_bias: true,
            key_bias: true,
            qk_norm: false,
            layer_scale: None,
            eps,
            init,
        };
        let prefix = usize::from(arch.class_token);
        let mut table = vec![0.0; prefix * dim];
        table.extend(sincos_table(arch.grid, dim));
        let [rows, columns] = arch.grid;
        Ok(Self {
            decoder_embed: init.linear(arch.encoder_dim, dim, true, &scope.enter("decoder_embed")),
            mask_token: scope.param("mask_token", [1, 1, dim], Init::Normal(0.02)),
            decoder_pos_embed: scope.buffer("decoder_pos_embed", table, [1, prefix + rows * columns, dim]),
            decoder_blocks: (0..arch.depth)
                .map(|index| Block::new(&block, index, 0.0, &scope.enter("decoder_blocks").enter(index)))
                .collect(),
            decoder_norm: LayerNorm::new(dim, eps, &scope.enter("decoder_norm")),
            decoder_pred: init.linear(dim, arch.patch_values, true, &scope.enter("decoder_pred")),
            arch: arch.clone(),
        })
    }

    /// Returns the structure.
    #[must_use]
    pub fn arch(&self) -> &DecoderArch {
        &self.arch
    }

    /// Predicts all patches. `kept[i]` lists the patches of image `i` that the encoder saw, in the order of its tokens.
    ///
    /// # Shapes
    /// `[batch, prefix + kept, encoder_dim]` to `[batch, patches, side * side * channels]`; the values of a patch go by row, column,
    /// channel.
    ///
    /// # Panics
    /// When `kept` does not match the tokens.
    #[must_use]
    pub fn forward(&self, tokens: Tensor<3>, kept: &[Vec<usize>], pass: &Pass) -> Tensor<3> {
        let num_patches = self.arch.grid[0] * self.arch.grid[1];
        let class = usize::from(self.arch.class_token);
        let prefix = class + self.arch.registers;
        let x = self.decoder_embed.forward(tokens);
        let [batch, count, dim] = x.dims();
        let seen = count - prefix;
        assert!(kept.iter().all(|list| list.len() == seen), "the encoder put out {seen} patches");
        // Visible tokens, then copies of the mask token, brought into the order of the patches: every token is read
        // once, so the gradient of the gather adds nothing twice, in no order.
        let masks = self.mask_token.val().expand([batch, num_patches - seen, dim]);
        let restore: Vec<Vec<usize>> = kept.iter().map(|list| restore_order(list, num_patches)).collect();
        let patches = gather_tokens(Tensor::cat(vec![x.clone().narrow(1, prefix, seen), masks], 1), &restore);
        let x = if class == 0 { patches } else { Tensor::cat(vec![x.narrow(1, 0, 1), patches], 1) };
        let x = x + self.decoder_pos_embed.val();
        let x = self.decoder_blocks.iter().fold(x, |x, block| block.forward(x, pass));
        let x = self.decoder_pred.forward(self.decoder_norm.forward(x));
        if class == 0 { x } else { x.narrow(1, 1, num_patches) }
    }
}

/// Where each patch lies in the list of the kept ones followed by the removed ones in ascending order.
fn restore_order(kept: &[usize], num_patches: usize) -> Vec<usize> {
    let mut place = vec![0; num_patches];
    for (position, &patch) in kept.iter().enumerate() {
        place[patch] = position;
    }
    let removed = removed(kept, num_patches);
    for (position, patch) in (0..num_patches).filter(|&patch| removed[patch]).enumerate() {
        place[patch] = kept.len() + position;
    }
    place
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::model::params::Layout;

    fn arch() -> DecoderArch {
        DecoderArch {
            encoder_dim: 8,
            class_token: true,
            registers: 2,
            grid: [2, 3],
            patch_values: 12,
            dim: 8,
            depth: 1,
            heads: 2,
            hidden: 16,
            eps: 1e-6,
        }
    }

    #[test]
    fn patches_go_back_to_their_places() {
        assert_eq!(restore_order(&[4, 0, 2], 6), [1, 3, 2, 4, 0, 5]);
    }

    #[test]
    fn the_order_of_the_kept_patches_does_not_matter() {
        let decoder = Decoder::new(&arch(), &Scope::new(1, &Device::flex())).unwrap();
        let token = |patch: usize| (0..8).map(move |i| ((patch * 8 + i) as f32).sin());
        let predict = |kept: Vec<usize>| {
            let values: Vec<f32> = [100, 101, 102].into_iter().chain(kept.clone()).flat_map(token).collect();
            let tokens = Tensor::from_data(TensorData::new(values, [1, 3 + kept.len(), 8]), &Device::flex());
            decoder.forward(tokens, &[kept], &Pass::eval()).into_data().try_to_vec::<f32>().unwrap()
        };
        let reference = predict(vec![4, 0, 2]);
        assert_eq!(reference.len(), 6 * 12);
        assert_eq!(predict(vec![0, 2, 4]), reference);
        assert_ne!(predict(vec![0, 2, 5]), reference);
    }

    #[test]
    fn paths_are_the_keys_of_mae() {
        let decoder = Decoder::new(&arch(), &Scope::new(1, &Device::flex())).unwrap();
        let layout = Layout::of(&decoder);
        let outer: Vec<&str> = layout
            .entries()
            .iter()
            .map(|entry| entry.path.as_str())
            .filter(|path| !path.starts_with("decoder_blocks.0."))
            .collect();
        assert_eq!(
            outer,
            [
                "decoder_embed.weight",
                "decoder_embed.bias",
                "mask_token",
                "decoder_pos_embed",
                "decoder_norm.weight",
                "decoder_norm.bias",
                "decoder_pred.weight",
                "decoder_pred.bias",
            ]
        );
        assert_eq!(layout.num_buffers(), 7 * 8, "the sine-cosine table is not trained");
    }

    #[test]
    fn sizes_are_checked() {
        let fail = |dim, heads| DecoderArch { dim, heads, ..arch() }.check().unwrap_err().key;
        assert_eq!(fail(10, 2), "method.mae.decoder_dim");
        assert_eq!(fail(8, 3), "method.mae.decoder_heads");
    }
}
