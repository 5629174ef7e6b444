//! The `[optimizer.*]` tables of a recipe.

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
    /// LARS (You et al., 2017, <https://arxiv.org/abs/1708.03888>) in both published forms.
    Lars(LarsConfig),
    /// Adam (Kingma & Ba, 2014, <https://arxiv.org/abs/1412.6980>) with L2 decay added to the gradient, torch's definition.
    Adam(AdamConfig),
    /// LAMB (You et al., 2019, <https://arxiv.org/abs/1904.00962>), timm's definition.
    Lamb(LambConfig),
    /// Lion (Chen et al., 2023, <https://arxiv.org/abs/2302.06675>, algorithm 2).
    Lion(LionConfig),
}

/// Stochastic gradient descent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SgdConfig {
    /// Momentum.
    #[serde(default = "momentum")]
    pub momentum: f64,
    /// Share of a gradient that the momentum leaves out; the first gradient is taken whole.
    #[serde(default)]
    pub dampening: f64,
    /// Nesterov's form; needs a momentum and no dampening, as in torch.
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
    #[serde(default = "adamw_decay")]
    pub weight_decay: f64,
    /// Decays every parameter, tensors of rank <= 1 included.
    #[serde(default)]
    pub decay_all: bool,
}

/// Adam.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AdamConfig {
    /// Decay of the running mean and of the running square.
    #[serde(default = "betas")]
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    #[serde(default = "adam_eps")]
    pub eps: f64,
    /// L2 weight decay, added to the gradient.
    #[serde(default)]
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
    /// Share of a gradient that the momentum leaves out; the first gradient is taken whole.
    #[serde(default)]
    pub dampening: f64,
    /// Nesterov's form; needs a momentum and no dampening.
    #[serde(default)]
    pub nesterov: bool,
    /// Weight decay, added to the gradient.
    #[serde(default)]
    pub weight_decay: f64,
    /// Trust coefficient: 0.001 everywhere but in solo-learn's recipes, which have 0.02.
    #[serde(default = "trust")]
    pub trust: f64,
    /// What the norm of a weight is divided by.
    #[serde(default)]
    pub form: LarsForm,
    /// Added to what is divided by: 0 in the joint form as published, 1e-8 in the separate one.
    #[serde(default)]
    pub eps: f64,
    /// Caps the step: a parameter's own rate is at most `lr` (`clip_lr` of solo-learn, `clip` of LARC, which `SwAV` turns off).
    #[serde(default)]
    pub clip_lr: bool,
    /// Decays and adapts every parameter, tensors of rank <= 1 included (LARC in `SwAV`).
    #[serde(default)]
    pub decay_all: bool,
}

/// The two published forms of LARS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LarsForm {
    /// The norm of the decayed gradient, `|g + wd * p|` (MoCo v3, BYOL, Barlow Twins, `VICReg`, `SimCLR`).
    #[default]
    Joint,
    /// `|g| + wd * |p|`, the paper's (solo-learn, lightly, LARC of `SwAV`).
    Separate,
}

/// LAMB.
#[expect(clippy::struct_excessive_bools, reason = "timm's switches")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LambConfig {
    /// Decay of the running mean and of the running square.
    #[serde(default = "betas")]
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    #[serde(default = "lamb_eps")]
    pub eps: f64,
    /// Weight decay, added to the update before its norm is taken.
    #[serde(default = "lamb_decay")]
    pub weight_decay: f64,
    /// Decays and adapts every parameter, tensors of rank <= 1 included.
    #[serde(default)]
    pub decay_all: bool,
    /// Largest global norm of the gradient, LAMB's own clipping; 0: none.
    #[serde(default = "one")]
    pub max_grad_norm: f64,
    /// Divides the moments by what they have of a whole average.
    #[serde(default = "yes")]
    pub bias_correction: bool,
    /// Takes `1 - beta1` of a gradient into the mean; else all of it.
    #[serde(default = "yes")]
    pub grad_averaging: bool,
    /// Decays the weights themselves, as `AdamW` does, before their norm is taken.
    #[serde(default)]
    pub decoupled: bool,
    /// Adapts parameters without weight decay too.
    #[serde(default)]
    pub always_adapt: bool,
    /// Trust ratio of at most 1.
    #[serde(default)]
    pub trust_clip: bool,
}

/// Lion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LionConfig {
    /// Weight of the running mean in the direction of a step, and its own decay.
    #[serde(default = "lion_betas")]
    pub betas: [f64; 2],
    /// Decoupled weight decay; the paper takes 3 to 10 times `AdamW`'s, with a rate as much smaller.
    #[serde(default)]
    pub weight_decay: f64,
    /// Decays every parameter, tensors of rank <= 1 included.
    #[serde(default)]
    pub decay_all: bool,
}

impl OptimizerConfig {
    /// Returns the key of its table, such as `adamw`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sgd(_) => "sgd",
            Self::Adamw(_) => "adamw",
            Self::Lars(_) => "lars",
            Self::Adam(_) => "adam",
            Self::Lamb(_) => "lamb",
            Self::Lion(_) => "lion",
        }
    }

    /// Returns the weight decay at the start of a run.
    #[must_use]
    pub fn weight_decay(&self) -> f64 {
        match self {
            Self::Sgd(sgd) => sgd.weight_decay,
            Self::Adamw(adamw) => adamw.weight_decay,
            Self::Lars(lars) => lars.weight_decay,
            Self::Adam(adam) => adam.weight_decay,
            Self::Lamb(lamb) => lamb.weight_decay,
            Self::Lion(lion) => lion.weight_decay,
        }
    }

    /// Tells whether tensors of rank <= 1 are decayed too.
    #[must_use]
    pub fn decays_all(&self) -> bool {
        match self {
            Self::Sgd(sgd) => sgd.decay_all,
            Self::Adamw(adamw) => adamw.decay_all,
            Self::Lars(lars) => lars.decay_all,
            Self::Adam(adam) => adam.decay_all,
            Self::Lamb(lamb) => lamb.decay_all,
            Self::Lion(lion) => lion.decay_all,
        }
    }

    /// Tells whether the step of a parameter follows its norm, if it is one of those that are decayed or not.
    pub(super) fn adapts(&self, decayed: bool) -> bool {
        match self {
            Self::Lars(_) => decayed,
            Self::Lamb(lamb) => lamb.always_adapt || (decayed && lamb.weight_decay != 0.0),
            _ => false,
        }
    }
}

fn momentum() -> f64 {
    0.9
}

fn betas() -> [f64; 2] {
    [0.9, 0.999]
}

fn lion_betas() -> [f64; 2] {
    [0.9, 0.99]
}

fn adam_eps() -> f64 {
    1e-8
}

fn lamb_eps() -> f64 {
    1e-6
}

fn adamw_decay() -> f64 {
    0.05
}

fn lamb_decay() -> f64 {
    0.01
}

fn trust() -> f64 {
    0.001
}

fn one() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}
