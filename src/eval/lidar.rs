//! LiDAR: the effective rank of what tells images apart, relative to what augmentation changes.
//!
//! Thilak et al., 2023, <https://arxiv.org/abs/2312.04000>; normalisation and constants as in stable-pretraining 9aa93f8
//! (`callbacks/lidar.py`): covariances divided by `n - 1` between and `n (q - 1)` within groups.

use super::features::{EvalError, Features};
use super::linalg::{centered_columns, cholesky, eigenvalues, products, solve_lower, transpose};
use super::rank::entropy;

/// The measure and what it is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lidar {
    /// Exponential of the entropy: between 1 and `min(dim, groups - 1)`.
    pub rank: f64,
    /// Entropy of the eigenvalues.
    pub entropy: f64,
    /// Largest eigenvalue: variance between images over variance within, in the best direction.
    pub top_eigenvalue: f64,
}

/// Measures embeddings of `q` views an image, the views of an image one after the other.
///
/// `delta` is added to the diagonal of the covariance within groups (the reference uses 1e-4), `epsilon` to each eigenvalue
/// (1e-8). Rows beyond the last whole group are left out.
///
/// # Errors
/// With fewer than two groups, or when the covariance within groups is singular despite `delta`.
///
/// # Panics
/// When `q` is below 2: one view has no variance.
pub fn lidar(embeddings: &Features, q: usize, delta: f64, epsilon: f64) -> Result<Lidar, EvalError> {
    assert!(q >= 2, "LiDAR needs at least two views of an image");
    let (dim, groups) = (embeddings.dim(), embeddings.rows() / q);
    if groups < 2 {
        return Err(EvalError::TooFew { measure: "LiDAR", needed: 2 * q, found: embeddings.rows() });
    }
    let mut within = embeddings.to_f64();
    within.truncate(groups * q * dim);
    let mut means = vec![0.0; groups * dim];
    for (group, mean) in within.chunks_exact_mut(q * dim).zip(means.chunks_exact_mut(dim)) {
        for view in group.chunks_exact(dim) {
            mean.iter_mut().zip(view).for_each(|(m, v)| *m += v / q as f64);
        }
        for view in group.chunks_exact_mut(dim) {
            view.iter_mut().zip(&*mean).for_each(|(v, m)| *v -= m);
        }
    }

    let mut factor = covariance(&transpose(&within, dim), groups * q, groups * (q - 1)); // [dim, dim]
    factor.iter_mut().step_by(dim + 1).for_each(|v| *v += delta);
    if !cholesky(&mut factor, dim) {
        return Err(EvalError::Singular { delta });
    }
    // L^-1 B L^-T has the eigenvalues of W^-1/2 B W^-1/2, W = L L^T
    let mut whitened = covariance(&centered_columns(&means, dim), groups, groups - 1);
    solve_lower(&factor, dim, &mut whitened);
    let mut whitened = transpose(&whitened, dim);
    solve_lower(&factor, dim, &mut whitened);
    // rounding left the halves unequal
    let symmetric = whitened.iter().zip(transpose(&whitened, dim)).map(|(a, b)| 0.5 * (a + b)).collect();

    let eigenvalues: Vec<f64> = eigenvalues(symmetric, dim).into_iter().map(|v| v.max(0.0)).collect();
    let sum: f64 = eigenvalues.iter().map(|v| v + epsilon).sum();
    let entropy = if sum > 0.0 { entropy(eigenvalues.iter().map(|v| (v + epsilon) / sum)) } else { 0.0 };
    Ok(Lidar { rank: entropy.exp(), entropy, top_eigenvalue: eigenvalues[0] })
}

/// Returns `columns columns' / degrees`, columns being centred.
fn covariance(columns: &[f64], rows: usize, degrees: usize) -> Vec<f64> {
    let mut out = products(columns, columns, rows);
    out.iter_mut().for_each(|v| *v /= degrees as f64);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_direction_between_groups_has_rank_one() {
        // groups differ in the first coordinate only, views in both
        let values = (0..10u8).flat_map(|g| [f32::from(g), 0.1, f32::from(g) + 0.1, -0.1]).collect();
        let got = lidar(&Features::new(values, 2).unwrap(), 2, 1e-4, 1e-8).unwrap();
        assert!((got.rank - 1.0).abs() < 1e-6 && got.top_eigenvalue > 100.0, "{got:?}");
    }

    #[test]
    fn too_few_groups_and_identical_views() {
        let features = Features::new(vec![1.0, 2.0, 3.0], 1).unwrap();
        assert_eq!(lidar(&features, 2, 1e-4, 1e-8).unwrap_err().to_string(), "LiDAR needs at least 4 images, found 3");
        let same = Features::new(vec![1.0; 8], 2).unwrap();
        assert_eq!(lidar(&same, 2, 0.0, 1e-8), Err(EvalError::Singular { delta: 0.0 }));
        // nothing differs: epsilon alone makes all directions equal, as in the reference
        assert!((lidar(&same, 2, 1e-4, 1e-8).unwrap().rank - 2.0).abs() < 1e-12);
    }
}
