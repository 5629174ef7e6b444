//! Sinkhorn-Knopp: soft assignments of a batch that use every prototype equally.
//!
//! Cuturi, 2013, <https://arxiv.org/abs/1306.0895>, as in `SwAV` (Caron et al., 2020, <https://arxiv.org/abs/2006.09882>, section 3.1,
//! `distributed_sinkhorn`) and `DINOv2` (`sinkhorn_knopp_teacher`, with the teacher's temperature as epsilon): `exp(scores / epsilon)`, then in turn
//! prototypes and samples are normalised. The released code works with exponentials, which overflow for scores beyond `88 epsilon`; this
//! works with logarithms.

use burn::tensor::Tensor;

use super::rows::log_sum_exp;

/// Returns assignments whose rows sum to one. No gradient passes through.
///
/// # Shapes
/// - `scores`: `[n, k]`, of all the samples that share the prototypes (the global batch).
/// - output: `[n, k]`
///
/// # Panics
/// If epsilon isn't positive or there is no iteration.
#[must_use]
pub fn sinkhorn(scores: Tensor<2>, epsilon: f64, iterations: usize) -> Tensor<2> {
    assert!(epsilon > 0.0, "epsilon is positive, got {epsilon}");
    assert!(iterations > 0, "one iteration at least makes rows that sum to one");
    let mut log = scores.detach() / epsilon;
    for _ in 0..iterations {
        // equal mass for each prototype; how much cancels in the next line
        log = log.clone() - log_sum_exp(log, 0);
        log = log.clone() - log_sum_exp(log, 1);
    }
    log.exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{numbers, tensor, values};

    /// The released code, word for word.
    fn naive(scores: &[f64], k: usize, epsilon: f64, iterations: usize) -> Vec<f64> {
        let n = scores.len() / k;
        let mut q: Vec<f64> = scores.iter().map(|s| (s / epsilon).exp()).collect();
        let sum: f64 = q.iter().sum();
        q = q.iter().map(|v| v / sum).collect();
        for _ in 0..iterations {
            for j in 0..k {
                let sum: f64 = (0..n).map(|i| q[i * k + j]).sum();
                (0..n).for_each(|i| q[i * k + j] /= sum * k as f64);
            }
            for row in q.chunks_mut(k) {
                let sum: f64 = row.iter().sum();
                for v in row {
                    *v /= sum * n as f64;
                }
            }
        }
        q.iter().map(|v| v * n as f64).collect()
    }

    #[test]
    fn agrees_with_the_released_code() {
        for (n, k, epsilon, iterations) in [(4, 3, 0.05, 3), (7, 5, 0.5, 1), (2, 6, 0.1, 10)] {
            let scores = values(n * k, 0.3);
            let got = numbers(sinkhorn(tensor(&scores, [n, k]), epsilon, iterations));
            for (got, expected) in got.iter().zip(naive(&scores, k, epsilon, iterations)) {
                assert!((got - expected).abs() < 1e-5, "{got} {expected}");
            }
        }
    }

    #[test]
    fn far_scores_stay_finite_and_rows_sum_to_one() {
        for scores in [vec![0.0; 12], vec![1e4; 12], values(12, 0.2).iter().map(|v| v * 1e4).collect()] {
            let got = numbers(sinkhorn(tensor(&scores, [4, 3]), 0.01, 3));
            assert!(got.chunks(3).all(|row| (row.iter().sum::<f64>() - 1.0).abs() < 1e-5), "{got:?}");
        }
    }
}
