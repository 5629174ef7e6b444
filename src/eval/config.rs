//! The `[eval]` table of a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::data::DataConfig;

/// What is measured at the end of a run (and by `autodidact eval knn`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Neighbours that vote.
    pub k: usize,
    /// Temperature of the votes, weight = exp(similarity / temperature).
    pub temperature: f64,
    /// Trains a linear classifier on the features too.
    pub linear: bool,
    /// Weight of the data against the penalty of that classifier's weights, on features scaled to deviation 1.
    pub linear_c: f64,
    /// Images of the training source at most that serve as the bank.
    pub max_train: usize,
    /// Images of the test source at most that are classified.
    pub max_test: usize,
    /// Labelled images to classify; default: the training source's own test split, else a fixed tenth of the training images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test: Option<DataConfig>,
    /// Epochs between evaluations while training (may be fractional), for `finetune`; absent: at the end only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<f64>,
    /// Skips the evaluation at the end of a run.
    pub skip: bool,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self {
            k: 20,
            temperature: 0.07,
            linear: true,
            linear_c: 0.1,
            max_train: 10_000,
            max_test: 2_000,
            test: None,
            every_epochs: None,
            skip: false,
        }
    }
}
