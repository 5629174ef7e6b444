//! SimCLR: each view must pick out the other view of its image from the batch.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[method.simclr]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Divides the similarities; positive.
    pub temperature: f64,
    /// Hidden width of the projection head.
    pub hidden: usize,
    /// Width of the projections.
    pub out: usize,
    /// Linear layers of the projection head (2 in the paper, 3 in the released code).
    pub layers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { temperature: 0.1, hidden: 2048, out: 128, layers: 2 }
    }
}
