//! iBOT: the student predicts the teacher's distribution at the masked patches of the same view.
//!
//! Zhou, Wei, Wang, Shen, Xie, Yuille, Kong, 2021, <https://arxiv.org/abs/2111.07832>, equation 2, as in the released `iBOTLoss`: the mean over an
//! image's masked patches (zero where none is masked), then over images. Its other term is [`super::dino`]'s, its patch centre moves by
//! [`super::dino::update_center`].
//!
//! `DINOv2` (<https://arxiv.org/abs/2304.07193>) computes the same on the masked tokens alone: [`ibot_masked`] with the weights of
//! [`mask_weights`]. Its centre moves to the mean of all masked tokens.

use burn::tensor::Tensor;

use super::reduce::total;
use super::rows::soft_cross_entropy;

/// Returns the loss summed over the b images; divide by b (by the images of all global views, where there are several).
///
/// # Shapes
/// - `student`: `[b, n, k]`, not normalised.
/// - `teacher`: `[b, n, k]`, distributions ([`super::dino::centered_softmax`]); no gradient reaches them.
/// - `mask`: `[b, n]`, 1 for a masked patch.
/// - output: `[1]`
///
/// # Panics
/// If shapes differ or the temperature isn't positive.
#[must_use]
pub fn ibot(student: Tensor<3>, teacher: Tensor<3>, mask: Tensor<2>, student_temperature: f64) -> Tensor<1> {
    total(ibot_per_image(student, teacher, mask, student_temperature))
}

/// Returns the loss of each image, `[b]`; see [`ibot`].
///
/// # Panics
/// As [`ibot`].
#[must_use]
pub fn ibot_per_image(student: Tensor<3>, teacher: Tensor<3>, mask: Tensor<2>, student_temperature: f64) -> Tensor<1> {
    let [batch, patches, k] = student.dims();
    assert_eq!(teacher.dims(), [batch, patches, k], "one target distribution a patch");
    assert_eq!(mask.dims(), [batch, patches], "one mask value a patch");
    let rows = batch * patches;
    let per_patch = soft_cross_entropy(teacher.reshape([rows, k]), student.reshape([rows, k]), student_temperature);
    (per_patch.reshape([batch, patches]) * mask_weights(mask)).sum_dim(1).squeeze_dim(1)
}

/// Returns the loss summed over images, from the masked tokens alone; divide by the number of images.
///
/// # Shapes
/// - `student`, `teacher`: `[m, k]`, logits and distributions of the masked tokens.
/// - `weights`: `[m]`, one over the number of masked tokens of the token's image (from [`mask_weights`]).
/// - output: `[1]`
///
/// # Panics
/// If shapes differ or the temperature isn't positive.
#[must_use]
pub fn ibot_masked(student: Tensor<2>, teacher: Tensor<2>, weights: Tensor<1>, student_temperature: f64) -> Tensor<1> {
    assert_eq!(weights.dims(), [student.dims()[0]], "one weight a token");
    total(soft_cross_entropy(teacher, student, student_temperature) * weights)
}

/// Returns `mask` over the number of masked patches of the image, zeros where none is masked.
///
/// # Shapes
/// `[b, n]` to `[b, n]`.
#[must_use]
pub fn mask_weights(mask: Tensor<2>) -> Tensor<2> {
    mask.clone() / mask.sum_dim(1).clamp_min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, numbers, tensor, values};

    #[test]
    fn agrees_with_the_definition_and_with_the_masked_tokens_alone() {
        let (batch, n, k, temperature) = (3, 4, 3, 0.2);
        let mask = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0];
        let probs: Vec<f64> = values(batch * n * k, 0.7).iter().map(|v| v * v).collect();
        let naive = |x: &[Vec<f64>]| {
            let token = |i: usize| {
                let (p, s) = (&probs[i * k..(i + 1) * k], &x[0][i * k..(i + 1) * k]);
                let norm = s.iter().map(|s| (s / temperature).exp()).sum::<f64>().ln();
                p.iter().zip(s).map(|(p, s)| p * (norm - s / temperature)).sum::<f64>()
            };
            let image = |b: usize| {
                let masked: Vec<usize> = (b * n..(b + 1) * n).filter(|&i| mask[i] == 1.0).collect();
                masked.iter().map(|&i| token(i)).sum::<f64>() / masked.len().max(1) as f64
            };
            (0..batch).map(image).sum()
        };
        let input = [(values(batch * n * k, 0.2), [batch, n, k])];
        let teacher = || tensor::<3>(&probs, [batch, n, k]);
        let mask_tensor = || tensor::<2>(&mask, [batch, n]);
        agrees(&input, |x| ibot(x[0].clone(), teacher(), mask_tensor(), temperature), naive);

        let masked: Vec<usize> = (0..mask.len()).filter(|&i| mask[i] == 1.0).collect();
        let weights = numbers(mask_weights(mask_tensor()));
        let pick = |x: &[f64]| masked.iter().flat_map(|&i| x[i * k..(i + 1) * k].to_vec()).collect::<Vec<_>>();
        let weights: Vec<f64> = masked.iter().map(|&i| weights[i]).collect();
        let rows = [masked.len(), k];
        let got = ibot_masked(
            tensor(&pick(&input[0].0), rows),
            tensor(&pick(&probs), rows),
            tensor(&weights, [masked.len()]),
            temperature,
        );
        let expected = naive(&[input[0].0.clone()]);
        assert!((numbers(got)[0] - expected).abs() < 1e-5 * expected);
    }

    #[test]
    fn nothing_masked_costs_nothing() {
        let input = [(values(12, 0.1), [2, 2, 3])];
        let loss = finite(&input, |x| {
            let mask = Tensor::zeros([2, 2], &x[0].device());
            ibot(x[0].clone(), Tensor::ones([2, 2, 3], &mask.device()), mask, 1e-3)
        });
        assert_eq!(loss, 0.0);
    }
}
