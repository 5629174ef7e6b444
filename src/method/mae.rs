//! Masked autoencoder.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
