//! Schedules exactly as published code computes them, for recipes that reproduce a paper. They differ in where a warm-up starts and
//! whether the end value is reached; steps count from 0 unless a line says otherwise.

use std::f64::consts::PI;

use super::schedule::{cosine, warmup_cosine};

/// BYOL's learning rate (deepmind `byol/utils/schedules.py`): warm-up from 0, half a cosine to 0.
///
/// `peak` is `base * batch / 256`.
#[must_use]
pub fn byol_lr(step: u64, warmup: u64, total: u64, peak: f64) -> f64 {
    warmup_cosine(step as f64, warmup as f64, total as f64, peak, 0.0)
}

/// Barlow Twins' learning rate (`adjust_learning_rate` of the released `main.py`): warm-up from 0, half a cosine to a thousandth of the peak.
///
/// `peak` is `rate * batch / 256`, the warm-up 10 epochs.
#[must_use]
pub fn barlow_lr(step: u64, warmup: u64, total: u64, peak: f64) -> f64 {
    warmup_cosine(step as f64, warmup as f64, total as f64, peak, 0.001 * peak)
}

/// Momentum of the moving average, half a cosine from `base` to 1 (BYOL, section 3.2; MoCo v3's `adjust_moco_momentum`).
///
/// `at` and `total` in one unit: BYOL counts steps, MoCo v3 fractional epochs.
#[must_use]
pub fn byol_momentum(at: f64, total: f64, base: f64) -> f64 {
    cosine(at, total, base, 1.0)
}

/// DINO's `cosine_scheduler` (`utils.py`) and DINOv2's `CosineScheduler`, for learning rate, weight decay and momentum.
///
/// The warm-up is `linspace(warmup_start, base, warmup)`: its last step already has `base`. The cosine of the remaining steps doesn't
/// reach `end`; steps from `total` on have `end` (DINOv2; DINO never asks). DINO has no frozen steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dino {
    /// Steps at the start with value 0.
    pub frozen: u64,
    /// Steps of the warm-up.
    pub warmup: u64,
    /// All steps.
    pub total: u64,
    /// Value of the first step of the warm-up.
    pub warmup_start: f64,
    /// Value of the last step of the warm-up and of the first one after it.
    pub base: f64,
    /// Value that the cosine falls towards.
    pub end: f64,
}

impl Dino {
    /// Returns the value of a step.
    #[must_use]
    pub fn at(&self, step: u64) -> f64 {
        if step >= self.total {
            return self.end;
        }
        let Some(step) = step.checked_sub(self.frozen) else { return 0.0 };
        match step.checked_sub(self.warmup) {
            // linspace of one point is its start
            None => {
                self.warmup_start
                    + (self.base - self.warmup_start) * step as f64 / self.warmup.saturating_sub(1).max(1) as f64
            }
            Some(after) => cosine(after as f64, (self.total - self.frozen - self.warmup) as f64, self.base, self.end),
        }
    }
}

/// I-JEPA's `WarmupCosineSchedule` (`src/utils/schedulers.py`).
///
/// Its counter is raised before use: step 0 has the value of count 1, the last step reaches `end`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IjepaLr {
    /// Counts of the warm-up.
    pub warmup: u64,
    /// All counts.
    pub total: u64,
    /// Value at count 0, which no step has.
    pub start: f64,
    /// Value at the end of the warm-up.
    pub peak: f64,
    /// Value at the last count.
    pub end: f64,
}

impl IjepaLr {
    /// Returns the learning rate of a step, counted from 0.
    #[must_use]
    pub fn at(&self, step: u64) -> f64 {
        let (count, warmup) = ((step + 1) as f64, self.warmup as f64);
        if count < warmup {
            self.start + count / warmup * (self.peak - self.start)
        } else {
            // the published code would rise again after `total`; `cosine` stays at the end
            cosine(count - warmup, self.total as f64 - warmup, self.peak, self.end)
        }
    }
}

/// I-JEPA's `CosineWDSchedule`: half a cosine from `start` at count 0 to `end` at count `total`; step 0 has count 1.
#[must_use]
pub fn ijepa_weight_decay(step: u64, total: u64, start: f64, end: f64) -> f64 {
    cosine((step + 1) as f64, total as f64, start, end)
}

