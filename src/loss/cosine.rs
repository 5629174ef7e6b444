//! Agreement of predictions with targets by cosine: BYOL and `SimSiam`.
//!
//! - BYOL: Grill et al., 2020, <https://arxiv.org/abs/2006.07733>, equation 2, both directions added as in the released code:
//!   `|p1/|p1| - z2/|z2||^2 + |p2/|p2| - z1/|z1||^2 = 4 - 2 cos(p1, z2) - 2 cos(p2, z1)`.
//! - `SimSiam`: Chen, He, 2020, <https://arxiv.org/abs/2011.10566>, equation 2: `-(cos(p1, z2) + cos(p2, z1)) / 2`.
//!
//! No gradient reaches the targets.

use burn::tensor::Tensor;

use super::reduce::total;
use super::rows::{MIN_NORM, l2_normalize};

/// Smallest norm of torch's `CosineSimilarity`, which the released `SimSiam` code calls.
const SIMSIAM_MIN_NORM: f64 = 1e-8;

/// Returns BYOL's loss summed over the b images; divide by b.
///
/// # Shapes
/// - `predictions`, `targets`: of the two views, each `[b, d]`, not normalised.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ.
#[must_use]
pub fn byol(predictions: [Tensor<2>; 2], targets: [Tensor<2>; 2]) -> Tensor<1> {
    total(byol_per_image(predictions, targets))
}

/// Returns BYOL's loss of each image, `[b]`; see [`byol`].
///
/// # Panics
/// As [`byol`].
#[must_use]
pub fn byol_per_image(predictions: [Tensor<2>; 2], targets: [Tensor<2>; 2]) -> Tensor<1> {
    let ([p1, p2], [z1, z2]) = (predictions, targets);
    let direction = |prediction: Tensor<2>, target: Tensor<2>| -> Tensor<1> {
        assert_eq!(prediction.dims(), target.dims(), "one target a prediction");
        let distance = l2_normalize(prediction, MIN_NORM) - l2_normalize(target.detach(), MIN_NORM);
        distance.square().sum_dim(1).squeeze_dim(1)
    };
    direction(p1, z2) + direction(p2, z1)
}

/// Returns `SimSiam`'s loss summed over the b images; divide by b.
///
/// # Shapes
/// - `predictions`, `targets`: of the two views, each `[b, d]`, not normalised.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ.
#[must_use]
pub fn simsiam(predictions: [Tensor<2>; 2], targets: [Tensor<2>; 2]) -> Tensor<1> {
    total(simsiam_per_image(predictions, targets))
}

/// Returns `SimSiam`'s loss of each image, `[b]`; see [`simsiam`].
///
/// # Panics
/// As [`simsiam`].
#[must_use]
pub fn simsiam_per_image(predictions: [Tensor<2>; 2], targets: [Tensor<2>; 2]) -> Tensor<1> {
    let ([p1, p2], [z1, z2]) = (predictions, targets);
    let cosine = |prediction: Tensor<2>, target: Tensor<2>| -> Tensor<1> {
        assert_eq!(prediction.dims(), target.dims(), "one target a prediction");
        let prediction = l2_normalize(prediction, SIMSIAM_MIN_NORM);
        (prediction * l2_normalize(target.detach(), SIMSIAM_MIN_NORM)).sum_dim(1).squeeze_dim(1)
    };
    (cosine(p1, z2) + cosine(p2, z1)) * -0.5
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, cosine, finite, graph, tensor, ugly_pairs, values};

    #[test]
    fn both_agree_with_their_definitions() {
        let (batch, dim) = (4, 3);
        let (z1, z2) = (values(batch * dim, 0.5), values(batch * dim, 0.8));
        let targets = || [tensor::<2>(&z1, [batch, dim]), tensor::<2>(&z2, [batch, dim])];
        let inputs = [(values(batch * dim, 0.1), [batch, dim]), (values(batch * dim, 0.3), [batch, dim])];
        let cosines = |x: &[Vec<f64>]| -> f64 {
            let sum =
                |p: &[f64], z: &[f64]| -> f64 { p.chunks(dim).zip(z.chunks(dim)).map(|(p, z)| cosine(p, z)).sum() };
            sum(&x[0], &z2) + sum(&x[1], &z1)
        };
        let both = |x: &[Tensor<2>]| [x[0].clone(), x[1].clone()];
        agrees(&inputs, |x| byol(both(&x), targets()), |x| 4.0 * batch as f64 - 2.0 * cosines(x));
        agrees(&inputs, |x| simsiam(both(&x), targets()), |x| -0.5 * cosines(x));
    }

    #[test]
    fn targets_have_no_gradient() {
        let inputs = [(values(6, 0.1), [2, 3]), (values(6, 0.6), [2, 3])];
        for loss in [byol, simsiam] {
            let constant = || [0, 1].map(|_| tensor::<2>(&values(6, 0.3), [2, 3]).require_grad());
            let (_, gradients) = graph(&inputs, |x| loss(constant(), [x[0].clone(), x[1].clone()]));
            assert!(gradients.iter().flatten().all(|&g| g == 0.0));
        }
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for pair in ugly_pairs(2, 3) {
            let both = |x: &[Tensor<2>]| [x[0].clone(), x[1].clone()];
            finite(&pair, |x| byol(both(&x), both(&x)));
            finite(&pair, |x| simsiam(both(&x), both(&x)));
        }
    }
}
