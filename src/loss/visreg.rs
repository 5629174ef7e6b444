//! `VISReg`: scale, shape and centre of the embeddings, each with a term of its own.
//!
//! Wu et al., 2026, <https://arxiv.org/abs/2606.02572>: `(1 - lambda) invariance + lambda (scale + shape + centre)`, where
//! scale is `mean((1 - std)^2)`, centre is `mean(mean^2)`, and shape is the squared sliced Wasserstein distance of the standardised embeddings from a
//! Gaussian, by sorting: along each direction, the i-th of N projections against the quantile of `i / (N + 1)`. The deviation that
//! standardises (biased, plus `epsilon`) has no gradient, so that shape leaves scale alone. Statistics are taken for each view and averaged;
//! invariance is `LeJEPA`'s.
//!
//! Written from the paper and lightly's documentation of it. Deviations: the statistics are those of the batch this is given (the paper
//! takes those of a rank); the deviation of a constant feature has gradient zero, not infinity.

use burn::tensor::{Tensor, TensorData};

use super::reduce::total;
use super::sigreg::invariance;
use super::slices::project;

/// Factors of the three terms of the batch (paper: 1 each).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Of the standard deviations' distance from one.
    pub scale: f64,
    /// Of the distance from a Gaussian.
    pub shape: f64,
    /// Of the distance of the mean from zero.
    pub center: f64,
}

/// What the loss is made of, without its factors.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Mean squared distance of all views from the mean of the global ones.
    pub invariance: Tensor<1>,
    /// See [`scale`].
    pub scale: Tensor<1>,
    /// See [`shape`].
    pub shape: Tensor<1>,
    /// See [`center`].
    pub center: Tensor<1>,
}

impl Terms {
    /// Adds them up: `lambda` for the three terms of the batch, the rest for invariance.
    #[must_use]
    pub fn weigh(self, lambda: f64, weights: Weights) -> Tensor<1> {
        let batch = self.scale * weights.scale + self.shape * weights.shape + self.center * weights.center;
        self.invariance * (1.0 - lambda) + batch * lambda
    }
}

/// Returns the loss of a batch; its count is 1.
///
/// # Shapes
/// - `views`: `[v, b, d]`, the `global` ones first.
/// - `directions`: `[d, s]`, one a column ([`super::random_directions`]), normalised here.
/// - output: `[1]`
///
/// # Panics
/// If the widths differ, `global` isn't in `1..=v`, or epsilon isn't positive.
#[must_use]
pub fn visreg(
    views: Tensor<3>,
    global: usize,
    directions: Tensor<2>,
    lambda: f64,
    weights: Weights,
    epsilon: f64,
) -> Tensor<1> {
    terms(views, global, directions, epsilon).weigh(lambda, weights)
}

/// Returns the terms of a batch; their count is 1.
///
/// # Shapes
/// As [`visreg`].
///
/// # Panics
/// As [`visreg`].
#[must_use]
pub fn terms(views: Tensor<3>, global: usize, directions: Tensor<2>, epsilon: f64) -> Terms {
    let [_, batch, _] = views.dims();
    Terms {
        invariance: invariance(views.clone(), global) / batch as f64,
        scale: scale(views.clone()),
        shape: shape(views.clone(), directions, epsilon),
        center: center(views),
    }
}

/// Returns the squared distance of each feature's standard deviation over the batch (biased) from one, averaged.
///
/// # Shapes
/// `[v, b, d]` to `[1]`.
#[must_use]
pub fn scale(views: Tensor<3>) -> Tensor<1> {
    let [count, _, dim] = views.dims();
    total((standard_deviation(views) - 1.0).square()) / (count * dim) as f64
}

/// Returns the squared mean of each feature over the batch, averaged.
///
/// # Shapes
/// `[v, b, d]` to `[1]`.
#[must_use]
pub fn center(views: Tensor<3>) -> Tensor<1> {
    let [count, _, dim] = views.dims();
    total(views.mean_dim(1).square()) / (count * dim) as f64
}

/// Returns the squared distance of the sorted projections of standardised embeddings from the quantiles of a Gaussian, averaged.
///
/// # Shapes
/// `[v, b, d]` and `[d, s]` to `[1]`.
///
/// # Panics
/// If the widths differ or epsilon isn't positive.
#[must_use]
pub fn shape(views: Tensor<3>, directions: Tensor<2>, epsilon: f64) -> Tensor<1> {
    assert!(epsilon > 0.0, "epsilon is positive, got {epsilon}");
    let [count, batch, _] = views.dims();
    let [_, slices] = directions.dims();
    let centered = views.clone() - views.clone().mean_dim(1);
    let standard = centered / (standard_deviation(views.detach()) + epsilon);
    let projections = project(standard, directions); // [v, b, s]
    let order = projections.clone().detach().argsort(1);
    let quantiles: Vec<f32> = gaussian_quantiles(batch).into_iter().map(|v| v as f32).collect();
    let quantiles = Tensor::<3>::from_data(TensorData::new(quantiles, [1, batch, 1]), &projections.device());
    total((projections.gather(1, order) - quantiles).square()) / (count * batch * slices) as f64
}

/// `[v, b, d]` to `[v, 1, d]`; the root stays away from zero, where its gradient is infinite.
fn standard_deviation(views: Tensor<3>) -> Tensor<3> {
    let centered = views.clone() - views.mean_dim(1);
    centered.square().mean_dim(1).clamp_min(1e-30).sqrt()
}

