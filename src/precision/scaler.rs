//! The scale of the loss.

/// The scale that a loss is multiplied by so that small gradients survive in fp16, moved by whether they overflowed:
/// Micikevicius et al., 2017, <https://arxiv.org/abs/1710.03740>, section 3.2, as in torch's `GradScaler`.
///
/// The scale is an `f32`, as torch's is, and rounded to one after each change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    scale: f32,
    growth: f64,
    backoff: f64,
    interval: u64,
    good_steps: u64,
}

impl Default for LossScaler {
    /// torch's numbers: 65536, doubled every 2000 good steps, halved on overflow.
    fn default() -> Self {
        Self::new(65536.0, 2.0, 0.5, 2000)
    }
}

impl LossScaler {
    /// Starts at `scale`; multiplies it by `growth` after `interval` good steps in a row and by `backoff` after a step that overflowed.
    ///
    /// # Panics
    /// If `growth` isn't above 1, `backoff` not within 0 and 1, or `scale` or `interval` not above 0.
    #[must_use]
    pub fn new(scale: f32, growth: f64, backoff: f64, interval: u64) -> Self {
        assert!(scale > 0.0 && interval > 0, "a scale and an interval above 0");
        assert!(growth > 1.0 && backoff > 0.0 && backoff < 1.0, "growth above 1, backoff between 0 and 1");
        Self { scale, growth, backoff, interval, good_steps: 0 }
    }

    /// Returns what the loss of this step is multiplied by, and its gradients divided by.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Returns the good steps since the scale last moved.
    #[must_use]
    pub fn good_steps(&self) -> u64 {
        self.good_steps
    }

    /// Moves the scale after a step whose gradients were finite or, with `overflow`, were not; such a step moves no weights.
    pub fn update(&mut self, overflow: bool) {
        if overflow {
            self.scale = (f64::from(self.scale) * self.backoff) as f32;
            self.good_steps = 0;
            return;
        }
        self.good_steps += 1;
        if self.good_steps == self.interval {
            let grown = (f64::from(self.scale) * self.growth) as f32;
            // torch keeps a scale that would overflow itself
            if grown.is_finite() {
                self.scale = grown;
            }
            self.good_steps = 0;
        }
    }

    /// Takes over a state that [`Self::scale`] and [`Self::good_steps`] gave.
    pub fn load_state(&mut self, scale: f32, good_steps: u64) {
        (self.scale, self.good_steps) = (scale, good_steps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_after_good_steps_and_halves_on_overflow() {
        let mut scaler = LossScaler::new(8.0, 2.0, 0.5, 2);
        let scales = [false, false, true, false, true, false, false].map(|overflow| {
            scaler.update(overflow);
            scaler.scale()
        });
        assert_eq!(scales, [8.0, 16.0, 8.0, 8.0, 4.0, 4.0, 8.0]);
        assert_eq!(scaler.good_steps(), 0);
    }

    #[test]
    fn a_scale_never_becomes_infinite_and_is_restored() {
        let mut scaler = LossScaler::new(f32::MAX, 2.0, 0.5, 1);
        scaler.update(false);
        assert_eq!(scaler.scale(), f32::MAX);
        let mut other = LossScaler::default();
        other.load_state(scaler.scale(), scaler.good_steps());
        assert_eq!((other.scale(), other.good_steps()), (f32::MAX, 0));
    }
}
