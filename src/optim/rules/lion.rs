//! Lion.

use super::Now;
use crate::ops::simd::vectorized;

/// Chen et al., 2023, <https://arxiv.org/abs/2302.06675>, algorithm 2: `p -= lr * (sign(b1 * m + (1 - b1) * g) + wd * p)`, then
/// `m = b2 * m + (1 - b2) * g`. The decay comes first, as in the release, which differs in the last bit only.
pub(in super::super) fn step(
    [beta1, beta2]: [f64; 2],
    weights: &mut [f32],
    gradients: &[f32],
    mean: &mut [f32],
    now: Now,
) {
    let (take1, take2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
    let keep = (1.0 - now.lr * now.weight_decay) as f32;
    elements(weights, gradients, mean, beta1 as f32, take1, beta2 as f32, take2, keep, now.lr as f32);
}

vectorized! {
    /// The elements of [`step`].
    fn elements(
        weights: &mut [f32], gradients: &[f32], mean: &mut [f32],
        beta1: f32, take1: f32, beta2: f32, take2: f32, keep: f32, lr: f32,
    ) {
        for ((p, &g), m) in weights.iter_mut().zip(gradients).zip(mean) {
            let direction = beta1 * *m + take1 * g;
            let sign = if direction > 0.0 { 1.0 } else if direction < 0.0 { -1.0 } else { 0.0 };
            *p = keep * *p - lr * sign;
            *m = beta2 * *m + take2 * g;
        }
    }
}