/// Returns the standard Gaussian's quantiles of `i / (count + 1)`, `i = 1..=count`.
fn gaussian_quantiles(count: usize) -> Vec<f64> {
    let mut upper = Vec::with_capacity(count.div_ceil(2)); // from the median on
    let mut x = 0.0f64;
    for i in count / 2 + 1..=count {
        let above_median = i as f64 / (count + 1) as f64 - 0.5;
        // The distribution function is concave above 0, so Newton's steps from the left rise to the quantile; the last one is a good start.
        for _ in 0..100 {
            let density = (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
            let step = (above_median - density * series(x)) / density;
            x = (x + step).max(0.0);
            if step.abs() < 1e-13 * x.max(1.0) {
                break;
            }
        }
        upper.push(x);
    }
    let lower = upper.iter().rev().take(count / 2).map(|x| -x);
    lower.collect::<Vec<_>>().into_iter().chain(upper.iter().copied()).collect()
}

/// Returns `x + x^3 / 3 + x^5 / (3 * 5) + ...`: times the density it is the distribution function less one half.
fn series(x: f64) -> f64 {
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term > sum * 1e-17 {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, graph, norm, tensor, values};

    #[test]
    fn quantiles_are_known_ones() {
        let got = gaussian_quantiles(39); // multiples of 1/40
        for (i, expected) in
            [(1, -1.959_963_984_540_054), (10, -0.674_489_750_196_081_7), (20, 0.0), (38, 1.644_853_626_951_472_7)]
        {
            assert!((got[i - 1] - expected).abs() < 1e-12, "{i}: {} {expected}", got[i - 1]);
        }
        for count in [1, 2, 3, 8, 100_000] {
            let got = gaussian_quantiles(count);
            assert!(got.len() == count && got.is_sorted() && (0..count).all(|i| got[i] == -got[count - 1 - i]));
        }
        assert!((gaussian_quantiles(999_999)[999_998] - 4.753_424_308_822_899).abs() < 1e-9);
    }

    const WEIGHTS: Weights = Weights { scale: 0.7, shape: 1.3, center: 0.4 };

    #[test]
    fn agrees_with_the_definition() {
        let (count, batch, dim, slices, global, lambda, epsilon) = (3, 5, 3, 4, 2, 0.6, 1e-4);
        let directions = values(dim * slices, 0.9);
        let input = values(count * batch * dim, 0.1);
        let moments = |x: &[f64], v: usize, i: usize| {
            let column: Vec<f64> = (0..batch).map(|b| x[(v * batch + b) * dim + i]).collect();
            let mean = column.iter().sum::<f64>() / batch as f64;
            (mean, (column.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / batch as f64).sqrt())
        };
        let naive = |x: &[Vec<f64>]| {
            let z = |v: usize, b: usize, i: usize| x[0][(v * batch + b) * dim + i];
            let (mut scale, mut center, mut shape, mut distance) = (0.0, 0.0, 0.0, 0.0);
            for (v, i) in (0..count).flat_map(|v| (0..dim).map(move |i| (v, i))) {
                let (mean, deviation) = moments(&x[0], v, i);
                scale += (1.0 - deviation).powi(2) / (count * dim) as f64;
                center += mean * mean / (count * dim) as f64;
            }
            for (v, s) in (0..count).flat_map(|v| (0..slices).map(move |s| (v, s))) {
                let column: Vec<f64> = (0..dim).map(|i| directions[i * slices + s]).collect();
                // the deviation is held fixed at the input, as it has no gradient
                let standard =
                    |b: usize, i: usize| (z(v, b, i) - moments(&x[0], v, i).0) / (moments(&input, v, i).1 + epsilon);
                let mut p: Vec<f64> = (0..batch)
                    .map(|b| (0..dim).map(|i| standard(b, i) * column[i]).sum::<f64>() / norm(&column, 0.0))
                    .collect();
                p.sort_by(f64::total_cmp);
                let quantiles = gaussian_quantiles(batch);
                shape += p.iter().zip(quantiles).map(|(p, q)| (p - q).powi(2)).sum::<f64>()
                    / (count * batch * slices) as f64;
            }
            for (b, i) in (0..batch).flat_map(|b| (0..dim).map(move |i| (b, i))) {
                let centre = (0..global).map(|v| z(v, b, i)).sum::<f64>() / global as f64;
                distance +=
                    (0..count).map(|v| (z(v, b, i) - centre).powi(2)).sum::<f64>() / (count * batch * dim) as f64;
            }
            (1.0 - lambda) * distance + lambda * (0.7 * scale + 1.3 * shape + 0.4 * center)
        };
        let loss = |x: Vec<Tensor<3>>| {
            visreg(x[0].clone(), global, tensor(&directions, [dim, slices]), lambda, WEIGHTS, epsilon)
        };
        agrees(&[(input.clone(), [count, batch, dim])], loss, naive);
    }

    #[test]
    fn collapse_has_a_finite_gradient() {
        for x in
            [vec![0.0; 12], vec![5.0; 12], values(2, 0.3).repeat(6), values(12, 0.1).iter().map(|v| v * 1e6).collect()]
        {
            let directions = tensor(&values(6, 0.4), [2, 3]);
            finite(&[(x, [2, 3, 2])], |x| visreg(x[0].clone(), 1, directions.clone(), 0.9, WEIGHTS, 1e-4));
        }
        let tiny: Vec<f64> = values(6, 0.1).iter().map(|v| v * 1e-6).collect();
        let (_, gradient) = graph(&[(tiny, [1, 3, 2])], |x| scale(x[0].clone()));
        assert!(gradient[0].iter().any(|g| g.abs() > 0.1), "a nearly collapsed batch is pushed apart: {gradient:?}");
    }
}
