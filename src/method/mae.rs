//! Masked autoencoder: reconstruct the pixels of the patches that the encoder does not see.
//!
//! He, Chen, Xie, Li, Dollar, Girshick, 2021, <https://arxiv.org/abs/2111.06377>; official code `models_mae.py`. The encoder sees the kept patches in
//! the order of their noise, the decoder gets mask tokens in the gaps, and the loss is the mean over the removed patches of the
//! batch of each patch's mean squared error.
//!
//! Deviation: masks are keyed by image and epoch, so an image's mask depends on neither its place in the batch nor the rank.

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::mae::{normalize_patches, patchify, reconstruction};
use crate::mask::{self, num_kept};
use crate::model::{Backbone, ConfigError, Decoder, DecoderArch, Pass, Scope, Vit, gather_tokens};
use crate::problem::{MAX_DEPTH, MAX_WIDTH, Numbers, Problem, multiple, multiple_of_four};

/// The `[method.mae]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Fraction of the patches that the encoder does not see.
    pub mask_ratio: f64,
    /// Normalises the pixels of each target patch.
    pub norm_pix: bool,
    /// Width of the decoder.
    pub decoder_dim: usize,
    /// Blocks of the decoder.
    pub decoder_depth: usize,
    /// Attention heads of the decoder.
    pub decoder_heads: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { mask_ratio: 0.75, norm_pix: true, decoder_dim: 512, decoder_depth: 8, decoder_heads: 16 }
    }
}

/// Encoder and decoder.
#[derive(Module, Debug)]
pub struct Mae {
    backbone: Backbone,
    decoder: Decoder,
    mask_ratio: f64,
    norm_pix: bool,
}

impl Mae {
    fn encoder(&self) -> &Vit {
        self.backbone.vit().expect("`build` accepts vision transformers only")
    }
}

impl Method for Mae {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let encoder = check::encoder("mae", "drops", &backbone)?;
        let arch =
            DecoderArch::for_encoder(encoder.arch(), config.decoder_dim, config.decoder_depth, config.decoder_heads)?;
        let decoder = Decoder::new(&arch, &scope.enter("decoder"))?;
        Ok(Self { backbone, decoder, mask_ratio: config.mask_ratio, norm_pix: config.norm_pix })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        check::one_view("mae", "reconstructs", inputs, found);
        let counted = [
            found.size("method.mae.decoder_dim", config.decoder_dim, MAX_WIDTH),
            found.size("method.mae.decoder_heads", config.decoder_heads, MAX_WIDTH),
        ];
        found.size("method.mae.decoder_depth", config.decoder_depth, MAX_DEPTH);
        if counted == [true, true] {
            let dim = "method.mae.decoder_dim";
            multiple(dim, config.decoder_dim, config.decoder_heads, "method.mae.decoder_heads", found);
            multiple_of_four(dim, config.decoder_dim, "its sine-cosine positions need", "method.mae", found);
        }
        let ratio = config.mask_ratio;
        let in_range = ratio > 0.0 && ratio < 1.0;
        if !in_range {
            found.limit("method.mae.mask_ratio", ratio, "greater than 0 and less than 1");
        }
        let Some(vit) = check::vit("mae", "drops", inputs, found) else { return };
        let Some(patches) = check::side(vit, inputs).map(|side| side.saturating_mul(side)) else { return };
        let kept = num_kept(patches, ratio);
        if patches == 1 {
            let (size, least) = (vit.patch, 2 * vit.patch);
            let message = format!(
                "`views.0.size` is {size}, a single patch, but `method.mae` needs some to keep and some to remove"
            );
            found.push(
                Problem::at("views.0.size", message)
                    .against("backbone.vit.patch")
                    .hint(format!("use at least {least}, or a smaller patch")),
            );
        } else if in_range && (kept == 0 || kept == patches) {
            let what = if kept == 0 { "keeps" } else { "removes" };
            let least = (1000.0 / patches as f64).ceil() / 1000.0;
            found.push(
                Problem::at(
                    "method.mae.mask_ratio",
                    format!("`method.mae.mask_ratio` is {ratio}, which {what} none of the {patches} patches"),
                )
                .against("backbone.vit.patch")
                .against("views")
                .hint(format!("use from {least} to {}", 1.0 - least)),
            );
        }
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let encoder = self.encoder();
        let images = batch.views[0].clone();
        let tokens = encoder.embed_patches(images.clone()); // [b, l, d]
        let [num_images, num_patches, _] = tokens.dims();
        let keep = mask::num_kept(num_patches, self.mask_ratio);
        let draw =
            |&image: &u64| mask::random_mask(batch.progress.seed, batch.progress.epoch(), image, 0, num_patches, keep);
        let kept: Vec<Vec<usize>> = batch.images.iter().map(draw).collect();

        let seen = gather_tokens(tokens, &kept);
        let encoded = encoder.encode_tokens_at(seen, encoder.arch().grid(), Some(&kept), pass); // [b, prefix + keep, d]
        let predictions = self.decoder.forward(encoded, &kept, pass); // [b, l, p * p * 3]

        let patches = patchify(images, encoder.arch().patch);
        let targets = if self.norm_pix { normalize_patches(patches) } else { patches };
        let removed = kept.iter().flat_map(|kept| mask::removed(kept, num_patches));
        let removed: Vec<f32> = removed.map(|removed| f32::from(u8::from(removed))).collect();
        let device = predictions.device();
        let mask = Tensor::from_data(TensorData::new(removed, [num_images, num_patches]), &device);
        Outputs { tensors: vec![predictions.flatten(1, 2)], constants: vec![targets.flatten(1, 2), mask] }
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [predictions]: [Tensor<2>; 1] = outputs.tensors.try_into().expect("`encode` returns one tensor");
        let [targets, mask]: [Tensor<2>; 2] = outputs.constants.try_into().expect("`encode` returns two constants");
        let [num_images, num_patches] = mask.dims();
        let patches = [num_images, num_patches, predictions.dims()[1] / num_patches];
        let removed = num_patches - mask::num_kept(num_patches, self.mask_ratio);
        let sum = reconstruction(predictions.reshape(patches), targets.reshape(patches), mask);
        Loss::new(sum, (num_images * removed) as f64)
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::method::testing::{inputs, stays_finite};

    #[test]
    fn flat_and_equal_images_keep_everything_finite_with_any_positions() {
        for position in ["learned", "sincos", "rope"] {
            let vit = format!("[vit]\npatch = 4\ndim = 8\ndepth = 1\nheads = 2\nposition = \"{position}\"");
            let (backbone, views) = inputs(&vit, "size = 16");
            let config = Config { decoder_dim: 8, decoder_depth: 1, decoder_heads: 2, ..Config::default() };
            stays_finite::<Mae>(&config, &backbone, &views);
        }
    }
}
