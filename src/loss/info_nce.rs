//! `InfoNCE` against a queue (MoCo), against the batch (MoCo v3), and against nearest neighbours (NNCLR).
//!
//! - MoCo: He, Fan, Wu, Xie, Girshick, 2019, <https://arxiv.org/abs/1911.05722>, equation 1 and algorithm 1.
//! - MoCo v3: Chen, Xie, He, 2021, <https://arxiv.org/abs/2104.02057>, algorithm 1; the released code multiplies by `2 T` and adds the
//!   two directions.
//! - NNCLR: Dwibedi, Aytar, Tompson, Sermanet, Zisserman, 2021, <https://arxiv.org/abs/2104.14548>, equation 3.
//!
//! Deviations: a queue is `[K, D]`, one key a row (the released MoCo has one a column); it need not be a multiple of the batch, keys wrap
//! around. NNCLR contrasts all `2 b` vectors of a direction (NT-Xent) as lightly does, where the paper contrasts neighbours with
//! predictions only.

use burn::tensor::{Bool, Tensor};

use super::nt_xent::nt_xent_per_anchor;
use super::reduce::total;
use super::rows::{MIN_NORM, cross_entropy_of_positive, l2_normalize};

/// Returns MoCo's loss summed over the b queries; divide by b.
///
/// # Shapes
/// - `query`, `key`: `[b, d]`, not normalised; no gradient reaches the keys.
/// - `queue`: `[k, d]`, normalised rows, as [`enqueue`] keeps them.
/// - output: `[1]`
///
/// # Panics
/// If the shapes don't fit or the temperature isn't positive.
#[must_use]
pub fn moco(query: Tensor<2>, key: Tensor<2>, queue: Tensor<2>, temperature: f64) -> Tensor<1> {
    total(moco_per_image(query, key, queue, temperature))
}

/// Returns MoCo's loss of each query, `[b]`; see [`moco`].
///
/// # Panics
/// As [`moco`].
#[must_use]
pub fn moco_per_image(query: Tensor<2>, key: Tensor<2>, queue: Tensor<2>, temperature: f64) -> Tensor<1> {
    let logits = moco_logits(query, key, queue, temperature);
    let [batch, columns] = logits.dims();
    let positive = logits.clone().narrow(1, 0, 1);
    if columns == 1 {
        return (positive * 0.0).reshape([batch]);
    }
    cross_entropy_of_positive(positive, logits.narrow(1, 1, columns - 1))
}

/// Returns MoCo's logits: cosines over the temperature, the positive key in column 0, then the queue.
///
/// # Shapes
/// `[b, d]`, `[b, d]` and `[k, d]` to `[b, 1 + k]`.
///
/// # Panics
/// As [`moco`].
#[must_use]
pub fn moco_logits(query: Tensor<2>, key: Tensor<2>, queue: Tensor<2>, temperature: f64) -> Tensor<2> {
    let [batch, dim] = query.dims();
    assert_eq!(key.dims(), [batch, dim], "one key a query");
    assert_eq!(queue.dims()[1], dim, "queue and queries have one width");
    assert!(temperature > 0.0, "the temperature is positive, got {temperature}");
    let query = l2_normalize(query, MIN_NORM);
    let key = l2_normalize(key.detach(), MIN_NORM);
    let positive = (query.clone() * key).sum_dim(1); // [b, 1]
    let negatives = query.matmul(queue.detach().transpose()); // [b, k]
    Tensor::cat(vec![positive, negatives], 1) / temperature
}

/// Writes rows into a ring from position `at` on, over the oldest ones, and returns ring and next position.
///
/// MoCo's queue takes normalised keys ([`super::l2_normalize`]), NNCLR's support set projections as they are.
///
/// # Shapes
/// `queue`: `[k, d]`, `rows`: `[b, d]`; of more than `k` rows the last `k` stay.
///
/// # Panics
/// If the widths differ or `at` lies outside the queue.
#[must_use]
pub fn enqueue(queue: Tensor<2>, rows: Tensor<2>, at: usize) -> (Tensor<2>, usize) {
    let ([size, dim], [count, width]) = (queue.dims(), rows.dims());
    assert_eq!(width, dim, "queue and rows have one width");
    assert!(at < size, "position {at} lies outside a queue of {size}");
    let kept = count.min(size);
    let rows = rows.detach().narrow(0, count - kept, kept);
    let start = (at + count - kept) % size;
    let head = kept.min(size - start);
    let mut queue = queue.slice_assign([start..start + head, 0..dim], rows.clone().narrow(0, 0, head));
    if head < kept {
        queue = queue.slice_assign([0..kept - head, 0..dim], rows.narrow(0, head, kept - head));
    }
    (queue, (at + count) % size)
}

