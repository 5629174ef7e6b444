//! Settings of the DINO family that follow from the size of the data.
//!
//! The published values were found on the 1.3 million images of ImageNet. On few images they end with a teacher that says the same of every image
//! (a loss that stays at `ln K`: facebookresearch/dino, issues 43, 61 and 246). The one published rule is lightly-train's
//! (`_methods/dino/dino.py`, `resolve_auto`): fewer prototypes, a sharper and faster teacher, and lengths in steps.
//!
//! Deviation: the last layer is frozen for at most a tenth of the run; the rule has 1250 steps however short it is. The rule's warm-up of the
//! learning rate (12500 steps, at most a tenth of the run) is left to `schedule.warmup_epochs`.

use super::RunFacts;
use crate::optim::{RampConfig, RampShape};
use crate::problem::plural;

/// Prototypes below a number of images.
const PROTOTYPES: [(usize, usize); 5] =
    [(20_000, 1024), (50_000, 2048), (100_000, 4096), (200_000, 16_384), (500_000, 32_768)];
/// Between these numbers of images temperature and momentum go from one value to the other.
const IMAGES: [f64; 2] = [20_000.0, 1_000_000.0];
/// Steps that the temperature rises for, and their largest share of the run.
const WARMUP: (f64, f64) = (37_500.0, 0.3);
/// Steps that the last layer is frozen for, and their largest share of the run.
const FREEZE: (f64, f64) = (1250.0, 0.1);

/// Fills in what the table `at` leaves open, and notes each value.
pub(super) struct SmallData<'a> {
    at: &'a str,
    facts: &'a RunFacts,
    notes: Vec<String>,
}

impl<'a> SmallData<'a> {
    pub(super) fn new(at: &'a str, facts: &'a RunFacts) -> Self {
        Self { at, facts, notes: Vec::new() }
    }

    pub(super) fn notes(self) -> Vec<String> {
        self.notes
    }

    /// The outputs of a head, at most as many as `published`.
    pub(super) fn prototypes(&mut self, key: &str, open: &mut Option<usize>, published: usize) {
        let images = self.facts.images;
        let rule = PROTOTYPES.iter().find(|(limit, _)| images < *limit).map_or(65_536, |(_, prototypes)| *prototypes);
        let value = rule.min(published);
        self.decide(key, open, value, &format!("{value}, {published} as published"));
    }

    /// The teacher's temperature, in the key named.
    pub(super) fn teacher_temperature(&mut self, key: &str, open: &mut Option<RampConfig>) {
        let end = self.between(0.02, 0.07, 100.0);
        let start = along(end, [0.02, 0.07], [0.02, 0.04], 100.0).min(end);
        if start == end {
            return self.decide(
                key,
                open,
                RampConfig::constant(end),
                &format!("{end}, from 0.04 to 0.07 as published"),
            );
        }
        let steps = self.at_most(WARMUP);
        let epochs = Some(steps as f64 / self.facts.steps_per_epoch as f64);
        let ramp = RampConfig { end, shape: RampShape::Linear, epochs, ..RampConfig::constant(start) };
        let text = format!("{start} to {end} in {}, 0.04 to 0.07 as published", plural(steps, "step"));
        self.decide(key, open, ramp, &text);
    }

    /// The teacher's momentum, which ends at 1.
    pub(super) fn momentum(&mut self, open: &mut Option<RampConfig>, published: f64) {
        let start = self.between(0.99, published, 1000.0);
        self.decide(
            "momentum",
            open,
            RampConfig::cosine(start, 1.0),
            &format!("{start} to 1, from {published} as published"),
        );
    }

    /// How long the last layer is frozen, unless that is given in epochs.
    pub(super) fn freeze_steps(&mut self, epochs: Option<f64>, open: &mut Option<u64>) {
        if epochs.is_none() {
            let steps = self.at_most(FREEZE);
            self.decide("freeze_steps", open, steps, &format!("{steps} of {} steps", self.facts.steps));
        }
    }

    fn decide<T>(&mut self, key: &str, open: &mut Option<T>, value: T, text: &str) {
        if open.is_none() {
            *open = Some(value);
            self.notes.push(format!("`{}.{key}`: {text} ({})", self.at, plural(self.facts.images, "image")));
        }
    }

    fn between(&self, few: f64, many: f64, digits: f64) -> f64 {
        along(self.facts.images as f64, IMAGES, [few, many], digits)
    }

    fn at_most(&self, (steps, share): (f64, f64)) -> u64 {
        steps.min(share * self.facts.steps as f64).floor() as u64
    }
}

/// The straight line through two points, constant beyond them, rounded to `1 / digits`.
fn along(x: f64, [from, to]: [f64; 2], [low, high]: [f64; 2], digits: f64) -> f64 {
    let share = ((x - from) / (to - from)).clamp(0.0, 1.0);
    ((low + (high - low) * share) * digits).round() / digits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(images: usize, steps: u64) -> (usize, RampConfig, f64, u64) {
        let facts = RunFacts { images, steps, steps_per_epoch: 100, ..RunFacts::default() };
        let mut rule = SmallData::new("method.dino", &facts);
        let (mut prototypes, mut temperature, mut momentum, mut freeze) = (None, None, None, None);
        rule.prototypes("prototypes", &mut prototypes, 65_536);
        rule.teacher_temperature("teacher_temperature", &mut temperature);
        rule.momentum(&mut momentum, 0.996);
        rule.freeze_steps(None, &mut freeze);
        assert_eq!(rule.notes().len(), 4);
        (prototypes.unwrap(), temperature.unwrap(), momentum.unwrap().start, freeze.unwrap())
    }

    #[test]
    fn values_are_lightly_trains() {
        let (prototypes, temperature, momentum, freeze) = decided(3000, 1000);
        assert_eq!((prototypes, momentum, freeze), (1024, 0.99, 100));
        assert_eq!(temperature, RampConfig::constant(0.02));
        let (prototypes, temperature, momentum, freeze) = decided(510_000, 100_000);
        assert_eq!((prototypes, momentum, freeze), (65_536, 0.993, 1250));
        assert_eq!((temperature.start, temperature.end, temperature.epochs), (0.03, 0.05, Some(300.0)));
        let (prototypes, temperature, momentum, _) = decided(1_281_167, 200_000);
        assert_eq!((prototypes, momentum), (65_536, 0.996));
        assert_eq!((temperature.start, temperature.end, temperature.epochs), (0.04, 0.07, Some(375.0)));
        assert_eq!([20_000, 50_000, 100_000, 200_000].map(|n| decided(n, 10).0), [2048, 4096, 16_384, 32_768]);
    }

    #[test]
    fn what_is_given_stays() {
        let facts = RunFacts { images: 10, steps: 10, steps_per_epoch: 1, ..RunFacts::default() };
        let mut rule = SmallData::new("method.dino", &facts);
        let (mut prototypes, mut freeze) = (Some(7), None);
        rule.prototypes("prototypes", &mut prototypes, 65_536);
        rule.freeze_steps(Some(1.0), &mut freeze);
        assert_eq!((prototypes, freeze, rule.notes().len()), (Some(7), None, 0));
    }
}
