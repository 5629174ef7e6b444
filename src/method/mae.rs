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

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Sees};
use crate::loss::mae::{normalize_patches, patchify, reconstruction};
use crate::mask;
use crate::model::{Backbone, ConfigError, Decoder, DecoderArch, Pass, Scope, Vit, gather_tokens};

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
        let encoder = backbone.vit().ok_or_else(|| {
            let problem = "`mae` hides patches from a vision transformer, and a `resnet` has none".to_owned();
            ConfigError::new("backbone", problem, "use `[backbone.vit]`, or `[method.simclr]` with the resnet")
        })?;
        let arch =
            DecoderArch::for_encoder(encoder.arch(), config.decoder_dim, config.decoder_depth, config.decoder_heads)?;
        let decoder = Decoder::new(&arch, &scope.enter("decoder"))?;
        Ok(Self { backbone, decoder, mask_ratio: config.mask_ratio, norm_pix: config.norm_pix })
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let encoder = self.encoder();
        let images = batch.views[0].clone();
        let tokens = encoder.embed_patches(images.clone()); // [b, l, d]
        let [num_images, num_patches, _] = tokens.dims();
        let keep = mask::num_kept(num_patches, self.mask_ratio);
        let draw = |&image: &u64| mask::random_mask(batch.seed, batch.epoch, image, 0, num_patches, keep);
        let kept: Vec<Vec<usize>> = batch.images.iter().map(draw).collect();

        let encoded = encoder.encode_tokens(gather_tokens(tokens, &kept), pass); // [b, prefix + keep, d]
        let predictions = self.decoder.forward(encoded, &kept, pass); // [b, l, p * p * 3]

        let patches = patchify(images, encoder.arch().patch);
        let targets = if self.norm_pix { normalize_patches(patches) } else { patches };
        let removed = kept.iter().flat_map(|kept| mask::removed(kept, num_patches));
        let removed: Vec<f32> = removed.map(|removed| f32::from(u8::from(removed))).collect();
        let device = predictions.device();
        let mask = Tensor::from_data(TensorData::new(removed, [num_images, num_patches]), &device);
        Outputs { tensors: vec![predictions.flatten(1, 2)], constants: vec![targets.flatten(1, 2), mask] }
    }

    fn loss(&self, outputs: Outputs) -> Loss {
        let [predictions]: [Tensor<2>; 1] = outputs.tensors.try_into().expect("`encode` returns one tensor");
        let [targets, mask]: [Tensor<2>; 2] = outputs.constants.try_into().expect("`encode` returns two constants");
        let [num_images, num_patches] = mask.dims();
        let patches = [num_images, num_patches, predictions.dims()[1] / num_patches];
        let removed = num_patches - mask::num_kept(num_patches, self.mask_ratio);
        let sum = reconstruction(predictions.reshape(patches), targets.reshape(patches), mask);
        Loss { sum, count: (num_images * removed) as f64 }
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}
