//! The learning rate of each step: linear warm-up, then a way down.

use std::f64::consts::PI;

use super::ramp::Each;
use super::schedule_config::LrDecay;

/// Learning rate as a function of the step; the default way is MAE's (He et al., 2021, <https://arxiv.org/abs/2111.06377>, released `lr_sched.py`).
///
/// With the fractional epoch `e = step / steps_per_epoch`: a straight line from `warmup_lr` to `lr` before the warm-up ends, then
/// `min + (lr - min) / 2 * (1 + cos(pi * (e - warmup) / (epochs - warmup)))`,
/// and `min` from the last epoch on. The first step of a run with a warm-up has rate `warmup_lr`; the last step is one step short of `min`.
/// MoCo v3 uses the same rule with `min = 0`. With `each = "epoch"` `e` is the whole epoch (MoCo v2, `SimSiam`).
///
/// BYOL and Barlow Twins have the same rule. Deviation: DINO's warm-up includes both of its ends, I-JEPA counts from 1, lightly's warm-up is a step ahead and its cosine ends
/// at the last step. [`published`](super::published) has each exactly; this rule is never further from them than they move in two steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Learning rate at the end of the warm-up, scaled with the batch.
    pub lr: f64,
    /// Learning rate at the end, scaled with the batch.
    pub min_lr: f64,
    /// Learning rate of the first step of a warm-up, scaled with the batch.
    pub warmup_lr: f64,
    /// Length of the warm-up in epochs.
    pub warmup_epochs: f64,
    /// Length of the run in epochs.
    pub epochs: f64,
    /// Steps of one epoch.
    pub steps_per_epoch: u64,
    /// The way after the warm-up.
    pub decay: LrDecay,
    /// Epochs of the drops of [`LrDecay::Multistep`].
    pub milestones: Vec<f64>,
    /// Factor of each drop.
    pub gamma: f64,
    /// How often the rate moves.
    pub each: Each,
}

impl Default for Schedule {
    /// A rate of 0 for one epoch of one step; cosine, each step.
    fn default() -> Self {
        Self {
            lr: 0.0,
            min_lr: 0.0,
            warmup_lr: 0.0,
            warmup_epochs: 0.0,
            epochs: 1.0,
            steps_per_epoch: 1,
            decay: LrDecay::Cosine,
            milestones: Vec::new(),
            gamma: 0.1,
            each: Each::Step,
        }
    }
}

