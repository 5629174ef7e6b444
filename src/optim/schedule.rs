//! The learning rate of each step: linear warm-up, then half a cosine.

use std::f64::consts::PI;

/// Learning rate as a function of the step, MAE's rule (He et al., 2021, <https://arxiv.org/abs/2111.06377>, released `lr_sched.py`).
///
/// With the fractional epoch `e = step / steps_per_epoch`:
/// `lr * e / warmup` before the warm-up ends, then `min + (lr - min) / 2 * (1 + cos(pi * (e - warmup) / (epochs - warmup)))`,
/// and `min` from the last epoch on. The first step of a run with a warm-up has rate 0; the last step is one step short of `min`.
/// MoCo v3 uses the same rule with `min = 0`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Learning rate at the end of the warm-up, scaled with the batch.
    pub lr: f64,
    /// Learning rate at the end, scaled with the batch.
    pub min_lr: f64,
    /// Length of the warm-up in epochs.
    pub warmup_epochs: f64,
    /// Length of the run in epochs.
    pub epochs: f64,
    /// Steps of one epoch.
    pub steps_per_epoch: u64,
}

impl Schedule {
    /// Returns the learning rate of a step, counted from 0.
    ///
    /// # Panics
    /// If an epoch has no steps.
    #[must_use]
    pub fn lr_at(&self, step: u64) -> f64 {
        assert!(self.steps_per_epoch > 0, "an epoch has at least one step");
        let epoch = step as f64 / self.steps_per_epoch as f64;
        warmup_cosine(epoch, self.warmup_epochs, self.epochs, self.lr, self.min_lr)
    }
}

/// Rises from 0 to `peak` until `warmup`, then falls along half a cosine to `end` at `total` and stays there. Times in any one unit.
#[must_use]
pub fn warmup_cosine(at: f64, warmup: f64, total: f64, peak: f64, end: f64) -> f64 {
    if at < warmup { peak * at / warmup } else { cosine(at - warmup, total - warmup, peak, end) }
}

/// Goes from `start` at 0 along half a cosine to `end` at `length`, and stays there.
#[must_use]
pub fn cosine(at: f64, length: f64, start: f64, end: f64) -> f64 {
    if at >= length {
        return end;
    }
    end + (start - end) * 0.5 * (1.0 + (PI * at / length).cos())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn named_points() {
        let schedule = Schedule { lr: 1.0, min_lr: 0.1, warmup_epochs: 2.0, epochs: 10.0, steps_per_epoch: 5 };
        let points = [(0, 0.0), (5, 0.5), (10, 1.0), (30, 0.55), (50, 0.1), (1000, 0.1)];
        for (step, expected) in points {
            assert!((schedule.lr_at(step) - expected).abs() < 1e-12, "{step}");
        }
    }

    #[test]
    fn a_run_may_be_all_warmup_or_have_none() {
        let all = Schedule { lr: 1.0, min_lr: 0.0, warmup_epochs: 2.0, epochs: 2.0, steps_per_epoch: 2 };
        assert_eq!([0, 1, 2, 3, 4].map(|step| all.lr_at(step)), [0.0, 0.25, 0.5, 0.75, 0.0]);
        assert_eq!(Schedule { warmup_epochs: 0.0, ..all }.lr_at(0), 1.0);
    }

    proptest! {
        #[test]
        fn bounded_and_continuous(
            lr in 1e-6..10.0f64, low in 0.0..1.0f64, warmup in 0.0..10.0f64, more in 0.1..20.0f64, steps in 1u64..200, step in 0u64..5000,
        ) {
            let schedule = Schedule { lr, min_lr: low * lr, warmup_epochs: warmup, epochs: warmup + more, steps_per_epoch: steps };
            let (now, next) = (schedule.lr_at(step), schedule.lr_at(step + 1));
            prop_assert!((0.0..=lr * (1.0 + 1e-12)).contains(&now));
            // the slope is at most lr / warmup while rising and lr * pi / 2 / more while falling
            let slope = (1.0 / warmup.max(1.0 / steps as f64)).max(PI / 2.0 / more) / steps as f64;
            prop_assert!((next - now).abs() <= lr * slope * (1.0 + 1e-9));
        }
    }
}
