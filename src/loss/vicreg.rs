//! `VICReg`: invariance of two views, variance of each feature, covariance of none.
//!
//! Bardes, Ponce, `LeCun`, 2021, <https://arxiv.org/abs/2105.04906>, equations 1 to 6. As the released code: unbiased variance with 1e-4 inside
//! the root, the hinge at 1 is averaged over features and halved for each view, squared covariances are summed, divided by the width
//! and not halved.

use burn::tensor::{Bool, Tensor};

use super::reduce::total;

/// Added to the variance before its root.
const EPSILON: f64 = 1e-4;

/// Factors of the three terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Of the mean squared difference (paper: 25).
    pub invariance: f64,
    /// Of the hinge on the standard deviation (paper: 25).
    pub variance: f64,
    /// Of the squared covariances (paper: 1).
    pub covariance: f64,
}

/// What the loss is made of, without its factors.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Mean squared difference of the views.
    pub invariance: Tensor<1>,
    /// Hinge on the standard deviation, the mean of both views.
    pub variance: Tensor<1>,
    /// Squared covariances, the sum of both views.
    pub covariance: Tensor<1>,
}

impl Terms {
    /// Adds them up to equation 6.
    #[must_use]
    pub fn weigh(self, weights: Weights) -> Tensor<1> {
        self.invariance * weights.invariance + self.variance * weights.variance + self.covariance * weights.covariance
    }
}

/// Returns the loss of a batch; its count is 1.
///
/// # Shapes
/// - `first`, `second`: `[b, d]`, embeddings of the two views of the same images.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ or there are fewer than two images.
#[must_use]
pub fn vicreg(first: Tensor<2>, second: Tensor<2>, weights: Weights) -> Tensor<1> {
    terms(first, second).weigh(weights)
}

/// Returns the terms of a batch; their count is 1.
///
/// # Shapes
/// As [`vicreg`].
///
/// # Panics
/// As [`vicreg`].
#[must_use]
pub fn terms(first: Tensor<2>, second: Tensor<2>) -> Terms {
    let (first, second) = (first.unsqueeze_dim(1), second.unsqueeze_dim(1)); // [b, 1, d]
    Terms {
        invariance: invariance(first.clone(), second.clone()),
        variance: (variance(first.clone()) + variance(second.clone())) * 0.5,
        covariance: covariance(first) + covariance(second),
    }
}

/// Returns the mean squared difference of two views.
///
/// # Shapes
/// `[b, n, d]` and `[b, n, d]` to `[1]`; `n` places of an image, 1 for whole images.
///
/// # Panics
/// If the shapes differ.
#[must_use]
pub fn invariance(first: Tensor<3>, second: Tensor<3>) -> Tensor<1> {
    let dims = first.dims();
    assert_eq!(second.dims(), dims, "both views have one embedding a place");
    total((first - second).square()) / dims.iter().product::<usize>() as f64
}

/// Returns the hinge `max(0, 1 - std)` of each feature at each place over the batch, averaged.
///
/// # Shapes
/// `[b, n, d]` to `[1]`.
///
/// # Panics
/// If there are fewer than two images.
#[must_use]
pub fn variance(embeddings: Tensor<3>) -> Tensor<1> {
    let [batch, places, dim] = embeddings.dims();
    assert!(batch >= 2, "an unbiased variance takes two images, got {batch}");
    let centered = embeddings.clone() - embeddings.mean_dim(0);
    let variance = centered.square().sum_dim(0) / (batch - 1) as f64;
    let hinge = ((variance + EPSILON).sqrt().neg() + 1.0).clamp_min(0.0);
    total(hinge) / (places * dim) as f64
}

/// Returns the squared covariances of different features at one place over the batch, summed, divided by `d`, averaged over places.
///
/// # Shapes
/// `[b, n, d]` to `[1]`.
///
/// # Panics
/// If there are fewer than two images.
#[must_use]
pub fn covariance(embeddings: Tensor<3>) -> Tensor<1> {
    let [batch, places, dim] = embeddings.dims();
    assert!(batch >= 2, "an unbiased covariance takes two images, got {batch}");
    let centered = (embeddings.clone() - embeddings.mean_dim(0)).swap_dims(0, 1); // [n, b, d]
    let covariance = centered.clone().swap_dims(1, 2).matmul(centered) / (batch - 1) as f64; // [n, d, d]
    let diagonal = !Tensor::<2, Bool>::diag_mask([dim, dim], 0, &covariance.device());
    let different = covariance.mask_fill(diagonal.unsqueeze_dim::<3>(0).expand([places, dim, dim]), 0.0);
    total(different.square()) / (places * dim) as f64
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, ugly_pairs, values};

    pub(in crate::loss) fn moments(x: &[f64], batch: usize, dim: usize) -> (f64, f64) {
        let mean = |i: usize| (0..batch).map(|b| x[b * dim + i]).sum::<f64>() / batch as f64;
        let cov = |i: usize, j: usize| {
            let (mi, mj) = (mean(i), mean(j));
            (0..batch).map(|b| (x[b * dim + i] - mi) * (x[b * dim + j] - mj)).sum::<f64>() / (batch - 1) as f64
        };
        let variance = (0..dim).map(|i| (1.0 - (cov(i, i) + 1e-4).sqrt()).max(0.0)).sum::<f64>() / dim as f64;
        let pairs = (0..dim).flat_map(|i| (0..dim).map(move |j| (i, j))).filter(|(i, j)| i != j);
        (variance, pairs.map(|(i, j)| cov(i, j).powi(2)).sum::<f64>() / dim as f64)
    }

    #[test]
    fn agrees_with_the_definition() {
        for (batch, dim, scale) in [(5, 4, 1.0), (2, 3, 0.01), (6, 3, 3.0)] {
            let x = |seed| (values(batch * dim, seed).iter().map(|v| v * scale).collect::<Vec<_>>(), [batch, dim]);
            let weights = Weights { invariance: 25.0, variance: 10.0, covariance: 2.0 };
            let naive = |x: &[Vec<f64>]| {
                let mse = x[0].iter().zip(&x[1]).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / x[0].len() as f64;
                let [(v1, c1), (v2, c2)] = [moments(&x[0], batch, dim), moments(&x[1], batch, dim)];
                25.0 * mse + 10.0 * (v1 + v2) / 2.0 + 2.0 * (c1 + c2)
            };
            agrees(&[x(0.1), x(0.6)], |x| vicreg(x[0].clone(), x[1].clone(), weights), naive);
        }
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        let weights = Weights { invariance: 25.0, variance: 25.0, covariance: 1.0 };
        for pair in ugly_pairs(2, 3) {
            finite(&pair, |x| vicreg(x[0].clone(), x[1].clone(), weights));
        }
    }

    #[test]
    #[should_panic(expected = "takes two images")]
    fn one_image_is_refused() {
        finite(&[(vec![1.0; 3], [1, 3])], |x| variance(x[0].clone().unsqueeze_dim(1)));
    }
}