/// Returns MoCo v3's loss summed over the b images: both directions, each cross-entropy times `2 T`; divide by b.
///
/// # Shapes
/// - `queries`, `keys`: predictions and momentum projections of the two views, each `[b, d]`, not normalised; no gradient
///   reaches the keys.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ or the temperature isn't positive.
#[must_use]
pub fn moco_v3(queries: [Tensor<2>; 2], keys: [Tensor<2>; 2], temperature: f64) -> Tensor<1> {
    let ([q1, q2], [k1, k2]) = (queries, keys);
    total(moco_v3_per_image(q1, k2, temperature) + moco_v3_per_image(q2, k1, temperature))
}

/// Returns one direction of MoCo v3's loss for each image: `2 T` times the cross-entropy of picking its own key among the keys of the batch.
///
/// # Shapes
/// `[b, d]` and `[b, d]` to `[b]`.
///
/// # Panics
/// As [`moco_v3`].
#[must_use]
pub fn moco_v3_per_image(query: Tensor<2>, key: Tensor<2>, temperature: f64) -> Tensor<1> {
    let [batch, dim] = query.dims();
    assert_eq!(key.dims(), [batch, dim], "one key a query");
    assert!(temperature > 0.0, "the temperature is positive, got {temperature}");
    let query = l2_normalize(query, MIN_NORM);
    let key = l2_normalize(key.detach(), MIN_NORM);
    let positive = (query.clone() * key.clone()).sum_dim(1) / temperature;
    let own = !Tensor::<2, Bool>::diag_mask([batch, batch], 0, &query.device());
    let similarity = query.matmul(key.transpose()) / temperature;
    cross_entropy_of_positive(positive, similarity.mask_fill(own, f32::NEG_INFINITY)) * (2.0 * temperature)
}

/// Returns the row of `bank` with the largest cosine to each query (the first of equals), as it lies in the bank. Without gradient.
///
/// # Shapes
/// `[b, d]` and `[k, d]` to `[b, d]`.
///
/// # Panics
/// If the widths differ.
#[must_use]
pub fn nearest_neighbors(queries: Tensor<2>, bank: Tensor<2>) -> Tensor<2> {
    let ([batch, dim], [_, width]) = (queries.dims(), bank.dims());
    assert_eq!(width, dim, "bank and queries have one width");
    let (queries, bank) = (queries.detach(), bank.detach());
    let similarity = l2_normalize(queries, MIN_NORM).matmul(l2_normalize(bank.clone(), MIN_NORM).transpose());
    bank.select(0, similarity.argmax(1).reshape([batch]))
}

/// Returns NNCLR's loss summed over the 4b anchors of its two directions; divide by 4b.
///
/// # Shapes
/// - `neighbors`: of the projections of the two views ([`nearest_neighbors`]), each `[b, d]`; no gradient reaches them.
/// - `predictions`: of the two views, each `[b, d]`; the neighbours of one view meet the predictions of the other.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ or the temperature isn't positive.
#[must_use]
pub fn nnclr(neighbors: [Tensor<2>; 2], predictions: [Tensor<2>; 2], temperature: f64) -> Tensor<1> {
    total(nnclr_per_anchor(neighbors, predictions, temperature))
}

