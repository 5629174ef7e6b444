//! `TiCo`: two views agree, and embeddings avoid the directions that embeddings had lately.
//!
//! Zhu, Moraes, Karakulak, Sobol, Canziani, `LeCun`, 2022, <https://arxiv.org/abs/2206.10698>, equations 1 to 3:
//! `1 - cos(a, b) + rho a^T C a`, where `C` is a moving average of `a a^T` over images and steps that includes this step's batch.

use burn::tensor::Tensor;

use super::reduce::total;
use super::rows::{MIN_NORM, l2_normalize};

/// Returns `C` of this step: `beta * C + (1 - beta) * mean(a a^T)`. No gradient passes through.
///
/// # Shapes
/// - `embeddings`: `[b, d]`, of the first view in the global batch, not normalised.
/// - `covariance`: `[d, d]`, of the step before, zero at the start.
/// - output: `[d, d]`
///
/// # Panics
/// If the shapes don't fit.
#[must_use]
pub fn update_covariance(embeddings: Tensor<2>, covariance: Tensor<2>, beta: f64) -> Tensor<2> {
    let [batch, dim] = embeddings.dims();
    assert_eq!(covariance.dims(), [dim, dim], "a covariance of the embeddings");
    let unit = l2_normalize(embeddings.detach(), MIN_NORM);
    let now = unit.clone().transpose().matmul(unit) / batch as f64;
    covariance.detach() * beta + now * (1.0 - beta)
}

/// Returns the loss summed over the b images; divide by b.
///
/// # Shapes
/// - `first`, `second`: `[b, d]`, not normalised; `second` comes from the moving-average network.
/// - `covariance`: `[d, d]`, of this step ([`update_covariance`]).
/// - output: `[1]`
///
/// # Panics
/// If the shapes don't fit.
#[must_use]
pub fn tico(first: Tensor<2>, second: Tensor<2>, covariance: Tensor<2>, rho: f64) -> Tensor<1> {
    let [batch, dim] = first.dims();
    assert_eq!(second.dims(), [batch, dim], "both views have one embedding an image");
    assert_eq!(covariance.dims(), [dim, dim], "a covariance of the embeddings");
    let (first, second) = (l2_normalize(first, MIN_NORM), l2_normalize(second, MIN_NORM));
    let cosine = (first.clone() * second).sum_dim(1);
    let contrast = (first.clone().matmul(covariance.detach()) * first).sum_dim(1);
    total(contrast * rho - cosine + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, cosine, finite, norm, numbers, tensor, ugly_pairs, values};

    #[test]
    fn agrees_with_the_definition() {
        let (batch, dim, beta, rho) = (4, 3, 0.7, 8.0);
        let (first, second) = (values(batch * dim, 0.1), values(batch * dim, 0.6));
        let old = values(dim * dim, 0.3);
        let unit =
            |x: &[f64]| x.chunks(dim).map(|r| r.iter().map(|v| v / norm(r, 1e-6)).collect()).collect::<Vec<Vec<f64>>>();
        let rows = unit(&first);
        let expected: Vec<f64> = (0..dim * dim)
            .map(|k| {
                let now = rows.iter().map(|r| r[k / dim] * r[k % dim]).sum::<f64>() / batch as f64;
                beta * old[k] + (1.0 - beta) * now
            })
            .collect();
        let covariance = || update_covariance(tensor(&first, [batch, dim]), tensor(&old, [dim, dim]), beta);
        assert!(numbers(covariance()).iter().zip(&expected).all(|(g, e)| (g - e).abs() < 1e-6));
        let naive = |x: &[Vec<f64>]| {
            let each = |(a, b): (&[f64], &[f64])| {
                let u = &unit(a)[0];
                let form: f64 = (0..dim * dim).map(|k| u[k / dim] * expected[k] * u[k % dim]).sum();
                1.0 - cosine(a, b) + rho * form
            };
            x[0].chunks(dim).zip(x[1].chunks(dim)).map(each).sum()
        };
        let inputs = [(first.clone(), [batch, dim]), (second, [batch, dim])];
        agrees(&inputs, |x| tico(x[0].clone(), x[1].clone(), covariance(), rho), naive);
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for pair in ugly_pairs(2, 3) {
            finite(&pair, |x| {
                let covariance = update_covariance(x[0].clone(), Tensor::zeros([3, 3], &x[0].device()), 0.9);
                tico(x[0].clone(), x[1].clone(), covariance, 8.0)
            });
        }
    }
}
