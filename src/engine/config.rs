//! The `[batch]`, `[checkpoint]`, `[ema]` and `[log]` tables of a recipe.

use std::borrow::Cow;
use std::num::NonZeroUsize;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The global batch and how it is cut; neither depends on the number of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Images of one optimizer step, over all ranks.
    pub global: usize,
    /// Images of one forward pass; divides `global`. Batch norm takes its statistics over one micro-batch.
    pub micro: usize,
    /// What is kept between the forward and the backward pass. Both give the same bits.
    #[serde(default)]
    pub memory: Memory,
    /// Activations of the backbone that are computed again in the backward pass instead of being kept: `"none"`, `"block"` (those inside each block), or
    /// `"every:K"` (those inside each K blocks). All give the same bits.
    #[serde(default)]
    pub activation_checkpointing: ActivationCheckpointing,
}

/// Which activations of a backbone are computed again in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ActivationCheckpointing {
    /// All are kept.
    #[default]
    None,
    /// What crosses from so many blocks to the next is kept.
    Every(NonZeroUsize),
}

impl TryFrom<String> for ActivationCheckpointing {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let count = |text: &str| text.strip_prefix("every:")?.parse().ok();
        match text.as_str() {
            "none" => Ok(Self::None),
            "block" => Ok(Self::Every(NonZeroUsize::MIN)),
            other => count(other).map(Self::Every).ok_or_else(|| {
                format!(
                    "unknown activation checkpointing \"{other}\"; allowed: `none`, `block` and `every:K` with K from 1"
                )
            }),
        }
    }
}

impl From<ActivationCheckpointing> for String {
    fn from(chosen: ActivationCheckpointing) -> Self {
        match chosen {
            ActivationCheckpointing::None => "none".to_owned(),
            ActivationCheckpointing::Every(NonZeroUsize::MIN) => "block".to_owned(),
            ActivationCheckpointing::Every(count) => format!("every:{count}"),
        }
    }
}

impl JsonSchema for ActivationCheckpointing {
    fn schema_name() -> Cow<'static, str> {
        "ActivationCheckpointing".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": "^(none|block|every:[1-9][0-9]*)$" })
    }
}

/// What is kept between the forward and the backward pass of a loss over the global batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// The graphs of all micro-batches of a rank: faster.
    #[default]
    Keep,
    /// Only the outputs; each forward pass is run again before its backward pass
    /// (gradient caching, Gao et al., 2021, <https://arxiv.org/abs/2101.06983>): memory of one micro-batch.
    Cache,
}

/// Checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; 0: only at the end and on interruption.
    pub every_steps: u64,
    /// Checkpoints that are kept; older ones are removed.
    pub keep: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: 100, keep: 3 }
    }
}

/// Exponential moving average of the weights, evaluated and saved beside them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EmaConfig {
    /// average <- momentum * average + (1 - momentum) * weights, after every step.
    pub momentum: f64,
}

/// Stops a supervised run that no longer becomes better on the images of `data.validation`; the best weights are the result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EarlyStoppingConfig {
    /// Evaluations without a better one that end the run.
    pub patience: usize,
    /// Epochs between evaluations (may be fractional).
    #[serde(default = "one")]
    pub every_epochs: f64,
    /// What is better; default: `"top1"`, and `"map"` where an image may have several labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<Judged>,
}

/// What evaluations are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Judged {
    /// More images with the right class first.
    Top1,
    /// A larger mean average precision, where an image may have several labels.
    Map,
    /// A smaller mean cross-entropy.
    Loss,
}

fn one() -> f64 {
    1.0
}

/// What is written while training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Steps between plain progress lines (`metrics.jsonl` has every step).
    pub every_steps: u64,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { every_steps: 10 }
    }
}
