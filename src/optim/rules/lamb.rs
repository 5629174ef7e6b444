//! LAMB, timm's definition.

use super::super::config::LambConfig;
use super::super::norm::{LANES, add_rest, global_norm, norm};
use super::{Now, correction};
use crate::ops::simd::vectorized;

/// You et al., 2019, <https://arxiv.org/abs/1904.00962>, algorithm 2, as in timm 1.0 and NVIDIA's `FusedLAMB`: Adam's update `u` with `wd * p` added,
/// `p -= lr * |p| / |u| * u`, the ratio being 1 where the parameter isn't adapted or a norm is zero.
///
/// `shrink` is what the gradient is divided by, see [`shrink`]. Deviations: no `caution` and no `corrected_weight_decay`. timm counts
/// steps for a group of parameters; here each parameter counts its own, which differs where one is frozen at first.
pub(in super::super) fn step(
    lamb: &LambConfig,
    shrink: f64,
    weights: &mut [f32],
    gradients: &[f32],
    (mean, square): (&mut [f32], &mut [f32]),
    now: Now,
) {
    let [beta1, beta2] = lamb.betas;
    let (whole, root) = if lamb.bias_correction {
        (correction(beta1, now.step), correction(beta2, now.step).sqrt())
    } else {
        (1.0, 1.0)
    };
    let (keep, decay) = if lamb.decoupled { (1.0 - now.lr * now.weight_decay, 0.0) } else { (1.0, now.weight_decay) };
    let take1 = (1.0 - beta1) as f32;
    let (beta1, beta2, take2) = (beta1 as f32, beta2 as f32, (1.0 - beta2) as f32);
    let averaging = lamb.grad_averaging;
    moments(weights, gradients, mean, square, shrink as f32, averaging, take1, beta1, beta2, take2, keep as f32);

    let (whole, root, eps, decay) = (whole as f32, root as f32, lamb.eps as f32, decay as f32);
    let mut ratio = 1.0;
    if now.adapt {
        let (weight_norm, update_norm) =
            (norm(weights), square_of_update(weights, mean, square, whole, root, eps, decay).sqrt());
        if weight_norm > 0.0 && update_norm > 0.0 {
            ratio = weight_norm / update_norm;
        }
        if lamb.trust_clip {
            ratio = ratio.min(1.0);
        }
    }
    move_weights(weights, mean, square, whole, root, eps, decay, ratio as f32, now.lr as f32);
}

/// Returns what the gradient is divided by so that its global norm is at most `max_grad_norm`: `max(norm / max_grad_norm, 1)`.
pub(in super::super) fn shrink(lamb: &LambConfig, gradients: &[Vec<f32>]) -> f64 {
    if lamb.max_grad_norm > 0.0 { (global_norm(gradients) / lamb.max_grad_norm).max(1.0) } else { 1.0 }
}

#[inline(always)]
#[allow(clippy::inline_always, reason = "takes on its caller's target features")]
fn update(p: f32, m: f32, v: f32, whole: f32, root: f32, eps: f32, decay: f32) -> f32 {
    m / whole / (v.sqrt() / root + eps) + decay * p
}

vectorized! {
    /// Decays the weights where that is decoupled, and takes the gradient into the moments.
    fn moments(
        weights: &mut [f32], gradients: &[f32], mean: &mut [f32], square: &mut [f32],
        shrink: f32, averaging: bool, take1: f32, beta1: f32, beta2: f32, take2: f32, keep: f32,
    ) {
        for (((p, &g), m), v) in weights.iter_mut().zip(gradients).zip(mean).zip(square) {
            let g = g / shrink;
            *m = if averaging { *m + take1 * (g - *m) } else { beta1 * *m + g };
            *v = beta2 * *v + take2 * g * g;
            *p *= keep;
        }
    }

    /// The sum of squares of the update, in the order of [`super::super::norm::sum_of_squares`].
    fn square_of_update(weights: &[f32], mean: &[f32], square: &[f32], whole: f32, root: f32, eps: f32, decay: f32) -> f64 {
        let ((p, p_rest), (m, m_rest), (v, v_rest)) =
            (weights.as_chunks::<LANES>(), mean.as_chunks::<LANES>(), square.as_chunks::<LANES>());
        let mut lanes = [0.0f64; LANES];
        for ((p, m), v) in p.iter().zip(m).zip(v) {
            for i in 0..LANES {
                let u = f64::from(update(p[i], m[i], v[i], whole, root, eps, decay));
                lanes[i] += u * u;
            }
        }
        let rest = p_rest.iter().zip(m_rest).zip(v_rest);
        add_rest(lanes, rest.map(|((&p, &m), &v)| update(p, m, v, whole, root, eps, decay)))
    }

    /// The step.
    fn move_weights(
        weights: &mut [f32], mean: &[f32], square: &[f32],
        whole: f32, root: f32, eps: f32, decay: f32, ratio: f32, lr: f32,
    ) {
        for ((p, &m), &v) in weights.iter_mut().zip(mean).zip(square) {
            *p -= lr * (update(*p, m, v, whole, root, eps, decay) * ratio);
        }
    }
}
