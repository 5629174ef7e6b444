//! What a run computes in, and what it does when numbers are no longer finite: the `[precision]` table of a recipe.

mod scaler;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use scaler::LossScaler;

use crate::ops::{Autocast, Half};

/// Mixed precision: products in `compute`, with fp32 master weights, optimizer state, gradient sums, norms, softmax and losses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionConfig {
    /// What matrix products and convolutions compute in. `"auto"` is bf16 on a GPU that has it, else fp32.
    pub compute: Compute,
    /// What computes in fp32 in any case, beside norms, softmax, residual sums and losses, which always do.
    pub keep_fp32: Vec<Kept>,
    /// What happens when loss or gradient are NaN or infinite and a smaller loss scale does not help.
    pub on_nonfinite: OnNonFinite,
    /// The scale of the loss in fp16.
    pub scale: ScaleConfig,
}

/// What products compute in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// 32 bits.
    #[default]
    Fp32,
    /// 16 bits with the range of fp32: needs no loss scale.
    Bf16,
    /// 16 bits with a narrow range, and a loss scale.
    Fp16,
    /// bf16 where the device has it, else fp32.
    Auto,
}

/// What a device makes of bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bf16 {
    /// It has no such type.
    No,
    /// It rounds to bf16 and computes in fp32: the numbers, not the speed.
    #[default]
    Emulated,
    /// It computes in bf16.
    Native,
}

/// A part of the network that can stay in fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kept {
    /// Everything but the backbone: projection heads, predictors, decoders, classifiers.
    Heads,
}

/// What happens with a step whose loss or gradient is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnNonFinite {
    /// The run stops, with a checkpoint of the state before the step and a bundle that explains it.
    #[default]
    Stop,
    /// The step moves nothing, and the next one takes other images; a bundle is written. Ten in a row stop the run.
    Skip,
    /// A run in fp16 goes on in bf16 from this step on. What is not finite there, either, stops it.
    FallbackBf16,
}

/// The dynamic scale of the loss, torch's `GradScaler`; for `compute = "fp16"` alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ScaleConfig {
    /// Scale of the first step.
    pub initial: f32,
    /// What it is multiplied by after `interval` good steps in a row.
    pub growth: f64,
    /// What it is multiplied by when a gradient overflows.
    pub backoff: f64,
    /// Good steps in a row before it grows.
    pub interval: u64,
    /// Smallest scale; an overflow there is not cured by a smaller one.
    pub min: f32,
}

impl Default for ScaleConfig {
    fn default() -> Self {
        Self { initial: 65536.0, growth: 2.0, backoff: 0.5, interval: 2000, min: 1.0 }
    }
}

impl PrecisionConfig {
    /// Returns what operations are told, `auto` being resolved.
    #[must_use]
    pub fn autocast(&self) -> Autocast {
        let half = match self.compute {
            Compute::Fp32 | Compute::Auto => None,
            Compute::Bf16 => Some(Half::Bf16),
            Compute::Fp16 => Some(Half::Fp16),
        };
        Autocast { half, keep_heads: self.keep_fp32.contains(&Kept::Heads) }
    }

    /// Returns the state of a run's first step.
    #[must_use]
    pub fn start(&self) -> PrecisionState {
        let scale = (self.compute == Compute::Fp16).then_some(self.scale.initial);
        PrecisionState { scale, ..PrecisionState::default() }
    }
}

impl Compute {
    /// Returns its name in a recipe.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Auto => "auto",
        }
    }
}

/// What a run knows of its numbers so far; a part of its checkpoints, and the same on all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PrecisionState {
    /// Scale of the loss, in fp16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<f32>,
    /// Good steps since the scale last moved.
    #[serde(default)]
    pub good_steps: u64,
    /// Steps that were computed again at a smaller scale, each time counted.
    #[serde(default)]
    pub overflows: u64,
    /// Steps that moved nothing.
    #[serde(default)]
    pub skipped: u64,
    /// Steps in a row, up to the last one, that moved nothing.
    #[serde(default)]
    pub skipped_in_a_row: u64,
    /// Steps done in fp16 before the run fell back to bf16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fell_back_after: Option<u64>,
}

/// Steps in a row that may move nothing.
pub const MOST_SKIPPED: u64 = 10;

impl PrecisionState {
    /// Moves the scale after an attempt at a step; returns false if it is at its smallest, and stays there.
    pub fn observe(&mut self, config: &ScaleConfig, overflow: bool) -> bool {
        let Some(scale) = self.scale else { return !overflow };
        let mut scaler = LossScaler::new(scale, config.growth, config.backoff, config.interval);
        scaler.load_state(scale, self.good_steps);
        scaler.update(overflow);
        if overflow && (scaler.scale() < config.min || scaler.scale() == 0.0) {
            return false;
        }
        (self.scale, self.good_steps) = (Some(scaler.scale()), scaler.good_steps());
        self.overflows += u64::from(overflow);
        true
    }

    /// Goes on in bf16 after `step` steps.
    pub fn fall_back(&mut self, step: u64) {
        (self.scale, self.good_steps, self.fell_back_after) = (None, 0, Some(step));
    }

    /// Returns what operations are told now.
    #[must_use]
    pub fn autocast(&self, config: &PrecisionConfig) -> Autocast {
        let chosen = config.autocast();
        let half = chosen.half.map(|half| if self.fell_back_after.is_some() { Half::Bf16 } else { half });
        Autocast { half, ..chosen }
    }

    /// Returns what the sum of the losses over `images` images is multiplied by: about the scale for their mean, and a power of two times it, so that
    /// dividing by it is exact.
    #[must_use]
    pub fn factor(&self, images: usize) -> f32 {
        let Some(scale) = self.scale else { return 1.0 };
        scale / images.next_power_of_two() as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_goes_down_to_its_smallest_and_no_further() {
        let config = PrecisionConfig {
            compute: Compute::Fp16,
            scale: ScaleConfig { initial: 4.0, interval: 2, min: 2.0, ..ScaleConfig::default() },
            ..PrecisionConfig::default()
        };
        let mut state = config.start();
        assert_eq!(state.factor(6), 0.5);
        assert!(state.observe(&config.scale, true));
        assert_eq!((state.scale, state.overflows), (Some(2.0), 1));
        assert!(!state.observe(&config.scale, true), "no scale is left");
        assert_eq!((state.scale, state.overflows), (Some(2.0), 1), "and nothing moved");
        assert!(state.observe(&config.scale, false) && state.observe(&config.scale, false));
        assert_eq!((state.scale, state.good_steps), (Some(4.0), 0));
        state.fall_back(3);
        assert_eq!((state.factor(6), state.autocast(&config).half), (1.0, Some(Half::Bf16)));
        assert!(!state.observe(&config.scale, true), "without a scale nothing cures an overflow");
    }

    #[test]
    fn fp32_has_no_scale() {
        let config = PrecisionConfig::default();
        let mut state = config.start();
        assert_eq!((state.scale, state.factor(64), state.autocast(&config)), (None, 1.0, Autocast::default()));
        assert!(state.observe(&config.scale, false) && !state.observe(&config.scale, true));
    }
}
