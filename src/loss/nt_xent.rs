//! NT-Xent: each view of an image must pick out the other one among all views of the batch.
//!
//! Chen, Kornblith, Norouzi, Hinton, 2020, <https://arxiv.org/abs/2002.05709>, equation 1 and algorithm 1.

use burn::tensor::Tensor;

use super::reduce::total;
use super::rows::{MIN_NORM, cross_entropy_of_positive, l2_normalize, similarity_to_other_images};

/// Returns the NT-Xent loss summed over the 2b anchors; divide by 2b for the mean of the paper.
///
/// The released TensorFlow code adds the means of the two directions, which is twice the paper's mean.
///
/// # Shapes
/// - `first`, `second`: `[b, d]`, projections of the two views of the same images in the same order, not normalised.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ or the temperature isn't positive.
#[must_use]
pub fn nt_xent(first: Tensor<2>, second: Tensor<2>, temperature: f64) -> Tensor<1> {
    total(nt_xent_per_anchor(first, second, temperature))
}

/// Returns the NT-Xent loss of each anchor against all the views of the batch: first the `b` anchors of `first`, then those of `second`.
///
/// # Shapes
/// - `first`, `second`: `[b, d]`, not normalised.
/// - output: `[2 * b]`
///
/// # Panics
/// If the shapes differ or the temperature isn't positive.
#[must_use]
pub fn nt_xent_per_anchor(first: Tensor<2>, second: Tensor<2>, temperature: f64) -> Tensor<1> {
    let [batch, dim] = first.dims();
    assert_eq!(second.dims(), [batch, dim], "both views have one projection an image");
    assert!(temperature > 0.0, "the temperature is positive, got {temperature}");

    let first = l2_normalize(first, MIN_NORM);
    let second = l2_normalize(second, MIN_NORM);
    let positive = (first.clone() * second.clone()).sum_dim(1) / temperature;
    let positive = Tensor::cat(vec![positive.clone(), positive], 0); // [2 * b, 1]
    cross_entropy_of_positive(positive, similarity_to_other_images(first, second, temperature))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    /// Values in [-1, 1), spread evenly, the same on every machine.
    fn values(len: usize, seed: f64) -> Vec<f64> {
        (0..len)
            .map(|i| ((i as f64 + 1.0) * 0.618_033_988_749_894_9 + seed).fract() * 2.0 - 1.0)
            .map(|v| f64::from(v as f32))
            .collect()
    }

    /// Equation 1, word for word.
    fn naive(first: &[f64], second: &[f64], dim: usize, temperature: f64) -> Vec<f64> {
        let views: Vec<&[f64]> = first.chunks(dim).chain(second.chunks(dim)).collect();
        let batch = views.len() / 2;
        let similarity = |i: usize, j: usize| {
            let dot: f64 = views[i].iter().zip(views[j]).map(|(a, b)| a * b).sum();
            let norm = |v: &[f64]| v.iter().map(|a| a * a).sum::<f64>().sqrt().max(MIN_NORM);
            dot / norm(views[i]) / norm(views[j]) / temperature
        };
        let loss = |i: usize| {
            let sum: f64 = (0..2 * batch).filter(|&k| k != i).map(|k| similarity(i, k).exp()).sum();
            sum.ln() - similarity(i, (i + batch) % (2 * batch))
        };
        (0..2 * batch).map(loss).collect()
    }

    fn tensor(values: &[f64], dim: usize) -> Tensor<2> {
        let data: Vec<f32> = values.iter().map(|&v| v as f32).collect();
        Tensor::from_data(TensorData::new(data, [values.len() / dim, dim]), &Device::flex().autodiff())
    }

    fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
        tensor.into_data().try_to_vec::<f32>().unwrap().into_iter().map(f64::from).collect()
    }

    /// The loss and its gradients in float32.
    fn graph(first: &[f64], second: &[f64], dim: usize, temperature: f64) -> (f64, Vec<f64>, Vec<f64>) {
        let (first, second) = (tensor(first, dim).require_grad(), tensor(second, dim).require_grad());
        let loss = nt_xent(first.clone(), second.clone(), temperature);
        let gradients = loss.backward();
        let gradient = |leaf: &Tensor<2>| numbers(leaf.grad(&gradients).unwrap());
        (numbers(loss)[0], gradient(&first), gradient(&second))
    }

    #[test]
    fn agrees_with_the_double_loop() {
        for (batch, dim, temperature) in [(1, 3, 0.5), (2, 5, 0.1), (7, 4, 0.05), (16, 9, 1.0)] {
            let (first, second) = (values(batch * dim, 0.1), values(batch * dim, 0.7));
            let expected = naive(&first, &second, dim, temperature);
            let got = numbers(nt_xent_per_anchor(tensor(&first, dim), tensor(&second, dim), temperature));
            for (g, e) in got.iter().zip(&expected) {
                assert!((g - e).abs() < 1e-5 * e.abs().max(1.0), "{batch} x {dim}: {g} {e}");
            }
            let (loss, ..) = graph(&first, &second, dim, temperature);
            let expected: f64 = expected.iter().sum();
            assert!((loss - expected).abs() < 1e-5 * expected.max(1.0));
        }
    }

    #[test]
    fn gradients_agree_with_finite_differences() {
        for (batch, dim, temperature) in [(2, 4, 0.1), (5, 3, 0.5)] {
            let (first, second) = (values(batch * dim, 0.3), values(batch * dim, 0.9));
            let sum = |a: &[f64], b: &[f64]| naive(a, b, dim, temperature).iter().sum::<f64>();
            let (_, got_first, got_second) = graph(&first, &second, dim, temperature);
            let h = 1e-6;
            for i in 0..first.len() {
                let moved = |v: &[f64], by: f64| {
                    v.iter().enumerate().map(|(k, x)| if k == i { x + by } else { *x }).collect::<Vec<_>>()
                };
                let left = (sum(&moved(&first, h), &second) - sum(&moved(&first, -h), &second)) / (2.0 * h);
                let right = (sum(&first, &moved(&second, h)) - sum(&first, &moved(&second, -h))) / (2.0 * h);
                assert!((got_first[i] - left).abs() < 1e-4 * left.abs().max(1.0), "{} {left}", got_first[i]);
                assert!((got_second[i] - right).abs() < 1e-4 * right.abs().max(1.0), "{} {right}", got_second[i]);
            }
        }
    }

    #[test]
    fn identical_embeddings_cannot_be_told_apart() {
        let same: Vec<f64> = [0.3, -1.2, 0.5].repeat(6);
        let (loss, ..) = graph(&same, &same, 3, 0.1);
        let expected = 12.0 * 11f64.ln(); // each anchor: ln(2b - 1)
        assert!((loss - expected).abs() < 1e-4, "{loss} {expected}");
    }

    #[test]
    fn swapping_the_views_swaps_the_gradients() {
        let (first, second) = (values(24, 0.2), values(24, 0.6));
        let (loss, a, b) = graph(&first, &second, 4, 0.2);
        let (swapped, c, d) = graph(&second, &first, 4, 0.2);
        assert!((loss - swapped).abs() < 1e-5 * loss);
        assert!(a.iter().zip(&d).chain(b.iter().zip(&c)).all(|(x, y)| (x - y).abs() < 1e-5));
    }

    #[test]
    fn a_small_loss_keeps_its_digits() {
        let apart = [1.0, 0.0, -0.99, 0.01, 0.0, 1.0];
        let (expected, (got, ..)) =
            (naive(&apart, &apart, 2, 0.05).iter().sum::<f64>(), graph(&apart, &apart, 2, 0.05));
        assert!(expected < 1e-6 && (got - expected).abs() < 1e-5 * expected, "{got} {expected}");
    }

    #[test]
    fn length_does_not_matter() {
        let (first, second) = (values(24, 0.2), values(24, 0.6));
        let longer: Vec<f64> = first.iter().map(|v| 1000.0 * v).collect();
        assert!((graph(&first, &second, 4, 0.2).0 - graph(&longer, &second, 4, 0.2).0).abs() < 1e-4);
    }

    #[test]
    fn zero_vectors_stay_finite() {
        let mut first = values(12, 0.4);
        first[4..8].fill(0.0);
        for (first, second) in [(first, values(12, 0.8)), (vec![0.0; 12], vec![0.0; 12])] {
            let (loss, a, b) = graph(&first, &second, 4, 0.1);
            assert!(loss.is_finite() && a.iter().chain(&b).all(|g| g.is_finite()));
        }
    }

    #[test]
    fn far_apart_at_a_low_temperature_stays_finite() {
        let (first, second) = (vec![1.0, 0.0, -1.0, 0.0], vec![-1.0, 0.0, 1.0, 0.0]);
        let (loss, a, b) = graph(&first, &second, 2, 0.005);
        assert!((loss - 4.0 * 400.0).abs() < 0.1, "{loss}"); // cos 1 to a negative, cos -1 to the positive
        assert!(a.iter().chain(&b).all(|g| g.is_finite()));
    }

    #[test]
    fn one_image_has_nothing_to_tell_apart() {
        let (loss, a, b) = graph(&[0.5, -0.25], &[0.1, 0.9], 2, 0.1);
        assert!(loss == 0.0 && a.iter().chain(&b).all(|&g| g == 0.0), "{loss} {a:?} {b:?}");
    }

    #[test]
    #[should_panic(expected = "one projection an image")]
    fn shapes_must_agree() {
        let _ = nt_xent(tensor(&[1.0, 2.0], 2), tensor(&[1.0, 2.0, 3.0, 4.0], 2), 0.1);
    }
}
