//! I-JEPA's predictor: what lies at other places, from the tokens of a context.
//!
//! Assran et al., 2023, <https://arxiv.org/abs/2301.08243>, section 3 "Prediction"; structure, initialization and key names of
//! `VisionTransformerPredictor` in facebookresearch/ijepa `src/models/vision_transformer.py` (whose rescaling of some layers is overwritten
//! by `src/helper.py`, so that every linear layer has a deviation of 0.02).

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, TensorData};

use super::block::{Block, BlockArch, LinearInit};
use super::config::MlpKind;
use super::layers::{LayerNorm, Linear};
use super::pass::Pass;
use super::position::sincos_table;
use super::scope::{Init, Scope};
use super::vit_arch::VitArch;

/// Structure of a predictor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictorArch {
    /// Width of the encoder's tokens.
    pub encoder_dim: usize,
    /// Rows and columns of patches.
    pub grid: [usize; 2],
    /// Width of the predictor's tokens, a multiple of 4.
    pub dim: usize,
    /// Blocks.
    pub depth: usize,
    /// Attention heads; divides `dim`.
    pub heads: usize,
    /// Epsilon of the layer norms.
    pub eps: f64,
}

impl PredictorArch {
    /// Makes the structure for an encoder.
    #[must_use]
    pub fn for_encoder(encoder: &VitArch, dim: usize, depth: usize, heads: usize) -> Self {
        Self { encoder_dim: encoder.dim, grid: encoder.grid(), dim, depth, heads, eps: 1e-6 }
    }
}

/// A narrow vision transformer over context tokens and mask tokens, each with a fixed sine-cosine position.
#[derive(Module, Debug)]
#[expect(clippy::struct_field_names, reason = "the keys of I-JEPA's checkpoints")]
pub struct Predictor {
    predictor_embed: Linear,
    mask_token: Param<Tensor<3>>,
    predictor_pos_embed: Param<Tensor<3>>,
    predictor_blocks: Vec<Block>,
    predictor_norm: LayerNorm,
    predictor_proj: Linear,
}

impl Predictor {
    /// Builds a predictor.
    #[must_use]
    pub fn new(arch: &PredictorArch, scope: &Scope) -> Self {
        let PredictorArch { encoder_dim, grid, dim, depth, heads, eps } = *arch;
        let init = LinearInit::TruncatedNormal(0.02);
        let block = BlockArch {
            dim,
            heads,
            hidden: 4 * dim,
            mlp: MlpKind::Gelu,
            qkv_bias: true,
            key_bias: true,
            qk_norm: false,
            layer_scale: None,
            eps,
            init,
        };
        Self {
            predictor_embed: init.linear(encoder_dim, dim, true, &scope.enter("predictor_embed")),
            mask_token: scope.param("mask_token", [1, 1, dim], Init::TruncatedNormal(0.02)),
            predictor_pos_embed: scope.buffer(
                "predictor_pos_embed",
                sincos_table(grid, dim),
                [1, grid[0] * grid[1], dim],
            ),
            predictor_blocks: (0..depth)
                .map(|index| Block::new(&block, index, 0.0, &scope.enter("predictor_blocks").enter(index)))
                .collect(),
            predictor_norm: LayerNorm::new(dim, eps, &scope.enter("predictor_norm")),
            predictor_proj: init.linear(dim, encoder_dim, true, &scope.enter("predictor_proj")),
        }
    }

