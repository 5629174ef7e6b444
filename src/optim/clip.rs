//! Gradient clipping.

use super::norm::sum_of_squares;

/// Added to a norm before dividing by it: torch's `clip_grad_norm_` and DINO's `clip_gradients`.
const EPSILON: f64 = 1e-6;

/// How gradients are clipped.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Clip {
    /// Not at all.
    #[default]
    None,
    /// To a global norm, see [`clip_global_norm`].
    Global(f64),
    /// Each parameter to a norm, see [`clip_each_norm`].
    Each(f64),
}

impl Clip {
    /// Clips the gradient, a vector for each parameter with its sum of squares, and returns its global norm before.
    pub fn apply(self, gradients: &mut [Vec<f32>], squares: &[f64]) -> f64 {
        let norm = squares.iter().sum::<f64>().sqrt();
        let each = gradients.iter_mut().zip(squares);
        match self {
            Self::None => {}
            Self::Global(limit) => each.for_each(|(gradient, _)| scale_down(gradient, norm, limit)),
            Self::Each(limit) => each.for_each(|(gradient, square)| scale_down(gradient, square.sqrt(), limit)),
        }
        norm
    }

    fn alone(self, gradients: &mut [Vec<f32>]) -> f64 {
        let squares: Vec<f64> = gradients.iter().map(|gradient| sum_of_squares(gradient)).collect();
        self.apply(gradients, &squares)
    }
}

/// Scales the whole gradient so that its norm is at most `max_norm`, and returns the norm before.
///
/// torch's `clip_grad_norm_`: the factor is `max_norm / (norm + 1e-6)`, at most 1. Deviations: the norm is taken in
/// `f64`, and when it isn't finite the gradient stays as it is; the caller sees the norm and stops.
pub fn clip_global_norm(gradients: &mut [Vec<f32>], max_norm: f64) -> f64 {
    Clip::Global(max_norm).alone(gradients)
}

/// Scales the gradient of each parameter on its own so that its norm is at most `max_norm`.
///
/// DINO's `clip_gradients` (Caron et al., 2021, <https://arxiv.org/abs/2104.14294>, released `utils.py`): directions between parameters change.
pub fn clip_each_norm(gradients: &mut [Vec<f32>], max_norm: f64) {
    Clip::Each(max_norm).alone(gradients);
}

fn scale_down(values: &mut [f32], norm: f64, max_norm: f64) {
    let factor = max_norm / (norm + EPSILON);
    if norm.is_finite() && factor < 1.0 {
        let factor = factor as f32;
        for value in values {
            *value *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::norm::{global_norm, norm};
    use super::*;

    #[test]
    fn long_gradients_become_max_norm_and_short_ones_stay() {
        let mut gradients = [vec![3.0, 0.0], vec![4.0]];
        assert_eq!(clip_global_norm(&mut gradients, 1.0), 5.0);
        assert!((global_norm(&gradients) - 1.0).abs() < 1e-6);
        let before = gradients.clone();
        assert!(clip_global_norm(&mut gradients, 2.0) < 1.1);
        assert_eq!(gradients, before);
    }

    #[test]
    fn each_parameter_is_clipped_on_its_own() {
        let mut gradients = [vec![30.0, 40.0], vec![0.3, 0.4]];
        clip_each_norm(&mut gradients, 1.0);
        assert!((norm(&gradients[0]) - 1.0).abs() < 1e-6);
        assert_eq!(gradients[1], [0.3, 0.4]);
    }

    #[test]
    fn the_norm_before_is_told_whatever_is_clipped() {
        let clipped = |clip: Clip| {
            let mut gradients = [vec![3.0], vec![4.0]];
            assert_eq!(clip.alone(&mut gradients), 5.0);
            gradients.concat().iter().map(|g| (g * 1000.0).round() / 1000.0).collect::<Vec<f32>>()
        };
        assert_eq!(clipped(Clip::None), [3.0, 4.0]);
        assert_eq!(clipped(Clip::Global(1.0)), [0.6, 0.8]);
        assert_eq!(clipped(Clip::Each(1.0)), [1.0, 1.0]);
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut gradients = [vec![1.0], vec![bad]];
            assert!(!clip_global_norm(&mut gradients, 0.5).is_finite());
            assert_eq!(gradients[0], [1.0]);
            assert!(!gradients[1][0].is_finite());
        }
    }
}
