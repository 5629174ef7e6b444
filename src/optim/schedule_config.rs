//! The `[schedule]` table of a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::clip::Clip;
use super::ramp::Each;

/// How long to train, and how learning rate and weight decay move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConfig {
    /// Passes over the data; give this or `steps`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Optimizer steps; give this or `epochs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Learning rate before scaling.
    pub lr: f64,
    /// Scaling of the learning rate with the global batch.
    #[serde(default)]
    pub lr_scaling: LrScaling,
    /// Linear warm-up, in epochs (may be fractional).
    #[serde(default)]
    pub warmup_epochs: f64,
    /// Learning rate of the first step of a warm-up, before scaling.
    #[serde(default)]
    pub warmup_lr: f64,
    /// How the learning rate moves after the warm-up.
    #[serde(default)]
    pub decay: LrDecay,
    /// Learning rate at the end of a cosine or a line, before scaling.
    #[serde(default)]
    pub min_lr: f64,
    /// Epochs from which on the rate is multiplied by `gamma` once more; for `decay = "multistep"`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub milestones: Vec<f64>,
    /// Factor of each milestone.
    #[serde(default = "gamma")]
    pub gamma: f64,
    /// Whether the rate moves with each step or stays the same for an epoch.
    #[serde(default)]
    pub each: Each,
    /// Weight decay at the end, reached from the optimizer's along half a cosine (DINO, I-JEPA); absent: it doesn't move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay_end: Option<f64>,
    /// Largest global norm of the gradient; absent: no clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Largest norm of the gradient of each parameter on its own (DINO); absent: no such clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_each_norm: Option<f64>,
}

impl ScheduleConfig {
    /// Returns how gradients are clipped.
    #[must_use]
    pub fn clip(&self) -> Clip {
        match (self.clip_norm, self.clip_each_norm) {
            (Some(norm), _) => Clip::Global(norm),
            (None, Some(norm)) => Clip::Each(norm),
            (None, None) => Clip::None,
        }
    }
}

/// How the learning rate moves after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LrDecay {
    /// Half a cosine to `min_lr`.
    #[default]
    Cosine,
    /// A straight line to `min_lr`.
    Linear,
    /// Multiplied by `gamma` at each of `milestones`.
    Multistep,
    /// Stays.
    Constant,
}

/// Scaling of the learning rate with the global batch of B images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LrScaling {
    /// As given.
    #[default]
    None,
    /// Multiplied by B / 256 (Goyal et al., 2017, <https://arxiv.org/abs/1706.02677>).
    Linear,
    /// Multiplied by sqrt(B) (SimCLR, appendix B.1).
    Sqrt,
}

impl LrScaling {
    /// Returns what the learning rates of a recipe are multiplied by for a global batch of `batch` images.
    #[must_use]
    pub fn factor(self, batch: usize) -> f64 {
        match self {
            Self::None => 1.0,
            Self::Linear => batch as f64 / 256.0,
            Self::Sqrt => (batch as f64).sqrt(),
        }
    }
}

fn gamma() -> f64 {
    0.1
}
