//! RankMe: the effective rank of embeddings.
//!
//! Garrido et al., 2023, <https://arxiv.org/abs/2210.02885>, equation 1.

use super::features::Features;
use super::linalg::{eigenvalues, products, transpose};

/// Returns the `min(rows, dim)` singular values of the features, not centred, in descending order.
///
/// They are roots of the eigenvalues of the smaller Gram matrix, so those below about 1e-7 of the largest are noise. What lies
/// below the rounding error of the Gram matrix is returned as zero.
pub fn singular_values(features: &Features) -> Vec<f64> {
    let rows = features.to_f64();
    let (vectors, length) = if features.rows() < features.dim() {
        (rows, features.dim())
    } else {
        (transpose(&rows, features.dim()), features.rows())
    };
    let size = vectors.len() / length;
    let squares = eigenvalues(products(&vectors, &vectors, length), size);
    let noise = squares[0] * f64::EPSILON * size as f64;
    squares.into_iter().map(|square| if square > noise { square.sqrt() } else { 0.0 }).collect()
}

/// Returns the exponential of the entropy of `p = s / sum(s) + epsilon`, `s` being the singular values: between 1 and
/// `min(rows, dim)`, and 0 when all features are zero. The paper uses `epsilon` 1e-7.
pub fn rankme(features: &Features, epsilon: f64) -> f64 {
    let values = singular_values(features);
    let sum: f64 = values.iter().sum();
    if sum > 0.0 { entropy(values.iter().map(|s| s / sum + epsilon)).exp() } else { 0.0 }
}

/// Returns `-sum(p log p)`, with `0 log 0 = 0`.
pub(super) fn entropy(probabilities: impl Iterator<Item = f64>) -> f64 {
    -probabilities.filter(|&p| p > 0.0).map(|p| p * p.ln()).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(values: &[f32], dim: usize) -> Features {
        Features::new(values.to_vec(), dim).unwrap()
    }

    #[test]
    fn rank_of_orthogonal_constant_and_zero_features() {
        let identity = features(&[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], 3);
        assert!((rankme(&identity, 0.0) - 3.0).abs() < 1e-12);
        let constant = features(&[0.3; 40], 8);
        assert!((rankme(&constant, 0.0) - 1.0).abs() < 1e-6);
        assert_eq!(rankme(&features(&[0.0; 12], 4), 1e-7), 0.0);
    }

    #[test]
    fn one_image_and_one_dimension_have_one_singular_value() {
        assert_eq!(singular_values(&features(&[3.0, 4.0], 2)), [5.0]);
        assert_eq!(singular_values(&features(&[3.0, 4.0], 1)), [5.0]);
        assert_eq!(rankme(&features(&[3.0, 4.0], 1), 0.0), 1.0);
    }

    #[test]
    fn wide_and_tall_give_the_same_values() {
        let values: Vec<f32> = (0..35u32).map(|i| (f64::from(i * i) * 0.37).sin() as f32).collect();
        let tall = features(&values, 5);
        let wide = features(&transpose(&tall.to_f64(), 5).iter().map(|&v| v as f32).collect::<Vec<_>>(), 7);
        for (a, b) in singular_values(&tall).iter().zip(singular_values(&wide)) {
            assert!((a - b).abs() < 1e-12);
        }
    }
}