/// I-JEPA's momentum (`train.py`): a straight line from `start` at step 0 to `end` at step `total`. `total` may be fractional (`ipe_scale`).
#[must_use]
pub fn ijepa_momentum(step: u64, total: f64, start: f64, end: f64) -> f64 {
    start + step as f64 * (end - start) / total
}

/// lightly's `cosine_schedule` (`lightly/utils/scheduler.py`): reaches `end` at the last step, `total - 1`.
///
/// With a `period` it is a full cosine that returns to `start` every `period` steps, whatever `total`.
#[must_use]
pub fn lightly_cosine(step: u64, total: u64, start: f64, end: f64, period: Option<u64>) -> f64 {
    match period {
        Some(period) => end - (end - start) * ((2.0 * PI * step as f64 / period as f64).cos() + 1.0) / 2.0,
        None => cosine(step as f64, total.saturating_sub(1) as f64, start, end),
    }
}

/// lightly's `CosineWarmupScheduler`: the warm-up is one step ahead, so that no step has `warmup_start`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lightly {
    /// Steps of the warm-up.
    pub warmup: u64,
    /// All steps.
    pub total: u64,
    /// Value before the first step of the warm-up.
    pub warmup_start: f64,
    /// Value of the last step of the warm-up.
    pub warmup_end: f64,
    /// Value of the first step after the warm-up.
    pub start: f64,
    /// Value of the last step.
    pub end: f64,
    /// Steps of a full cosine after the warm-up, instead of half a cosine until `total`.
    pub period: Option<u64>,
}

impl Lightly {
    /// Returns the value of a step.
    #[must_use]
    pub fn at(&self, step: u64) -> f64 {
        match step.checked_sub(self.warmup) {
            None => self.warmup_start + (self.warmup_end - self.warmup_start) * (step + 1) as f64 / self.warmup as f64,
            Some(after) => {
                lightly_cosine(after, self.total.saturating_sub(self.warmup), self.start, self.end, self.period)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dino_warmup_has_both_ends_and_the_end_comes_after_the_run() {
        let dino = Dino { frozen: 2, warmup: 3, total: 9, warmup_start: 0.0, base: 1.0, end: 0.5 };
        assert_eq!([0, 1, 2, 3, 4, 5].map(|step| dino.at(step)), [0.0, 0.0, 0.0, 0.5, 1.0, 1.0]);
        assert!(dino.at(8) > 0.5);
        assert_eq!(dino.at(9), 0.5);
        assert_eq!(Dino { frozen: 0, warmup: 1, ..dino }.at(0), 0.0);
        assert_eq!(Dino { frozen: 0, warmup: 0, ..dino }.at(0), 1.0);
    }

    #[test]
    fn lightly_reaches_both_values_and_cycles() {
        let lightly =
            Lightly { warmup: 2, total: 12, warmup_start: 0.0, warmup_end: 1.0, start: 1.0, end: 0.1, period: None };
        assert_eq!([0, 1, 2, 11, 12].map(|step| lightly.at(step)), [0.5, 1.0, 1.0, 0.1, 0.1]);
        assert_eq!(Lightly { total: 3, ..lightly }.at(2), 0.1); // one step after the warm-up
        let cycling = Lightly { period: Some(4), ..lightly };
        assert!((cycling.at(4) - 0.1).abs() < 1e-12 && (cycling.at(6) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn ijepa_counts_from_one() {
        let lr = IjepaLr { warmup: 4, total: 10, start: 0.2, peak: 1.0, end: 0.1 };
        assert!((lr.at(0) - 0.4).abs() < 1e-12);
        assert_eq!((lr.at(3), lr.at(9)), (1.0, 0.1));
        assert_eq!(ijepa_weight_decay(9, 10, 0.04, 0.4), 0.4);
        assert_eq!(ijepa_momentum(10, 10.0, 0.5, 1.0), 1.0);
    }

    #[test]
    fn momentum_ends_at_one() {
        assert_eq!((byol_momentum(0.0, 8.0, 0.996), byol_momentum(8.0, 8.0, 0.996)), (0.996, 1.0));
        assert_eq!((byol_lr(5, 5, 10, 0.2), byol_lr(10, 5, 10, 0.2)), (0.2, 0.0));
        assert_eq!(barlow_lr(10, 5, 10, 0.2), 0.001 * 0.2);
    }
}
