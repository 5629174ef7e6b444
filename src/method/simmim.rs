//! `SimMIM`: reconstruct the pixels of masked squares from an encoder that sees mask tokens in their place.
//!
//! Xie, Zhang, Cao, Lin, Bao, Yao, Dai, Hu, 2021, <https://arxiv.org/abs/2111.09886>, section 3; official code `microsoft/SimMIM`. Squares of 32 px
//! are masked, their number rounded up; a mask token replaces the embedding of each of their patches before positions are added; one linear
//! layer predicts the pixels of a patch (the official 1x1 convolution and pixel shuffle), and the loss is their absolute error,
//! averaged over the masked pixels of the batch, where pixels are normalised by the mean and deviation of the data.
//!
//! Deviations: for vision transformers only, and with absolute positions (learned or as `backbone.vit.position` says), where the official ViT-B has one
//! relative position bias for all blocks and no absolute positions. Weights of the blocks' last layers start as the
//! others (there divided by `sqrt(2 block)`). The token is drawn from a normal of deviation 0.02 that isn't cut at one
//! deviation. Masks are keyed by image and epoch.

use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::simmim::{simmim, simmim_count};
use crate::mask;
use crate::model::layers::Linear;
use crate::model::{Backbone, ConfigError, Init, Pass, Scope, Vit};
use crate::optim::ParameterRule;
use crate::problem::{MAX_WIDTH, Numbers, Problem, multiple};

/// The `[method.simmim]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Fraction of the squares that are masked; their number is rounded up.
    pub mask_ratio: f64,
    /// Side of a square in pixels: a multiple of `backbone.vit.patch` that divides the size of the view.
    pub mask_block: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { mask_ratio: 0.6, mask_block: 32 }
    }
}

/// Encoder with mask token, and linear decoder.
#[derive(Module, Debug)]
pub struct SimMim {
    backbone: Backbone,
    mask_token: Param<Tensor<3>>,
    decoder: Linear,
    #[module(skip)]
    config: Config,
}

/// How many squares are masked.
fn num_masked(squares: usize, ratio: f64) -> usize {
    (squares as f64 * ratio).ceil() as usize
}

impl SimMim {
    fn encoder(&self) -> &Vit {
        self.backbone.vit().expect("`build` accepts vision transformers only")
    }

    /// Squares along the sides of an image.
    fn squares(&self) -> [usize; 2] {
        self.encoder().arch().image.map(|side| side / self.config.mask_block)
    }

    /// Draws which patches of an image are masked.
    fn mask(&self, progress: &Progress, image: u64) -> Vec<bool> {
        let arch = self.encoder().arch();
        let [rows, columns] = self.squares();
        let count = num_masked(rows * columns, self.config.mask_ratio);
        let mut stream = mask::stream(progress.seed, progress.epoch(), image, 0);
        mask::square_mask(arch.grid(), self.config.mask_block / arch.patch, count, &mut stream)
    }
}

