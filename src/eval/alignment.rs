//! Spread of embeddings on the unit sphere.

use rayon::prelude::*;

use super::features::{EvalError, Features};
use super::linalg::{centered_columns, dot};

/// Returns the mean over dimensions of the unbiased standard deviation of the L2-normalised features.
///
/// `1 / sqrt(dim)` when they fill the sphere, 0 when all are the same (Chen and He, 2021, <https://arxiv.org/abs/2011.10566>,
/// figure 2; lightly's `std_of_l2_normalized`).
///
/// # Errors
/// With fewer than two images.
pub fn embedding_std(features: &Features) -> Result<f64, EvalError> {
    let rows = at_least_two(features, "the embedding standard deviation")?;
    let columns = centered_columns(&features.normalized(), features.dim());
    let deviations = columns.chunks_exact(rows).map(|column| (dot(column, column) / (rows - 1) as f64).sqrt());
    Ok(deviations.sum::<f64>() / features.dim() as f64)
}

/// Returns the mean of `|x - y|^alpha` over pairs of L2-normalised features of two views of the same images
/// (Wang and Isola, 2020, <https://arxiv.org/abs/2005.10242>, who use `alpha` 2).
///
/// # Panics
/// When the shapes differ.
pub fn alignment(x: &Features, y: &Features, alpha: f64) -> f64 {
    assert_eq!((x.rows(), x.dim()), (y.rows(), y.dim()), "two views of the same images");
    let (left, right, dim) = (x.normalized(), y.normalized(), x.dim());
    let distances = left.chunks_exact(dim).zip(right.chunks_exact(dim)).map(|(a, b)| squared_distance(a, b));
    distances.map(|square| square.powf(0.5 * alpha)).sum::<f64>() / x.rows() as f64
}

/// Returns the logarithm of the mean of `exp(-t |x_i - x_j|^2)` over all pairs `i < j` of L2-normalised features
/// (Wang and Isola, 2020, who use `t` 2); 0 when all are the same. Time grows with the square of the number of images.
///
/// # Errors
/// With fewer than two images.
pub fn uniformity(features: &Features, t: f64) -> Result<f64, EvalError> {
    let rows = at_least_two(features, "uniformity")?;
    let (points, dim) = (features.normalized(), features.dim());
    let sums: Vec<f64> = (0..rows)
        .into_par_iter()
        .map(|i| {
            let point = &points[i * dim..][..dim];
            points[(i + 1) * dim..].chunks_exact(dim).map(|other| (-t * squared_distance(point, other)).exp()).sum()
        })
        .collect();
    let pairs = 0.5 * rows as f64 * (rows - 1) as f64;
    Ok((sums.iter().sum::<f64>() / pairs).ln())
}

fn squared_distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

fn at_least_two(features: &Features, measure: &'static str) -> Result<usize, EvalError> {
    match features.rows() {
        found @ ..2 => Err(EvalError::TooFew { measure, needed: 2, found }),
        rows => Ok(rows),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(values: &[f32], dim: usize) -> Features {
        Features::new(values.to_vec(), dim).unwrap()
    }

    #[test]
    fn collapsed_features_have_no_spread() {
        let same = features(&[2.0, 1.0, 4.0, 2.0, 0.2, 0.1], 2);
        assert!(embedding_std(&same).unwrap() < 1e-7);
        assert!(uniformity(&same, 2.0).unwrap().abs() < 1e-6);
        let zero = features(&[0.0; 6], 2);
        assert_eq!((embedding_std(&zero).unwrap(), uniformity(&zero, 2.0).unwrap()), (0.0, 0.0));
    }

    #[test]
    fn opposite_points() {
        let points = features(&[1.0, -3.0], 1);
        assert!((embedding_std(&points).unwrap() - 2f64.sqrt()).abs() < 1e-12);
        assert!((uniformity(&points, 2.0).unwrap() + 8.0).abs() < 1e-12);
        assert_eq!(alignment(&points, &features(&[2.0, 5.0], 1), 2.0), 2.0);
        assert_eq!(alignment(&points, &features(&[2.0, 5.0], 1), 1.0), 1.0);
    }

    #[test]
    fn one_image_has_no_spread_to_speak_of() {
        let one = features(&[1.0, 2.0], 2);
        let error = embedding_std(&one).unwrap_err().to_string();
        assert_eq!(error, "the embedding standard deviation needs at least 2 images, found 1");
        assert!(uniformity(&one, 2.0).is_err());
    }
}
