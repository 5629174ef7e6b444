//! Alarms while training: what a falling or a flat loss hides, said as soon as it shows.

use std::collections::VecDeque;

use super::trainer::StepNumbers;
use crate::eval::{Warning, plateau};

/// Steps that are judged together.
const WINDOW: usize = 50;
/// Steps before the first judgement, beyond the warm-up: networks start with similar outputs.
const PATIENCE: u64 = 100;
/// Spread of the normalised embeddings, 1 on the whole sphere, below which the mean cosine of two images is above 0.99.
const COLLAPSED: f64 = 0.1;

/// Effective number of directions of the embeddings below which they lie on a line, which a spread doesn't show when images are at both of its ends
/// (batch norm at the end of a projector makes that the usual collapse: Jing et al., 2021, <https://arxiv.org/abs/2110.09348>).
const LINE: f64 = 1.15;

/// Watches the numbers of the steps. Each alarm is raised once in a process; a resumed run watches anew.
#[derive(Debug)]
pub(super) struct Alarms {
    warmup: u64,
    losses: VecDeque<f64>,
    spreads: VecDeque<f64>,
    ranks: VecDeque<f64>,
    raised: Vec<&'static str>,
}

impl Alarms {
    pub(super) fn new(warmup: u64) -> Self {
        Self { warmup, losses: VecDeque::new(), spreads: VecDeque::new(), ranks: VecDeque::new(), raised: Vec::new() }
    }

    /// Takes the numbers of a step and returns what is to be said.
    pub(super) fn observe(&mut self, numbers: &StepNumbers) -> Vec<Warning> {
        let early = numbers.step < self.warmup + PATIENCE;
        let mut found = Vec::new();
        if let Some([loss, uniform]) = numbers.uniform_loss
            && let Some(mean) = push(&mut self.losses, loss)
        {
            found.extend(plateau(mean, uniform));
        }
        if let Some(shape) = numbers.embeddings
            && let Some(spread) = push(&mut self.spreads, shape.spread)
        {
            let rank = shape.rank.and_then(|rank| push(&mut self.ranks, rank));
            let step = numbers.step;
            if spread < COLLAPSED || spread.is_nan() {
                found.push(collapse(format!(
                    "the embeddings of different images are nearly the same at step {step}: spread {spread:.3} of the last {WINDOW} steps \
                     (1 fills the sphere, 0 is a point)"
                )));
            } else if let Some(rank) = rank.filter(|rank| *rank < LINE) {
                found.push(collapse(format!(
                    "the embeddings of all images lie nearly on a line at step {step}: they differ in {rank:.2} directions over the last \
                     {WINDOW} steps"
                )));
            }
        }
        found.retain(|warning| !early && !self.raised.contains(&warning.code));
        self.raised.extend(found.iter().map(|warning| warning.code));
        found
    }
}

fn collapse(reason: String) -> Warning {
    let remedy = "stop; look for what keeps embeddings apart: predictor and momentum of the teacher, centring, temperature, weights of the \
                  loss's terms; lower the learning rate and start again from an earlier checkpoint";
    Warning { code: "collapse", reason, remedy: remedy.to_owned() }
}

/// Adds a value and returns the mean of a full window.
fn push(window: &mut VecDeque<f64>, value: f64) -> Option<f64> {
    if window.len() == WINDOW {
        window.pop_front();
    }
    window.push_back(value);
    (window.len() == WINDOW).then(|| window.iter().sum::<f64>() / WINDOW as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Shape;
    use crate::precision::PrecisionState;

    fn run(loss: impl Fn(u64) -> f64, spread: impl Fn(u64) -> Option<f64>, steps: u64) -> Vec<(u64, &'static str)> {
        shaped(loss, |step| spread(step).map(|spread| Shape { spread, rank: Some(20.0) }), steps)
    }

    fn shaped(loss: impl Fn(u64) -> f64, shape: impl Fn(u64) -> Option<Shape>, steps: u64) -> Vec<(u64, &'static str)> {
        let mut alarms = Alarms::new(20);
        let mut raised = Vec::new();
        for step in 1..=steps {
            let numbers = StepNumbers {
                step,
                loss: loss(step),
                lr: 0.1,
                grad_norm: 1.0,
                parts: Vec::new(),
                uniform_loss: Some([loss(step), 8.3178]),
                embeddings: shape(step),
                skipped: false,
                precision: PrecisionState::default(),
            };
            raised.extend(alarms.observe(&numbers).into_iter().map(|warning| (step, warning.code)));
        }
        raised
    }

    #[test]
    fn healthy_numbers_raise_nothing() {
        assert_eq!(run(|step| 8.3 - 0.01 * step as f64, |_| Some(0.8), 400), []);
        assert_eq!(run(|_| 4.0, |_| None, 400), []);
        // a slow start is no alarm
        assert_eq!(
            run(|step| if step < 90 { 8.3178 } else { 6.0 }, |step| Some(if step < 90 { 0.01 } else { 0.9 }), 400),
            []
        );
    }

    #[test]
    fn a_flat_loss_and_a_point_are_said_once_and_within_200_steps() {
        assert_eq!(run(|_| 8.3178, |_| Some(0.9), 600), [(120, "loss-plateau")]);
        assert_eq!(run(|_| 4.0, |_| Some(0.02), 600), [(120, "collapse")]);
        assert_eq!(run(|_| 4.0, |step| Some(if step < 300 { 0.9 } else { 0.0 }), 600), [(344, "collapse")]);
        assert_eq!(run(|_| 4.0, |_| Some(f64::NAN), 600), [(120, "collapse")]);
        // both ends of a line are far apart
        let line = |step| Some(Shape { spread: 1.0, rank: Some(if step < 200 { 5.0 } else { 1.01 }) });
        assert_eq!(shaped(|_| 4.0, line, 600), [(248, "collapse")]);
    }
}
