//! `KoLeo`: embeddings keep away from their nearest neighbour.
//!
//! Sablayrolles, Douze, Schmid, Jegou, 2018, <https://arxiv.org/abs/1806.03198>, equation 2, as in `DINOv2`'s released `KoLeoLoss`:
//! `-log(|x - x_nn + 1e-8| + epsilon)` of normalised embeddings, where the neighbour has the largest dot product.
//!
//! `DINOv2` takes the neighbours from a rank's images; here they come from the rows given, so that a caller chooses the whole batch or one micro-batch.
//! Deviation: an image is never its own neighbour; in the released code the diagonal is -1, which ties with an exact opposite.

use burn::tensor::{Bool, Tensor};

use super::reduce::total;
use super::rows::l2_normalize;

/// Added to each difference, as torch's `PairwiseDistance` does in the released code. Keeps the gradient of two equal rows finite.
const DIFFERENCE: f64 = 1e-8;

/// Returns the loss summed over the b rows; divide by b.
///
/// Of two equal rows each costs about `-log(1e-8)`, with finite gradients that cancel when each is the other's neighbour.
///
/// # Shapes
/// - `embeddings`: `[b, d]`, not normalised, in `DINOv2` the class tokens of one global view before the head.
/// - `epsilon`: smallest norm and smallest distance (1e-8).
/// - output: `[1]`
///
/// # Panics
/// If there are fewer than two rows or epsilon isn't positive.
#[must_use]
pub fn koleo(embeddings: Tensor<2>, epsilon: f64) -> Tensor<1> {
    let [batch, _] = embeddings.dims();
    assert!(batch >= 2, "one image has no neighbour");
    assert!(epsilon > 0.0, "epsilon is positive, got {epsilon}");
    let unit = l2_normalize(embeddings, epsilon);
    let fixed = unit.clone().detach();
    let own = !Tensor::<2, Bool>::diag_mask([batch, batch], 0, &fixed.device());
    let dots = fixed.clone().matmul(fixed.transpose()).mask_fill(own, f32::NEG_INFINITY);
    let neighbors = unit.clone().select(0, dots.argmax(1).reshape([batch]));
    let distance = (unit - neighbors + DIFFERENCE).square().sum_dim(1).clamp_min(1e-30).sqrt();
    total((distance + epsilon).log()).neg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, cosine, finite, graph, norm, ugly_pairs, values};

    #[test]
    fn agrees_with_the_definition() {
        for (batch, dim) in [(2, 3), (6, 4)] {
            let naive = |x: &[Vec<f64>]| {
                let rows: Vec<&[f64]> = x[0].chunks(dim).collect();
                let unit = |i: usize| rows[i].iter().map(|v| v / norm(rows[i], 1e-8)).collect::<Vec<_>>();
                let row = |i: usize| {
                    let others = (0..batch).filter(|&j| j != i);
                    let nearest =
                        others.max_by(|&a, &b| cosine(rows[i], rows[a]).total_cmp(&cosine(rows[i], rows[b]))).unwrap();
                    let squared: f64 = unit(i).iter().zip(unit(nearest)).map(|(a, b)| (a - b + 1e-8).powi(2)).sum();
                    -(squared.sqrt() + 1e-8).ln()
                };
                (0..batch).map(row).sum()
            };
            agrees(&[(values(batch * dim, 0.1), [batch, dim])], |x| koleo(x[0].clone(), 1e-8), naive);
        }
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for [first, second] in ugly_pairs(2, 3).into_iter().chain(ugly_pairs(5, 4)) {
            finite(&[first], |x| koleo(x[0].clone(), 1e-8));
            finite(&[second], |x| koleo(x[0].clone(), 1e-8));
        }
    }

    #[test]
    fn duplicates_cost_much_and_their_gradients_cancel() {
        let row = values(4, 0.3);
        let (loss, gradients) = graph(&[(row.repeat(2), [2, 4])], |x| koleo(x[0].clone(), 1e-8));
        assert!((loss - -2.0 * 3e-8f64.ln()).abs() < 1e-3, "{loss}"); // |(1e-8, ...)| of four is 2e-8
        assert!(gradients[0].iter().all(|g| g.abs() < 1e-3), "{gradients:?}");
    }

    #[test]
    fn opposites_are_each_others_neighbour() {
        let loss = finite(&[(vec![1.0, 0.0, -1.0, 0.0], [2, 2])], |x| koleo(x[0].clone(), 1e-8));
        assert!((loss - -2.0 * 2f64.ln()).abs() < 1e-5, "{loss}");
    }
}
