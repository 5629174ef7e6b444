//! What several losses are made of: unit rows, similarities, cross-entropies.

use burn::tensor::{Bool, Tensor, activation};

/// Smallest norm a vector is divided by: `tf.math.l2_normalize` bounds the squared norm by 1e-12, and the released `SimCLR` and
/// BYOL code calls it. Keeps the zero vector and its gradient finite; longer vectors don't notice.
pub(crate) const MIN_NORM: f64 = 1e-6;

/// Divides each row (the last dimension) by its Euclidean norm, or by `min_norm` where the norm is smaller.
///
/// # Shapes
/// `[..., d]` to `[..., d]`.
#[must_use]
pub fn l2_normalize<const D: usize>(rows: Tensor<D>, min_norm: f64) -> Tensor<D> {
    let norm = rows.clone().square().sum_dim(D - 1).clamp_min(min_norm * min_norm).sqrt();
    rows / norm
}

/// Returns the cosines of all pairs of views over the temperature, minus infinity for two views of one image.
///
/// # Shapes
/// - `first`, `second`: `[b, d]`, rows of length one.
/// - output: `[2 * b, 2 * b]`, first the views of `first`, then those of `second`.
pub(super) fn similarity_to_other_images(first: Tensor<2>, second: Tensor<2>, temperature: f64) -> Tensor<2> {
    let [batch, _] = first.dims();
    let views = Tensor::cat(vec![first, second], 0); // [2 * b, d]
    let same_image = (!Tensor::<2, Bool>::diag_mask([batch, batch], 0, &views.device())).repeat(&[2, 2]);
    let similarity = (views.clone() / temperature).matmul(views.transpose()); // [2 * b, 2 * b]
    similarity.mask_fill(same_image, f32::NEG_INFINITY)
}

/// Returns the cross-entropy of picking the positive among itself and the negatives, from logits.
///
/// # Shapes
/// `[n, 1]` and `[n, m]` to `[n]`.
pub(super) fn cross_entropy_of_positive(positive: Tensor<2>, negatives: Tensor<2>) -> Tensor<1> {
    // The loss is ln(1 + sum of exp(negative - positive)): small losses keep their digits, which a difference of two logarithms loses.
    // `excess`, by which the closest negative beats the positive, keeps exp from overflowing; no gradient passes through it.
    let excess = (negatives.clone().detach().max_dim(1) - positive.clone().detach()).clamp_min(0.0);
    let sum = (negatives - (positive + excess.clone())).exp().sum_dim(1);
    let loss = (sum + (excess.clone().neg().exp() - 1.0)).log1p() + excess;
    loss.squeeze_dim(1)
}

/// Returns the cross-entropy of each row: `-sum(probs * log_softmax(logits / temperature))`. No gradient passes to `probs`.
///
/// # Shapes
/// - `probs`, `logits`: `[n, k]`
/// - output: `[n]`
///
/// # Panics
/// If the shapes differ or the temperature isn't positive.
#[must_use]
pub fn soft_cross_entropy(probs: Tensor<2>, logits: Tensor<2>, temperature: f64) -> Tensor<1> {
    assert_eq!(probs.dims(), logits.dims(), "one target distribution a row of logits");
    assert!(temperature > 0.0, "the temperature is positive, got {temperature}");
    let log_probs = activation::log_softmax(logits / temperature, 1);
    (probs.detach() * log_probs).sum_dim(1).squeeze_dim::<1>(1).neg()
}

/// Returns the logarithm of the sum of exponentials along `dim`, which stays in the result with size 1.
pub(super) fn log_sum_exp(tensor: Tensor<2>, dim: usize) -> Tensor<2> {
    let largest = tensor.clone().detach().max_dim(dim);
    (tensor - largest.clone()).exp().sum_dim(dim).log() + largest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, numbers, tensor, values};
    use crate::loss::total;

    #[test]
    fn rows_become_unit_and_the_zero_row_stays_zero() {
        let got = numbers(l2_normalize(tensor::<2>(&[3.0, -4.0, 0.0, 0.0], [2, 2]), MIN_NORM));
        assert!((got[0] - 0.6).abs() < 1e-6 && (got[1] + 0.8).abs() < 1e-6 && got[2..] == [0.0, 0.0]);
    }

    #[test]
    fn soft_cross_entropy_agrees_with_the_definition() {
        let (rows, k, temperature) = (3, 5, 0.3);
        let probs: Vec<f64> = values(rows * k, 0.4).iter().map(|v| v * v).collect();
        let naive = |logits: &[Vec<f64>]| {
            let row = |r: usize| {
                let logits = &logits[0][r * k..(r + 1) * k];
                let norm: f64 = logits.iter().map(|v| (v / temperature).exp()).sum::<f64>().ln();
                (0..k).map(|i| probs[r * k + i] * (norm - logits[i] / temperature)).sum::<f64>()
            };
            (0..rows).map(row).sum()
        };
        let loss = |x: Vec<Tensor<2>>| total(soft_cross_entropy(tensor(&probs, [rows, k]), x[0].clone(), temperature));
        agrees(&[(values(rows * k, 0.1), [rows, k])], loss, naive);
    }

    #[test]
    fn logits_far_apart_stay_finite() {
        let logits = tensor::<2>(&[1e4, -1e4, 0.0, 0.0], [2, 2]).require_grad();
        let loss = total(soft_cross_entropy(tensor(&[0.0, 1.0, 0.5, 0.5], [2, 2]), logits.clone(), 1e-3));
        let gradient = numbers(logits.grad(&loss.backward()).unwrap());
        assert!(numbers(loss)[0].is_finite() && gradient.iter().all(|g| g.is_finite()));
    }
}
