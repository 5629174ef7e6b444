//! Methods: one file is one paper.

pub mod mae;
pub mod simclr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[method.*]` table of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MethodConfig {
    /// SimCLR (Chen et al., 2020, <https://arxiv.org/abs/2002.05709>).
    Simclr(simclr::Config),
    /// Masked autoencoder (He et al., 2021, <https://arxiv.org/abs/2111.06377>).
    Mae(mae::Config),
}
