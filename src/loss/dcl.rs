//! Decoupled contrastive loss: NT-Xent without the positive pair in the denominator.
//!
//! Yeh, Hong, Hsu, Liu, Chen, `LeCun`, 2021, <https://arxiv.org/abs/2110.06848>, equations 5 and 6 (weighted).
//!
//! The weights of equation 6 are `2 - B softmax(cos / sigma)` over the images of the batch, which is the whole batch here; peers that
//! gather negatives over ranks take the softmax over a rank's images, so that their loss depends on the number of ranks.

use burn::tensor::{Tensor, activation};

use super::reduce::total;
use super::rows::{MIN_NORM, l2_normalize, log_sum_exp, similarity_to_other_images};

/// Returns the decoupled loss summed over the 2b anchors; divide by 2b.
///
/// # Shapes
/// - `first`, `second`: `[b, d]`, projections of the two views of the same images, not normalised.
/// - `sigma`: width of the weights; `None` for weight one.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ, there are fewer than two images, or temperature or sigma isn't positive.
#[must_use]
pub fn dcl(first: Tensor<2>, second: Tensor<2>, temperature: f64, sigma: Option<f64>) -> Tensor<1> {
    total(dcl_per_anchor(first, second, temperature, sigma))
}

/// Returns the decoupled loss of each anchor: first the `b` anchors of `first`, then those of `second`.
///
/// # Shapes
/// - `first`, `second`: `[b, d]`, not normalised.
/// - output: `[2 * b]`
///
/// # Panics
/// As [`dcl`].
#[must_use]
pub fn dcl_per_anchor(first: Tensor<2>, second: Tensor<2>, temperature: f64, sigma: Option<f64>) -> Tensor<1> {
    let [batch, dim] = first.dims();
    assert_eq!(second.dims(), [batch, dim], "both views have one projection an image");
    assert!(batch >= 2, "one image has no negatives");
    assert!(temperature > 0.0, "the temperature is positive, got {temperature}");

    let first = l2_normalize(first, MIN_NORM);
    let second = l2_normalize(second, MIN_NORM);
    let mut positive = (first.clone() * second.clone()).sum_dim(1); // [b, 1]
    if let Some(sigma) = sigma {
        assert!(sigma > 0.0, "sigma is positive, got {sigma}");
        let share = activation::softmax(positive.clone().detach() / sigma, 0);
        positive = positive * (share * -(batch as f64) + 2.0);
    }
    let positive = positive / temperature;
    let positive = Tensor::cat(vec![positive.clone(), positive], 0); // [2 * b, 1]
    let negatives = similarity_to_other_images(first, second, temperature);
    (log_sum_exp(negatives, 1) - positive).squeeze_dim(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, cosine, finite, ugly_pairs, values};

    /// Equation 6, word for word; `weights` are held fixed where gradients are taken.
    fn naive(inputs: &[Vec<f64>], dim: usize, temperature: f64, weights: &[f64]) -> f64 {
        let views: Vec<&[f64]> = inputs[0].chunks(dim).chain(inputs[1].chunks(dim)).collect();
        let batch = views.len() / 2;
        let anchor = |i: usize| {
            let negatives = (0..2 * batch).filter(|k| k % batch != i % batch);
            let sum: f64 = negatives.map(|k| (cosine(views[i], views[k]) / temperature).exp()).sum();
            sum.ln() - weights[i % batch] * cosine(views[i], views[(i + batch) % (2 * batch)]) / temperature
        };
        (0..2 * batch).map(anchor).sum()
    }

    fn weights(first: &[f64], second: &[f64], dim: usize, sigma: f64) -> Vec<f64> {
        let exp: Vec<f64> =
            first.chunks(dim).zip(second.chunks(dim)).map(|(a, b)| (cosine(a, b) / sigma).exp()).collect();
        exp.iter().map(|e| 2.0 - exp.len() as f64 * e / exp.iter().sum::<f64>()).collect()
    }

    #[test]
    fn agrees_with_the_double_loop() {
        for (batch, dim, temperature, sigma) in [(2, 3, 0.5, None), (5, 4, 0.1, None), (4, 3, 0.2, Some(0.3))] {
            let (first, second) = (values(batch * dim, 0.1), values(batch * dim, 0.7));
            let weights = sigma.map_or_else(|| vec![1.0; batch], |sigma| weights(&first, &second, dim, sigma));
            agrees(
                &[(first, [batch, dim]), (second, [batch, dim])],
                |x| dcl(x[0].clone(), x[1].clone(), temperature, sigma),
                |x| naive(x, dim, temperature, &weights),
            );
        }
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for pair in ugly_pairs(2, 3).into_iter().chain(ugly_pairs(5, 4)) {
            for (temperature, sigma) in [(0.1, None), (0.001, Some(0.5)), (100.0, Some(0.01))] {
                finite(&pair, |x| dcl(x[0].clone(), x[1].clone(), temperature, sigma));
            }
        }
    }

    #[test]
    #[should_panic(expected = "no negatives")]
    fn one_image_is_refused() {
        finite(&[(vec![1.0; 3], [1, 3]), (vec![1.0; 3], [1, 3])], |x| dcl(x[0].clone(), x[1].clone(), 0.1, None));
    }
}
