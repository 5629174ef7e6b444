//! Stochastic gradient descent with momentum, torch's definition.

use super::super::config::SgdConfig;
use super::{Now, share};
use crate::ops::simd::vectorized;

/// Plain gradient descent: `p -= lr * (g + wd * p)`.
pub(in super::super) fn descend(weights: &mut [f32], gradients: &[f32], now: Now) {
    descend_elements(weights, gradients, now.weight_decay as f32, now.lr as f32);
}

/// `d = g + wd * p; m = momentum * m + (1 - dampening) * d; p -= lr * m`, or `p -= lr * (d + momentum * m)` for Nesterov.
///
/// torch's buffer is the first gradient itself; starting from zero gives the same, without dampening in the first step.
pub(in super::super) fn step(sgd: &SgdConfig, weights: &mut [f32], gradients: &[f32], buffer: &mut [f32], now: Now) {
    let (decay, momentum, take) = (now.weight_decay as f32, sgd.momentum as f32, share(sgd.dampening, now));
    elements(weights, gradients, buffer, decay, momentum, take, sgd.nesterov, now.lr as f32);
}

vectorized! {
    /// The elements of [`descend`].
    fn descend_elements(weights: &mut [f32], gradients: &[f32], decay: f32, lr: f32) {
        for (p, &g) in weights.iter_mut().zip(gradients) {
            *p -= lr * (g + decay * *p);
        }
    }

    /// The elements of [`step`].
    fn elements(
        weights: &mut [f32], gradients: &[f32], buffer: &mut [f32],
        decay: f32, momentum: f32, take: f32, nesterov: bool, lr: f32,
    ) {
        for ((p, &g), m) in weights.iter_mut().zip(gradients).zip(buffer) {
            let d = g + decay * *p;
            *m = momentum * *m + take * d;
            *p -= lr * if nesterov { d + momentum * *m } else { *m };
        }
    }
}
