//! The `[parallel]` table of a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How ranks work together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// How processes add up gradients: `"canonical"`, the same bits on any number of processes, or `"fast"`, by the all-reduce of MPI or NCCL, whose
    /// order of additions is its own. Rank threads of one process always add up canonically.
    pub reduction: Reduction,
}

/// An order of additions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// That of the binary tree over micro-batches.
    #[default]
    Canonical,
    /// The transport's own.
    Fast,
}
