//! The `[optimizer.*]` and `[schedule]` tables of a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The optimizer. Weight decay never touches biases, norms and other tensors of rank <= 1 unless `decay_all` is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerConfig {
    /// Stochastic gradient descent with momentum, torch's definition.
    Sgd(SgdConfig),
    /// `AdamW` (Loshchilov & Hutter, 2017, <https://arxiv.org/abs/1711.05101>), torch's definition.
    Adamw(AdamWConfig),
    /// LARS (You et al., 2017, <https://arxiv.org/abs/1708.03888>) as published with MoCo v3, BYOL, Barlow Twins.
    Lars(LarsConfig),
}

/// Stochastic gradient descent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SgdConfig {
    /// Momentum.
    #[serde(default = "momentum")]
    pub momentum: f64,
    /// Nesterov's form; without momentum it is plain descent (torch refuses that combination).
    #[serde(default)]
    pub nesterov: bool,
    /// L2 weight decay, added to the gradient.
    #[serde(default)]
    pub weight_decay: f64,
    /// Decays every parameter, tensors of rank <= 1 included.
    #[serde(default)]
    pub decay_all: bool,
}

/// `AdamW`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AdamWConfig {
    /// Decay of the running mean and of the running square.
    #[serde(default = "betas")]
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    #[serde(default = "adam_eps")]
    pub eps: f64,
    /// Decoupled weight decay.
    #[serde(default = "adam_decay")]
    pub weight_decay: f64,
    /// Decays every parameter, tensors of rank <= 1 included.
    #[serde(default)]
    pub decay_all: bool,
}

/// LARS.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LarsConfig {
    /// Momentum.
    #[serde(default = "momentum")]
    pub momentum: f64,
    /// Weight decay, added to the gradient before its norm is taken.
    #[serde(default)]
    pub weight_decay: f64,
    /// Trust coefficient.
    #[serde(default = "trust")]
    pub trust: f64,
}

/// How long to train and how the learning rate moves.
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
    /// Learning rate at the end of the cosine, before scaling.
    #[serde(default)]
    pub min_lr: f64,
    /// Largest global norm of the gradient; absent: no clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
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

fn momentum() -> f64 {
    0.9
}

fn betas() -> [f64; 2] {
    [0.9, 0.999]
}

fn adam_eps() -> f64 {
    1e-8
}

fn adam_decay() -> f64 {
    0.05
}

fn trust() -> f64 {
    0.001
}
