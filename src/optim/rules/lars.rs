//! LARS in both published forms.

use super::super::config::{LarsConfig, LarsForm};
use super::super::norm::{norm, norm_of_sum};
use super::{Now, share};
use crate::ops::simd::vectorized;

/// You, Gitman, Ginsburg, 2017, <https://arxiv.org/abs/1708.03888>, algorithm 1, as released: `d = ratio * (g + wd * p)`, then torch's SGD with
/// `d` for the gradient. `ratio` is 1 where the parameter isn't adapted or a norm is zero, else
///
/// - joint: `trust * |p| / |g + wd * p|` (MoCo v3, BYOL, Barlow Twins, `VICReg`);
/// - separate: `trust * |p| / (|g| + wd * |p| + eps)` (solo-learn, lightly, apex's LARC in `SwAV`), and a parameter with a zero norm isn't decayed.
///
/// With `clip_lr` it is `min(ratio / lr, 1)`: a parameter moves at its own rate or at `lr`, whichever is less.
///
/// Deviations: the paper scales the step before the momentum by the learning rate, as `SimCLR`'s release does; the others after it, and so do we.
/// Barlow Twins and `VICReg` adapt a scalar (rank 0); here, as in MoCo v3, rank <= 1 isn't adapted. lightly adapts nothing where the weight decay
/// is 0; here what is adapted is a rule of its own.
pub(in super::super) fn step(lars: &LarsConfig, weights: &mut [f32], gradients: &[f32], buffer: &mut [f32], now: Now) {
    let (mut decay, mut ratio) = (now.weight_decay, 1.0);
    if now.adapt {
        let weight_norm = norm(weights);
        let (gradient_norm, divisor) = match lars.form {
            LarsForm::Joint => {
                let norm = norm_of_sum(gradients, decay as f32, weights);
                (norm, norm)
            }
            LarsForm::Separate => {
                let norm = norm(gradients);
                (norm, norm + decay * weight_norm)
            }
        };
        if weight_norm > 0.0 && gradient_norm > 0.0 {
            ratio = lars.trust * weight_norm / (divisor + lars.eps);
            if lars.clip_lr {
                ratio = (ratio / now.lr).min(1.0);
            }
        } else if lars.form == LarsForm::Separate {
            decay = 0.0;
        }
    }
    let take = if lars.momentum == 0.0 { 1.0 } else { share(lars.dampening, now) };
    let (decay, ratio, momentum) = (decay as f32, ratio as f32, lars.momentum as f32);
    elements(weights, gradients, buffer, decay, ratio, momentum, take, lars.nesterov, now.lr as f32);
}

vectorized! {
    /// The elements of [`step`].
    fn elements(
        weights: &mut [f32], gradients: &[f32], buffer: &mut [f32],
        decay: f32, ratio: f32, momentum: f32, take: f32, nesterov: bool, lr: f32,
    ) {
        for ((p, &g), m) in weights.iter_mut().zip(gradients).zip(buffer) {
            let d = (g + decay * *p) * ratio;
            *m = momentum * *m + take * d;
            *p -= lr * if nesterov { d + momentum * *m } else { *m };
        }
    }
}