impl Schedule {
    /// Returns the learning rate of a step, counted from 0.
    ///
    /// # Panics
    /// If an epoch has no steps.
    #[must_use]
    pub fn lr_at(&self, step: u64) -> f64 {
        assert!(self.steps_per_epoch > 0, "an epoch has at least one step");
        let epoch = match self.each {
            Each::Step => step as f64 / self.steps_per_epoch as f64,
            Each::Epoch => (step / self.steps_per_epoch) as f64,
        };
        let after = epoch - self.warmup_epochs;
        if after < 0.0 {
            return self.warmup_lr + (self.lr - self.warmup_lr) * epoch / self.warmup_epochs;
        }
        let length = self.epochs - self.warmup_epochs;
        match self.decay {
            LrDecay::Cosine => cosine(after, length, self.lr, self.min_lr),
            LrDecay::Linear if after < length => self.lr + (self.min_lr - self.lr) * after / length,
            LrDecay::Linear => self.min_lr,
            LrDecay::Multistep => {
                let passed = self.milestones.iter().filter(|&&milestone| epoch >= milestone).count();
                self.lr * self.gamma.powf(passed as f64)
            }
            LrDecay::Constant => self.lr,
        }
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
    use super::super::published::{Dino, IjepaLr, Lightly, barlow_lr, byol_lr};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn published_rates_are_this_rule_or_a_step_away() {
        let (peak, start, total, warmup) = (0.8, 0.1, 200, 30);
        let rule = |end: f64, start: f64| Schedule {
            lr: peak,
            min_lr: end,
            warmup_lr: start,
            warmup_epochs: 3.0,
            epochs: 20.0,
            steps_per_epoch: 10,
            ..Schedule::default()
        };
        for step in 0..=total {
            assert!((rule(0.0, 0.0).lr_at(step) - byol_lr(step, warmup, total, peak)).abs() < 1e-12, "{step}");
            assert!(
                (rule(peak / 1000.0, 0.0).lr_at(step) - barlow_lr(step, warmup, total, peak)).abs() < 1e-12,
                "{step}"
            );
        }
        let end = 0.01;
        let dino = Dino { frozen: 0, warmup, total, warmup_start: start, base: peak, end };
        let ijepa = IjepaLr { warmup, total, start, peak, end };
        let lightly = Lightly { warmup, total, warmup_start: start, warmup_end: peak, start: peak, end, period: None };
        let published: [&dyn Fn(u64) -> f64; 3] =
            [&|step| dino.at(step), &|step| ijepa.at(step), &|step| lightly.at(step)];
        for (index, at) in published.iter().enumerate() {
            let mut differs = false;
            for step in 0..total {
                let ours = rule(end, start).lr_at(step);
                let near: Vec<f64> = (step.saturating_sub(2)..=(step + 2).min(total - 1)).map(at).collect();
                let low = near.iter().copied().fold(f64::INFINITY, f64::min);
                let high = near.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                // the first step has `warmup_lr`, which I-JEPA and lightly have before it
                let slack = (peak - start) / warmup as f64;
                assert!((low - slack..=high + slack).contains(&ours), "{index}, step {step}: {ours}, {low} to {high}");
                differs |= (ours - at(step)).abs() > 1e-9;
            }
            assert!(differs, "{index} is this rule: say so");
        }
    }

    #[test]
    fn named_points() {
        let schedule = Schedule {
            lr: 1.0,
            min_lr: 0.1,
            warmup_epochs: 2.0,
            epochs: 10.0,
            steps_per_epoch: 5,
            ..Schedule::default()
        };
        let points = [(0, 0.0), (5, 0.5), (10, 1.0), (30, 0.55), (50, 0.1), (1000, 0.1)];
        for (step, expected) in points {
            assert!((schedule.lr_at(step) - expected).abs() < 1e-12, "{step}");
        }
    }

    #[test]
    fn a_run_may_be_all_warmup_or_have_none() {
        let all = Schedule { lr: 1.0, warmup_epochs: 2.0, epochs: 2.0, steps_per_epoch: 2, ..Schedule::default() };
        assert_eq!([0, 1, 2, 3, 4].map(|step| all.lr_at(step)), [0.0, 0.25, 0.5, 0.75, 0.0]);
        assert_eq!(Schedule { warmup_epochs: 0.0, ..all }.lr_at(0), 1.0);
    }

    #[test]
    fn other_ways_down() {
        let base = Schedule {
            lr: 1.0,
            min_lr: 0.2,
            warmup_lr: 0.5,
            warmup_epochs: 2.0,
            epochs: 10.0,
            steps_per_epoch: 4,
            ..Schedule::default()
        };
        let at = |schedule: &Schedule, epochs: [f64; 5]| epochs.map(|epoch| schedule.lr_at((epoch * 4.0) as u64));
        let close = |got: [f64; 5], expected: [f64; 5]| {
            assert!(got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-12), "{got:?} {expected:?}");
        };
        let linear = Schedule { decay: LrDecay::Linear, ..base.clone() };
        close(at(&linear, [0.0, 1.0, 2.0, 6.0, 12.0]), [0.5, 0.75, 1.0, 0.6, 0.2]);
        let drops = Schedule { decay: LrDecay::Multistep, milestones: vec![4.0, 7.5], ..base.clone() };
        close(at(&drops, [1.0, 3.75, 4.0, 7.25, 7.5]), [0.75, 1.0, 0.1, 0.1, 0.01]);
        let constant = Schedule { decay: LrDecay::Constant, ..base.clone() };
        close(at(&constant, [1.5, 2.0, 5.0, 9.75, 20.0]), [0.875, 1.0, 1.0, 1.0, 1.0]);
        let by_epoch = Schedule { each: Each::Epoch, ..base.clone() };
        close(
            at(&by_epoch, [0.75, 1.75, 2.75, 6.75, 9.75]),
            [0.0, 1.0, 2.0, 6.0, 9.0].map(|e| base.lr_at(4 * e as u64)),
        );
    }

    proptest! {
        #[test]
        fn bounded_and_continuous(
            lr in 1e-6..10.0f64, low in 0.0..1.0f64, warmup in 0.0..10.0f64, more in 0.1..20.0f64, steps in 1u64..200, step in 0u64..5000,
        ) {
            let schedule = Schedule { lr, min_lr: low * lr, warmup_epochs: warmup, epochs: warmup + more, steps_per_epoch: steps, ..Schedule::default() };
            let (now, next) = (schedule.lr_at(step), schedule.lr_at(step + 1));
            prop_assert!((0.0..=lr * (1.0 + 1e-12)).contains(&now));
            // the slope is at most lr / warmup while rising and lr * pi / 2 / more while falling
            let slope = (1.0 / warmup.max(1.0 / steps as f64)).max(PI / 2.0 / more) / steps as f64;
            prop_assert!((next - now).abs() <= lr * slope * (1.0 + 1e-9));
        }
    }
}
