//! A number that moves over the course of a run: weight decay, momentum of a teacher, temperature.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schedule::cosine;

/// A number that goes from `start` to `end` and stays there.
///
/// The momentum of BYOL, MoCo v3 and DINO is `{ start = 0.996, end = 1.0 }`, that of I-JEPA the same with `shape = "linear"`; DINO's teacher
/// temperature is `{ start = 0.04, end = 0.07, shape = "linear", epochs = 30, each = "epoch" }`; a constant has two equal ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RampConfig {
    /// Value of the first step.
    pub start: f64,
    /// Value at the end.
    pub end: f64,
    /// The way between them.
    #[serde(default)]
    pub shape: RampShape,
    /// Epochs of the way (may be fractional); absent: the whole run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Whether it moves with each step, and reaches `end` with the first step after `epochs`, or stays the same for an epoch and has `end` in the last
    /// of `epochs` (numpy's `linspace`, as DINO's teacher temperature).
    #[serde(default)]
    pub each: Each,
}

/// The way from one value to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RampShape {
    /// Half a cosine.
    #[default]
    Cosine,
    /// A straight line.
    Linear,
}

/// How often a number moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Each {
    /// With every step.
    #[default]
    Step,
    /// Between epochs only.
    Epoch,
}

impl RampConfig {
    /// Half a cosine over the whole run.
    #[must_use]
    pub fn cosine(start: f64, end: f64) -> Self {
        Self { start, end, shape: RampShape::Cosine, epochs: None, each: Each::Step }
    }

    /// A number that doesn't move.
    #[must_use]
    pub fn constant(value: f64) -> Self {
        Self { start: value, end: value, shape: RampShape::Linear, epochs: None, each: Each::Step }
    }

    /// Returns the key and what is wrong with its value, if something is. The ends have limits of their own, which the caller knows.
    ///
    /// # Errors
    /// When an end isn't finite or `epochs` isn't a length.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        for (key, value) in [("start", self.start), ("end", self.end)] {
            if !value.is_finite() {
                return Err((key, format!("is {value}, but must be finite")));
            }
        }
        match self.epochs {
            Some(epochs) if !(epochs >= 0.0 && epochs.is_finite()) => {
                Err(("epochs", format!("is {epochs}, but must be at least 0 and finite")))
            }
            _ => Ok(()),
        }
    }

    /// Resolves it for a run of `steps`.
    ///
    /// # Panics
    /// If an epoch has no steps.
    #[must_use]
    pub fn resolve(&self, steps: u64, steps_per_epoch: u64) -> Ramp {
        assert!(steps_per_epoch > 0, "an epoch has at least one step");
        let per_epoch = steps_per_epoch as f64;
        let (length, every) = match self.each {
            Each::Step => (self.epochs.map_or(steps as f64, |epochs| epochs * per_epoch), 1),
            Each::Epoch => (self.epochs.unwrap_or((steps as f64 / per_epoch).ceil()) - 1.0, steps_per_epoch),
        };
        Ramp { start: self.start, end: self.end, shape: self.shape, length, every }
    }
}

/// A [`RampConfig`] for one run: the value of each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ramp {
    /// Value of the first step.
    pub start: f64,
    /// Value at the end.
    pub end: f64,
    shape: RampShape,
    /// Moves until `end` is reached.
    length: f64,
    /// Steps between two moves.
    every: u64,
}

impl Ramp {
    /// A number that doesn't move.
    #[must_use]
    pub fn constant(value: f64) -> Self {
        RampConfig::constant(value).resolve(1, 1)
    }

    /// Returns the value of a step, counted from 0.
    #[must_use]
    pub fn at(&self, step: u64) -> f64 {
        let moves = (step / self.every) as f64;
        match self.shape {
            _ if moves >= self.length => self.end,
            RampShape::Cosine => cosine(moves, self.length, self.start, self.end),
            RampShape::Linear => self.start + (self.end - self.start) * moves / self.length,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::published::{Dino, byol_momentum, ijepa_momentum};
    use super::*;

    fn ramp(start: f64, end: f64) -> RampConfig {
        RampConfig { start, end, shape: RampShape::Cosine, epochs: None, each: Each::Step }
    }

    #[test]
    fn published_momenta_and_weight_decays_are_ramps() {
        let momentum = ramp(0.996, 1.0).resolve(100, 10);
        let line = RampConfig { shape: RampShape::Linear, ..ramp(0.996, 1.0) }.resolve(100, 10);
        let decay = ramp(0.04, 0.4).resolve(100, 10);
        let dino = Dino { frozen: 0, warmup: 0, total: 100, warmup_start: 0.0, base: 0.04, end: 0.4 };
        for step in 0..110 {
            assert_eq!(momentum.at(step), byol_momentum(step as f64, 100.0, 0.996));
            assert_eq!(decay.at(step), dino.at(step));
            let expected = ijepa_momentum(step.min(100), 100.0, 0.996, 1.0);
            assert!((line.at(step) - expected).abs() < 1e-12, "{step}");
        }
        assert_eq!((momentum.at(0), momentum.at(100), decay.at(100)), (0.996, 1.0, 0.4));
    }

    #[test]
    fn the_teacher_temperature_of_dino_moves_between_epochs() {
        // numpy.concatenate((numpy.linspace(0.04, 0.07, 4), numpy.ones(6) * 0.07))[epoch]
        let config = RampConfig { shape: RampShape::Linear, epochs: Some(4.0), each: Each::Epoch, ..ramp(0.04, 0.07) };
        let temperature = config.resolve(30, 3);
        let by_epoch = [0.04, 0.05, 0.06, 0.07, 0.07, 0.07];
        for step in 0..18 {
            assert!((temperature.at(step) - by_epoch[step as usize / 3]).abs() < 1e-15, "{step}");
        }
        let at_once = RampConfig { epochs: Some(0.0), ..config }.resolve(30, 3);
        assert_eq!(at_once.at(0), 0.07);
        let whole_run = RampConfig { epochs: None, ..config }.resolve(30, 3);
        assert_eq!((whole_run.at(0), whole_run.at(29)), (0.04, 0.07));
    }

    #[test]
    fn constants_stay_and_tables_are_read() {
        assert_eq!([0, 1, 1000].map(|step| Ramp::constant(0.3).at(step)), [0.3; 3]);
        let config: RampConfig = toml::from_str("start = 0.1\nend = 0.2\nshape = \"linear\"\nepochs = 2").unwrap();
        assert!((config.resolve(100, 10).at(10) - 0.15).abs() < 1e-12);
        assert!(toml::from_str::<RampConfig>("start = 0.1\nend = 0.2\nfoo = 1").is_err());
        assert_eq!(ramp(f64::NAN, 0.0).check().unwrap_err().0, "start");
        assert_eq!(RampConfig { epochs: Some(-1.0), ..config }.check().unwrap_err().0, "epochs");
        assert_eq!(config.check(), Ok(()));
    }
}
