//! Adam with L2 decay and `AdamW`, torch's definitions.

use super::{Now, correction};
use crate::ops::simd::vectorized;

/// torch's `AdamW` (Loshchilov & Hutter, 2017, <https://arxiv.org/abs/1711.05101>, algorithm 2 with the learning rate in the decay)
/// where `decoupled`, else torch's Adam (Kingma & Ba, 2014, <https://arxiv.org/abs/1412.6980>, algorithm 1) with `wd * p` added to the gradient.
///
/// Decay first, eps added to the bias-corrected root. Deviation: no `amsgrad`.
pub(in super::super) fn step(
    [beta1, beta2]: [f64; 2],
    eps: f64,
    decoupled: bool,
    weights: &mut [f32],
    gradients: &[f32],
    (mean, square): (&mut [f32], &mut [f32]),
    now: Now,
) {
    let (keep, l2) = if decoupled { (1.0 - now.lr * now.weight_decay, 0.0) } else { (1.0, now.weight_decay) };
    let size = (now.lr / correction(beta1, now.step)) as f32;
    let root = correction(beta2, now.step).sqrt() as f32;
    let (take1, beta2, take2, eps) = ((1.0 - beta1) as f32, beta2 as f32, (1.0 - beta2) as f32, eps as f32);
    elements(weights, gradients, mean, square, l2 as f32, take1, beta2, take2, keep as f32, size, root, eps);
}

vectorized! {
    /// The elements of [`step`]: decay, moments, step.
    fn elements(
        weights: &mut [f32], gradients: &[f32], mean: &mut [f32], square: &mut [f32],
        l2: f32, take1: f32, beta2: f32, take2: f32, keep: f32, size: f32, root: f32, eps: f32,
    ) {
        for (((p, &g), m), v) in weights.iter_mut().zip(gradients).zip(mean).zip(square) {
            let g = g + l2 * *p;
            *m += take1 * (g - *m);
            *v = beta2 * *v + take2 * g * g;
            *p = keep * *p - size * *m / (v.sqrt() / root + eps);
        }
    }
}
