//! `SwAV`: predict a view's code from the other views.
//!
//! Caron, Misra, Mairal, Goyal, Bojanowski, Joulin, 2020, <https://arxiv.org/abs/2006.09882>, equations 2 and 5, as in the released `main_swav.py`:
//! `-sum(q_c log softmax(z_v c / T))`, averaged over the views `v != c` and over the views `c` that have codes.

use burn::tensor::Tensor;

use super::reduce::total;
use super::rows::{MIN_NORM, l2_normalize, soft_cross_entropy};
use super::sinkhorn::sinkhorn;

/// Returns the scores of embeddings, which are normalised here, and prototypes, whose rows the method normalises before each step
/// ([`super::l2_normalize`] with a norm of 1e-12; no gradient passes through that).
///
/// # Shapes
/// `[b, d]` and `[k, d]` to `[b, k]`.
///
/// # Panics
/// If the widths differ.
#[must_use]
pub fn scores(embeddings: Tensor<2>, prototypes: Tensor<2>) -> Tensor<2> {
    assert_eq!(embeddings.dims()[1], prototypes.dims()[1], "embeddings and prototypes have one width");
    l2_normalize(embeddings, MIN_NORM).matmul(prototypes.transpose())
}

/// Returns the codes of a view from its scores; earlier embeddings (scores of the view's queue) share in the assignment. No gradient
/// passes through.
///
/// # Shapes
/// - `scores`: `[b, k]`, of the global batch.
/// - `queue`: `[q, k]`, if there is one.
/// - output: `[b, k]`
///
/// # Panics
/// As [`sinkhorn`].
#[must_use]
pub fn codes(scores: Tensor<2>, queue: Option<Tensor<2>>, epsilon: f64, iterations: usize) -> Tensor<2> {
    let [batch, _] = scores.dims();
    let all = match queue {
        Some(queue) => Tensor::cat(vec![queue, scores], 0),
        None => scores,
    };
    let [rows, _] = all.dims();
    sinkhorn(all, epsilon, iterations).narrow(0, rows - batch, batch)
}

/// Returns the loss summed over the b images; divide by b.
///
/// # Shapes
/// - `scores`: `[b, k]` for each view.
/// - `codes`: `[b, k]` for each of the first views, the global ones.
/// - output: `[1]`
///
/// # Panics
/// If there are no codes, more codes than views or a single view, if shapes differ, or if the temperature isn't positive.
#[must_use]
pub fn swav(scores: &[Tensor<2>], codes: &[Tensor<2>], temperature: f64) -> Tensor<1> {
    total(swav_per_image(scores, codes, temperature))
}

/// Returns the loss of each image, `[b]`; see [`swav`].
///
/// # Panics
/// As [`swav`].
#[must_use]
pub fn swav_per_image(scores: &[Tensor<2>], codes: &[Tensor<2>], temperature: f64) -> Tensor<1> {
    assert!(!codes.is_empty() && codes.len() <= scores.len(), "{} codes, {} views", codes.len(), scores.len());
    assert!(scores.len() >= 2, "a view predicts another one's code");
    let terms = (codes.len() * (scores.len() - 1)) as f64;
    let view = |(view, scores): (usize, &Tensor<2>)| {
        let others = codes.iter().enumerate().filter(|(code, _)| *code != view).map(|(_, code)| code.clone());
        let target = others.reduce(|a, b| a + b)?;
        Some(soft_cross_entropy(target, scores.clone(), temperature))
    };
    let sum = scores.iter().enumerate().filter_map(view).reduce(|a, b| a + b);
    sum.expect("two views and a code make a term") / terms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, numbers, tensor, ugly_pairs, values};

    #[test]
    fn agrees_with_the_definition() {
        let (batch, k, temperature) = (3, 4, 0.2);
        for (views, coded) in [(2, 1), (2, 2), (4, 2), (3, 3)] {
            let codes: Vec<Vec<f64>> =
                (0..coded).map(|c| values(batch * k, f64::from(c) * 0.13).iter().map(|v| v * v).collect()).collect();
            let inputs: Vec<_> = (0..views).map(|v| (values(batch * k, 0.1 * f64::from(v)), [batch, k])).collect();
            let naive = |x: &[Vec<f64>]| {
                let mut loss = 0.0;
                for (c, code) in codes.iter().enumerate() {
                    for (v, scores) in x.iter().enumerate().filter(|(v, _)| *v != c) {
                        let _ = v;
                        for (q, s) in code.chunks(k).zip(scores.chunks(k)) {
                            let norm = s.iter().map(|s| (s / temperature).exp()).sum::<f64>().ln();
                            loss -= q.iter().zip(s).map(|(q, s)| q * (s / temperature - norm)).sum::<f64>();
                        }
                    }
                }
                loss / f64::from(coded * (views - 1))
            };
            let codes: Vec<_> = codes.iter().map(|c| tensor::<2>(c, [batch, k])).collect();
            agrees(&inputs, |x| swav(&x, &codes, temperature), naive);
        }
    }

    #[test]
    fn a_queue_of_the_same_scores_changes_nothing() {
        let s = || tensor::<2>(&values(12, 0.3), [4, 3]);
        let (without, with) = (numbers(codes(s(), None, 0.05, 3)), numbers(codes(s(), Some(s()), 0.05, 3)));
        assert!(without.iter().zip(&with).all(|(a, b)| (a - b).abs() < 1e-5));
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for pair in ugly_pairs(2, 3).into_iter().chain(ugly_pairs(1, 3)) {
            finite(&pair, |x| {
                let prototypes = tensor(&values(12, 0.5), [4, 3]);
                let scores: Vec<_> = x.into_iter().map(|z| scores(z, prototypes.clone())).collect();
                let codes: Vec<_> = scores.iter().map(|s| codes(s.clone(), None, 0.001, 3)).collect();
                swav(&scores, &codes, 0.001)
            });
        }
    }
}
