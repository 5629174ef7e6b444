//! Barlow Twins: the cross-correlation of the two views' features becomes the identity.
//!
//! Zbontar, Jing, Misra, `LeCun`, Deny, 2021, <https://arxiv.org/abs/2103.03230>, equation 1:
//! `sum_i (c_ii - 1)^2 + lambda sum_(i != j) c_ij^2`, where `c = z1^T z2 / B` of features standardised over the batch.
//!
//! As the released code: biased variance, 1e-5 inside the root (a batch norm without affine part). The statistics are those of the whole
//! batch and the gradient is the true one; the released code loses a factor of the number of ranks on the way back.

use burn::tensor::Tensor;

use super::reduce::total;

/// Epsilon of torch's batch norm.
const EPSILON: f64 = 1e-5;

/// What the loss is made of, without its factor.
#[derive(Clone, Debug)]
pub struct Terms {
    /// `sum_i (c_ii - 1)^2`: the views agree.
    pub on_diagonal: Tensor<1>,
    /// `sum_(i != j) c_ij^2`: no two features do.
    pub off_diagonal: Tensor<1>,
}

impl Terms {
    /// Adds them up to equation 1.
    #[must_use]
    pub fn weigh(self, lambda: f64) -> Tensor<1> {
        self.on_diagonal + self.off_diagonal * lambda
    }
}

/// Returns the loss of a batch; its count is 1.
///
/// # Shapes
/// - `first`, `second`: `[b, d]`, projections of the two views of the same images.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ.
#[must_use]
pub fn barlow_twins(first: Tensor<2>, second: Tensor<2>, lambda: f64) -> Tensor<1> {
    terms(first, second).weigh(lambda)
}

/// Returns the terms of a batch; their count is 1.
///
/// # Shapes
/// As [`barlow_twins`].
///
/// # Panics
/// If the shapes differ.
#[must_use]
pub fn terms(first: Tensor<2>, second: Tensor<2>) -> Terms {
    let correlation = cross_correlation(first, second);
    let [dim, _] = correlation.dims();
    let identity = Tensor::<2>::eye(dim, &correlation.device());
    let diagonal = (correlation.clone() * identity.clone()).sum_dim(1); // [d, 1], a sum of one number and zeros
    let different = correlation * (identity.neg() + 1.0);
    Terms { on_diagonal: total((diagonal - 1.0).square()), off_diagonal: total(different.square()) }
}

/// Returns the correlation of each feature of one view with each of the other over the batch.
///
/// # Shapes
/// `[b, d]` and `[b, d]` to `[d, d]`.
///
/// # Panics
/// If the shapes differ.
#[must_use]
pub fn cross_correlation(first: Tensor<2>, second: Tensor<2>) -> Tensor<2> {
    let [batch, dim] = first.dims();
    assert_eq!(second.dims(), [batch, dim], "both views have one projection an image");
    standardize(first).transpose().matmul(standardize(second)) / batch as f64
}

/// Standardises each feature over the batch.
fn standardize(rows: Tensor<2>) -> Tensor<2> {
    let centered = rows.clone() - rows.mean_dim(0);
    let variance = centered.clone().square().mean_dim(0); // [1, d]
    centered / (variance + EPSILON).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, ugly_pairs, values};

    fn naive(x: &[Vec<f64>], batch: usize, dim: usize, lambda: f64) -> f64 {
        let standard = |x: &[f64]| {
            let mut out = x.to_vec();
            for i in 0..dim {
                let mean = (0..batch).map(|b| x[b * dim + i]).sum::<f64>() / batch as f64;
                let variance = (0..batch).map(|b| (x[b * dim + i] - mean).powi(2)).sum::<f64>() / batch as f64;
                (0..batch).for_each(|b| out[b * dim + i] = (x[b * dim + i] - mean) / (variance + 1e-5).sqrt());
            }
            out
        };
        let (first, second) = (standard(&x[0]), standard(&x[1]));
        let mut loss = 0.0;
        for (i, j) in (0..dim).flat_map(|i| (0..dim).map(move |j| (i, j))) {
            let c = (0..batch).map(|b| first[b * dim + i] * second[b * dim + j]).sum::<f64>() / batch as f64;
            loss += if i == j { (c - 1.0).powi(2) } else { lambda * c * c };
        }
        loss
    }

    #[test]
    fn agrees_with_the_definition() {
        for (batch, dim, lambda) in [(5, 4, 0.0051), (4, 3, 0.5)] {
            let inputs = [(values(batch * dim, 0.1), [batch, dim]), (values(batch * dim, 0.7), [batch, dim])];
            agrees(&inputs, |x| barlow_twins(x[0].clone(), x[1].clone(), lambda), |x| naive(x, batch, dim, lambda));
        }
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for pair in ugly_pairs(2, 3).into_iter().chain(ugly_pairs(1, 2)) {
            finite(&pair, |x| barlow_twins(x[0].clone(), x[1].clone(), 0.005));
        }
    }
}