impl Method for SimMim {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let arch = check::encoder("simmim", "masks", &backbone)?.arch();
        let mask_token = scope.param("mask_token", [1, 1, arch.dim], Init::TruncatedNormal(0.02));
        let values = arch.patch * arch.patch * arch.channels;
        let decoder = Linear::torch_default(arch.dim, values, true, &scope.enter("decoder"));
        Ok(Self { backbone, mask_token, decoder, config: config.clone() })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        check::one_view("simmim", "reconstructs", inputs, found);
        let ratio = config.mask_ratio;
        let in_range = ratio > 0.0 && ratio < 1.0;
        if !in_range {
            found.limit("method.simmim.mask_ratio", ratio, "greater than 0 and less than 1");
        }
        let (key, block) = ("method.simmim.mask_block", config.mask_block);
        let counted = found.size(key, block, MAX_WIDTH);
        let Some(vit) = check::vit("simmim", "masks", inputs, found) else { return };
        check::mean_pool("simmim", vit, found);
        if !counted || check::side(vit, inputs).is_none() {
            return;
        }
        multiple(key, block, vit.patch, "backbone.vit.patch", found);
        let size = inputs.views[0].size as usize;
        let squares = (size / block).pow(2);
        if !size.is_multiple_of(block) {
            let fitting = (1..=size / vit.patch).rev().map(|patches| patches * vit.patch);
            let fitting = fitting.filter(|side| side * 2 <= size && size.is_multiple_of(*side)).take(3);
            let fitting: Vec<String> = fitting.map(|side| side.to_string()).collect();
            let hint = if fitting.is_empty() {
                "use a smaller patch".to_owned()
            } else {
                format!("use {}", fitting.join(" or "))
            };
            let message = format!("`{key}` is {block}, which does not divide `views.0.size`, {size}");
            found.push(Problem::at(key, message).against("views").hint(hint));
        } else if in_range && num_masked(squares, ratio) == squares {
            let message = format!(
                "`method.simmim.mask_ratio` is {ratio}, which, rounded up, masks all of the {squares} squares of {block} px"
            );
            found.push(
                Problem::at("method.simmim.mask_ratio", message)
                    .against("method.simmim.mask_block")
                    .against("views")
                    .hint(format!(
                        "use a smaller `mask_block`, a multiple of the patch of {} px, or a smaller ratio",
                        vit.patch
                    )),
            );
        }
    }

    fn rules(_config: &Config) -> Vec<ParameterRule> {
        check::undecayed_embeddings()
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let (encoder, images) = (self.encoder(), batch.views[0].clone());
        let [rows, columns] = encoder.arch().grid();
        let masked = batch.images.iter().flat_map(|&image| self.mask(&batch.progress, image));
        let masked: Vec<f32> = masked.map(|masked| f32::from(u8::from(masked))).collect();
        let mask = TensorData::new(masked, [batch.images.len(), rows * columns]);
        let mask = Tensor::<2>::from_data(mask, &images.device());

        let tokens = encoder.embed_masked(images.clone(), self.mask_token.val(), mask.clone().unsqueeze_dim(2));
        let encoded = encoder.patches(encoder.encode_tokens(tokens, pass)); // [b, l, d]
        let pixels = self.decoder.forward(encoded); // [b, l, 3 * p * p]: channel, row, column, the order of a pixel shuffle
        Outputs { tensors: vec![pixels.flatten(1, 2)], constants: vec![images.flatten(1, 3), mask] }
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [pixels]: [Tensor<2>; 1] = outputs.tensors.try_into().expect("`encode` returns one tensor");
        let [images, mask]: [Tensor<2>; 2] = outputs.constants.try_into().expect("`encode` returns two constants");
        let arch = self.encoder().arch();
        let ([height, width], [rows, columns], patch, channels) = (arch.image, arch.grid(), arch.patch, arch.channels);
        let num_images = pixels.dims()[0];
        let pixels = pixels.reshape([num_images, rows, columns, channels, patch, patch]).permute([0, 3, 1, 4, 2, 5]);
        let shape = [num_images, channels, height, width];
        let sum = simmim(images.reshape(shape), pixels.reshape(shape), mask.reshape([num_images, rows, columns]));
        let [squares, side] = [self.squares().iter().product(), self.config.mask_block / patch];
        let masked = num_images * num_masked(squares, self.config.mask_ratio) * side * side;
        Loss::new(sum, simmim_count(masked as f64, patch, channels))
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::method::testing::{batch, inputs, problems, stays_finite, values};

    fn method() -> SimMim {
        let (backbone, views) = inputs("[vit]\npatch = 4\ndim = 8\ndepth = 1\nheads = 2\npool = \"mean\"", "size = 16");
        let inputs = Inputs { backbone: &backbone, views: &views, global: 4, micro: 4 };
        let config = Config { mask_block: 8, ..Config::default() };
        SimMim::build(&config, &inputs, &Scope::new(1, &Device::flex())).unwrap()
    }

    #[test]
    fn counts_round_up() {
        assert_eq!([(49, 0.6), (16, 0.6), (25, 0.6), (4, 0.6)].map(|(n, r)| num_masked(n, r)), [30, 10, 15, 3]);
    }

    #[test]
    fn what_cannot_fit_is_refused() {
        let vit = "[vit]\npatch = 4\npool = \"mean\"";
        let small = Config { mask_block: 8, ..Config::default() };
        assert_eq!(problems::<SimMim>(&small, vit, "size = 32"), [""; 0]);
        let block = |mask_block| Config { mask_block, ..Config::default() };
        for (config, backbone, expected) in [
            (block(32), vit, "masks all of the 1 squares of 32 px"),
            (block(12), vit, "is 12, which does not divide `views.0.size`, 32"),
            (block(2), vit, "must be a multiple of `backbone.vit.patch`, 4"),
            (Config { mask_ratio: 0.95, ..small.clone() }, vit, "masks all of the 16 squares of 8 px"),
            (Config { mask_ratio: 0.0, ..small.clone() }, vit, "greater than 0 and less than 1"),
            (small.clone(), "[resnet]\ndepth = 18", "needs `backbone.vit`, but the backbone is `resnet`"),
            (small.clone(), "[vit]\npatch = 4", "nothing in `method.simmim` trains"),
            (small, "[vit]\npatch = 4\npool = \"mean\"\nfc_norm = true", "without the final norm"),
        ] {
            let found = problems::<SimMim>(&config, backbone, "size = 32");
            assert!(found.iter().any(|message| message.contains(expected)), "{expected}: {found:?}");
        }
    }

    #[test]
    fn flat_and_equal_images_keep_everything_finite() {
        let (backbone, views) = inputs("[vit]\npatch = 4\ndim = 8\ndepth = 1\nheads = 2\npool = \"mean\"", "size = 32");
        stays_finite::<SimMim>(&Config { mask_block: 8, ..Config::default() }, &backbone, &views);
    }

    #[test]
    fn masks_do_not_depend_on_who_shares_the_micro_batch() {
        let net = method();
        let mask =
            |images: &[u64], step| values(net.encode(&batch(images, 16, step), &mut Pass::eval()).constants.remove(1));
        let all = mask(&[3, 1, 4, 15], 0);
        assert_eq!(all, [mask(&[3, 1], 0), mask(&[4, 15], 0)].concat());
        assert_ne!(all, mask(&[3, 1, 4, 15], 10), "the next epoch");
        assert!(all.chunks(16).all(|mask| mask.iter().sum::<f32>() == 12.0));
    }

    #[test]
    fn the_right_pixels_in_the_right_place_cost_nothing() {
        let net = method();
        let batch = batch(&[3, 1], 16, 0);
        let mut outputs = net.encode(&batch, &mut Pass::eval());
        // each patch's channels, rows, columns, as the decoder puts them out
        let images = batch.views[0].clone().reshape([2, 3, 4, 4, 4, 4]).permute([0, 2, 4, 1, 3, 5]);
        let wrong = net.loss(outputs.clone(), &batch.progress);
        outputs.tensors = vec![images.reshape([2, 3 * 256])];
        let right = net.loss(outputs, &batch.progress);
        assert_eq!(right.sum.into_scalar::<f32>(), 0.0);
        assert!(wrong.sum.into_scalar::<f32>() > 1.0);
        assert!((right.count - 2.0 * 12.0 * 16.0 * 3.0).abs() < 1e-3);
    }
}