    /// Predicts the tokens of each target block, one block at a time. `contexts[i]` lists the patches of image `i` in the order of its
    /// tokens, `targets` the patches of each block: of the first image, then of the second, and so on.
    ///
    /// # Shapes
    /// `[batch, context, encoder_dim]` to `[batch * blocks, target, encoder_dim]`.
    ///
    /// # Panics
    /// When the lists do not match the tokens or differ in length.
    #[must_use]
    pub fn forward(
        &self,
        tokens: Tensor<3>,
        contexts: &[Vec<usize>],
        targets: &[Vec<usize>],
        pass: &Pass,
    ) -> Tensor<3> {
        let x = self.predictor_embed.forward(tokens);
        let [batch, seen, dim] = x.dims();
        let (blocks, rows) = (targets.len() / batch, targets.len());
        assert_eq!(rows, blocks * batch, "every image has the same number of target blocks");
        let x = x + self.positions(contexts);
        // each block is predicted from the same context
        let x = x.unsqueeze_dim::<4>(1).expand([batch, blocks, seen, dim]).reshape([rows, seen, dim]);
        let asked = self.positions(targets);
        let count = asked.dims()[1];
        let x = Tensor::cat(vec![x, asked + self.mask_token.val()], 1);
        let x = self.predictor_blocks.iter().fold(x, |x, block| block.forward(x, pass));
        self.predictor_proj.forward(self.predictor_norm.forward(x).narrow(1, seen, count))
    }

    /// Positions of the patches of each list, `[lists, patches, dim]`.
    fn positions(&self, lists: &[Vec<usize>]) -> Tensor<3> {
        let [_, patches, dim] = self.predictor_pos_embed.dims();
        let each = lists.first().map_or(0, Vec::len);
        assert!(lists.iter().all(|list| list.len() == each), "lists of patches differ in length");
        let index: Vec<i64> = lists
            .iter()
            .flatten()
            .map(|&patch| i64::try_from(patch).expect("a grid has fewer than 2^63 cells"))
            .collect();
        let table = self.predictor_pos_embed.val().reshape([patches, dim]);
        let index = Tensor::<1, Int>::from_data(TensorData::new(index, [lists.len() * each]), &table.device());
        table.select(0, index).reshape([lists.len(), each, dim])
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::model::params::Layout;

    fn predictor() -> Predictor {
        let arch = PredictorArch { encoder_dim: 6, grid: [2, 4], dim: 8, depth: 2, heads: 2, eps: 1e-6 };
        Predictor::new(&arch, &Scope::new(1, &Device::flex()))
    }

    fn tokens(batch: usize, count: usize) -> Tensor<3> {
        let values: Vec<f32> = (0..batch * count * 6).map(|i| (i as f32 * 0.7).sin()).collect();
        Tensor::from_data(TensorData::new(values, [batch, count, 6]), &Device::flex())
    }

    fn numbers(x: Tensor<3>) -> Vec<f32> {
        x.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn blocks_are_predicted_on_their_own_in_the_order_given() {
        let (net, x) = (predictor(), tokens(2, 3));
        let contexts = vec![vec![0, 1, 5], vec![2, 3, 7]];
        let targets = vec![vec![2, 3], vec![6, 7], vec![0, 1], vec![4, 5]];
        let all = numbers(net.forward(x.clone(), &contexts, &targets, &Pass::eval()));
        assert_eq!(all.len(), 4 * 2 * 6);
        for (row, target) in targets.iter().enumerate() {
            let image = row / 2;
            let own = x.clone().narrow(0, image, 1);
            let alone = net.forward(own, &contexts[image..=image], std::slice::from_ref(target), &Pass::eval());
            let alone = numbers(alone);
            assert!(alone.iter().zip(&all[row * 12..]).all(|(a, b)| (a - b).abs() < 1e-5), "{row}");
        }
        assert!((all[0] - all[6]).abs() > 1e-6, "places differ");
    }

    #[test]
    fn paths_are_the_keys_of_ijepa() {
        let layout = Layout::of(&predictor());
        let outer: Vec<&str> = layout
            .entries()
            .iter()
            .map(|entry| entry.path.as_str())
            .filter(|path| !path.starts_with("predictor_blocks."))
            .collect();
        assert_eq!(
            outer,
            [
                "predictor_embed.weight",
                "predictor_embed.bias",
                "mask_token",
                "predictor_pos_embed",
                "predictor_norm.weight",
                "predictor_norm.bias",
                "predictor_proj.weight",
                "predictor_proj.bias",
            ]
        );
        assert_eq!(layout.num_buffers(), 8 * 8, "positions are not trained");
    }
}