/// Returns NNCLR's loss of each anchor, `[4 * b]`: neighbours of view 1, predictions of view 2, neighbours of view 2, predictions of view 1.
///
/// # Panics
/// As [`nnclr`].
#[must_use]
pub fn nnclr_per_anchor(neighbors: [Tensor<2>; 2], predictions: [Tensor<2>; 2], temperature: f64) -> Tensor<1> {
    let ([n1, n2], [p1, p2]) = (neighbors, predictions);
    let first = nt_xent_per_anchor(n1.detach(), p2, temperature);
    let second = nt_xent_per_anchor(n2.detach(), p1, temperature);
    Tensor::cat(vec![first, second], 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, cosine, finite, numbers, tensor, ugly_pairs, values};

    fn cross_entropy(logits: &[f64], target: usize) -> f64 {
        logits.iter().map(|v| v.exp()).sum::<f64>().ln() - logits[target]
    }

    #[test]
    fn moco_agrees_with_the_definition() {
        let (batch, dim, size, temperature) = (3, 4, 5, 0.2);
        let (key, queue) = (values(batch * dim, 0.5), values(size * dim, 0.8));
        let unit = l2_normalize(tensor::<2>(&queue, [size, dim]), MIN_NORM);
        let loss = |x: Vec<Tensor<2>>| moco(x[0].clone(), tensor(&key, [batch, dim]), unit.clone(), temperature);
        let naive = |x: &[Vec<f64>]| {
            x[0].chunks(dim)
                .zip(key.chunks(dim))
                .map(|(q, k)| {
                    let keys = std::iter::once(k).chain(queue.chunks(dim));
                    cross_entropy(&keys.map(|k| cosine(q, k) / temperature).collect::<Vec<_>>(), 0)
                })
                .sum()
        };
        agrees(&[(values(batch * dim, 0.1), [batch, dim])], loss, naive);
    }

    #[test]
    fn moco_v3_agrees_with_the_definition_and_keys_have_no_gradient() {
        let (batch, dim, temperature) = (4, 3, 0.3);
        let keys = [values(batch * dim, 0.5), values(batch * dim, 0.8)];
        let key_tensors = || [0, 1].map(|i| tensor::<2>(&keys[i], [batch, dim]));
        let loss = |x: Vec<Tensor<2>>| moco_v3([x[0].clone(), x[1].clone()], key_tensors(), temperature);
        let naive = |x: &[Vec<f64>]| {
            let direction = |q: &[f64], k: &[f64]| {
                q.chunks(dim)
                    .enumerate()
                    .map(|(i, q)| {
                        let logits: Vec<f64> = k.chunks(dim).map(|k| cosine(q, k) / temperature).collect();
                        2.0 * temperature * cross_entropy(&logits, i)
                    })
                    .sum::<f64>()
            };
            direction(&x[0], &keys[1]) + direction(&x[1], &keys[0])
        };
        let inputs = [(values(batch * dim, 0.1), [batch, dim]), (values(batch * dim, 0.3), [batch, dim])];
        agrees(&inputs, loss, naive);
        let queries = || [0, 1].map(|_| tensor::<2>(&values(batch * dim, 0.2), [batch, dim]).require_grad());
        let key = tensor::<2>(&keys[0], [batch, dim]).require_grad();
        let gradients = moco_v3(queries(), [key.clone(), key.clone()], 0.2).backward();
        assert!(key.grad(&gradients).is_none());
    }

    #[test]
    fn the_queue_wraps_around() {
        let ring = |rows: usize, at: usize| {
            let rows: Vec<f64> = (1..=rows).map(|v| v as f64).collect();
            let (queue, next) = enqueue(tensor(&[0.0; 4], [4, 1]), tensor(&rows, [rows.len(), 1]), at);
            (numbers(queue), next)
        };
        assert_eq!(ring(2, 1), (vec![0.0, 1.0, 2.0, 0.0], 3));
        assert_eq!(ring(2, 2), (vec![0.0, 0.0, 1.0, 2.0], 0));
        assert_eq!(ring(3, 3), (vec![2.0, 3.0, 0.0, 1.0], 2));
        assert_eq!(ring(6, 1), (vec![4.0, 5.0, 6.0, 3.0], 3)); // of six the last four
    }

    #[test]
    fn neighbours_are_rows_of_the_bank() {
        let bank = tensor::<2>(&[2.0, 0.0, 0.0, 3.0, -1.0, 0.1], [3, 2]);
        let queries = tensor(&[0.1, 5.0, -7.0, 0.0, 0.0, 0.0], [3, 2]);
        let got = numbers(nearest_neighbors(queries, bank));
        assert_eq!(got.iter().map(|&v| v as f32).collect::<Vec<_>>(), [0.0, 3.0, -1.0, 0.1, 2.0, 0.0]);
    }

    #[test]
    fn nnclr_is_two_nt_xents() {
        let view = |seed: f64| tensor::<2>(&values(12, seed), [3, 4]);
        let got = numbers(nnclr([view(0.1), view(0.2)], [view(0.3), view(0.4)], 0.2))[0];
        let expected = numbers(crate::loss::nt_xent(view(0.1), view(0.4), 0.2))[0]
            + numbers(crate::loss::nt_xent(view(0.2), view(0.3), 0.2))[0];
        assert!((got - expected).abs() < 1e-5 * expected);
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for pair in ugly_pairs(2, 3).into_iter().chain(ugly_pairs(1, 3)).chain(ugly_pairs(5, 4)) {
            for temperature in [0.001, 0.1, 100.0] {
                let copy = |x: &[Tensor<2>]| [x[0].clone(), x[1].clone()];
                finite(&pair, |x| moco(x[0].clone(), x[1].clone(), x[1].clone(), temperature));
                finite(&pair, |x| moco_v3(copy(&x), copy(&x), temperature));
                finite(&pair, |x| {
                    let neighbors = copy(&x).map(|z| nearest_neighbors(z, x[1].clone()));
                    nnclr(neighbors, copy(&x), temperature)
                });
            }
        }
    }
}
