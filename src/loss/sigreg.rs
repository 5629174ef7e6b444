//! `SIGReg` and `LeJEPA`: embeddings become an isotropic Gaussian, views of an image the same point.
//!
//! Balestriero, `LeCun`, 2025, <https://arxiv.org/abs/2511.08544>: the Epps-Pulley statistic of the embeddings along random directions, and the
//! mean squared distance of all views from the mean of the global ones:
//! `lambda SIGReg + (1 - lambda) mean((z_v - centre)^2)`.
//!
//! As the released code: integral over `[-t_max, t_max]` by the trapezoidal rule on `knots` points of its positive half, window
//! `exp(-t^2 / 2)`, times the number of images; the statistic is taken for each view, then averaged over views and directions. The released
//! minimal example has the mean of all views as centre: pass all views as global ones. A gradient passes through the centre.

use burn::tensor::Tensor;

use super::reduce::total;
use super::slices::project;

/// Returns the statistic of a batch, averaged over views and directions; its count is 1.
///
/// # Shapes
/// - `views`: `[v, b, d]`
/// - `directions`: `[d, s]`, one a column ([`super::random_directions`]), normalised here.
/// - output: `[1]`
///
/// # Panics
/// If the widths differ, there are fewer than two knots, or `t_max` isn't positive.
#[must_use]
pub fn sigreg(views: Tensor<3>, directions: Tensor<2>, knots: usize, t_max: f64) -> Tensor<1> {
    assert!(knots >= 2 && t_max > 0.0, "an integral over [0, {t_max}] with {knots} knots");
    let [count, batch, _] = views.dims();
    let [_, slices] = directions.dims();
    let projections = project(views, directions); // [v, b, s]
    let step = t_max / (knots - 1) as f64;
    let term = |knot: usize| {
        let t = step * knot as f64;
        let gaussian = (-t * t / 2.0).exp();
        // half a step at the ends, and each knot stands for -t too
        let weight = gaussian * if knot == knots - 1 { step } else { 2.0 * step };
        let angles = projections.clone() * t;
        let real = angles.clone().cos().mean_dim(1) - gaussian; // [v, 1, s]
        let imaginary = angles.sin().mean_dim(1);
        (real.square() + imaginary.square()) * weight
    };
    // at t = 0 both characteristic functions are 1
    let integral = (1..knots).map(term).reduce(|a, b| a + b).expect("two knots or more");
    total(integral) * (batch as f64 / (count * slices) as f64)
}

/// Returns the squared distance of each image's views from the mean of its first `global` views, averaged over views and features and summed
/// over the b images; divide by b.
///
/// # Shapes
/// `[v, b, d]` to `[1]`.
///
/// # Panics
/// If there are not `global` views or `global` is zero.
#[must_use]
pub fn invariance(views: Tensor<3>, global: usize) -> Tensor<1> {
    let [count, _, dim] = views.dims();
    assert!(0 < global && global <= count, "{global} of {count} views are global");
    let centre = views.clone().narrow(0, 0, global).mean_dim(0); // [1, b, d]
    total((views - centre).square()) / (count * dim) as f64
}

/// What the loss of `LeJEPA` is made of, without its factors.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Mean squared distance of all views from the mean of the global ones.
    pub invariance: Tensor<1>,
    /// Distance from a Gaussian.
    pub sigreg: Tensor<1>,
}

impl Terms {
    /// Adds them up: `lambda` for the statistic, the rest for invariance.
    #[must_use]
    pub fn weigh(self, lambda: f64) -> Tensor<1> {
        self.sigreg * lambda + self.invariance * (1.0 - lambda)
    }
}

/// Returns the loss of a batch; its count is 1.
///
/// # Shapes
/// - `views`: `[v, b, d]`, the `global` ones first.
/// - `directions`: `[d, s]`, one a column.
/// - output: `[1]`
///
/// # Panics
/// As [`sigreg`] and [`invariance`].
#[must_use]
pub fn lejepa(
    views: Tensor<3>,
    global: usize,
    directions: Tensor<2>,
    lambda: f64,
    knots: usize,
    t_max: f64,
) -> Tensor<1> {
    terms(views, global, directions, knots, t_max).weigh(lambda)
}

/// Returns the terms of a batch; their count is 1.
///
/// # Shapes
/// As [`lejepa`].
///
/// # Panics
/// As [`lejepa`].
#[must_use]
pub fn terms(views: Tensor<3>, global: usize, directions: Tensor<2>, knots: usize, t_max: f64) -> Terms {
    let [_, batch, _] = views.dims();
    Terms {
        invariance: invariance(views.clone(), global) / batch as f64,
        sigreg: sigreg(views, directions, knots, t_max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, norm, tensor, values};

    #[test]
    fn agrees_with_the_definition() {
        let (count, batch, dim, slices) = (3, 4, 3, 5);
        let directions = values(dim * slices, 0.9);
        for (global, knots, t_max, lambda) in [(1, 17, 3.0, 0.05), (2, 5, 2.0, 0.5), (3, 2, 1.0, 1.0)] {
            let naive = |x: &[Vec<f64>]| {
                let z = |v: usize, b: usize, i: usize| x[0][(v * batch + b) * dim + i];
                let mut statistic = 0.0;
                for (v, s) in (0..count).flat_map(|v| (0..slices).map(move |s| (v, s))) {
                    let column: Vec<f64> = (0..dim).map(|i| directions[i * slices + s]).collect();
                    let length = norm(&column, 0.0);
                    let p: Vec<f64> =
                        (0..batch).map(|b| (0..dim).map(|i| z(v, b, i) * column[i] / length).sum()).collect();
                    for k in 0..knots {
                        let t = t_max * k as f64 / (knots - 1) as f64;
                        let re = p.iter().map(|p| (t * p).cos()).sum::<f64>() / batch as f64 - (-t * t / 2.0).exp();
                        let im = p.iter().map(|p| (t * p).sin()).sum::<f64>() / batch as f64;
                        let end = if k == 0 || k == knots - 1 { 1.0 } else { 2.0 };
                        statistic += (re * re + im * im) * (-t * t / 2.0).exp() * end * t_max / (knots - 1) as f64;
                    }
                }
                let mut distance = 0.0;
                for (b, i) in (0..batch).flat_map(|b| (0..dim).map(move |i| (b, i))) {
                    let centre = (0..global).map(|v| z(v, b, i)).sum::<f64>() / global as f64;
                    distance += (0..count).map(|v| (z(v, b, i) - centre).powi(2)).sum::<f64>();
                }
                lambda * statistic * batch as f64 / (count * slices) as f64
                    + (1.0 - lambda) * distance / (count * batch * dim) as f64
            };
            let loss = |x: Vec<Tensor<3>>| {
                lejepa(x[0].clone(), global, tensor(&directions, [dim, slices]), lambda, knots, t_max)
            };
            agrees(&[(values(count * batch * dim, 0.1), [count, batch, dim])], loss, naive);
        }
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for x in [vec![0.0; 12], vec![5.0; 12], values(12, 0.1).iter().map(|v| v * 1e6).collect()] {
            let directions = tensor(&[vec![0.0; 3], values(3, 0.4)].concat(), [2, 3]); // a zero in each
            finite(&[(x, [2, 3, 2])], |x| lejepa(x[0].clone(), 1, directions.clone(), 0.05, 17, 3.0));
        }
    }
}
