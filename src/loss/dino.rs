//! DINO: each view of the student predicts the teacher's distribution of another view.
//!
//! Caron, Touvron, Misra, Jegou, Mairal, Bojanowski, Joulin, 2021, <https://arxiv.org/abs/2104.14294>, equations 2 to 4 and algorithm 1, as in
//! the released `DINOLoss`: `-sum softmax((t - c) / T_t) log softmax(s / T_s)`, averaged over all pairs of a teacher's and a student's view that
//! aren't the same view.
//!
//! `DINOv2` (Oquab et al., 2023, <https://arxiv.org/abs/2304.07193>) is the same loss with [`super::sinkhorn`] over all the teacher's outputs in the
//! place of centring: its code weights global and local terms so that the sum is this mean (except without any local view, where it
//! divides by 3 and not by 2).

use burn::tensor::{Tensor, activation};

use super::reduce::total;
use super::rows::soft_cross_entropy;

/// Returns the teacher's distributions: outputs less their centre, sharpened. No gradient passes through.
///
/// # Shapes
/// - `teacher`: `[n, k]`
/// - `center`: `[1, k]`
/// - output: `[n, k]`, rows that sum to one.
///
/// # Panics
/// If the widths differ or the temperature isn't positive.
#[must_use]
pub fn centered_softmax(teacher: Tensor<2>, center: Tensor<2>, temperature: f64) -> Tensor<2> {
    assert_eq!(center.dims(), [1, teacher.dims()[1]], "one centre a prototype");
    assert!(temperature > 0.0, "the temperature is positive, got {temperature}");
    activation::softmax((teacher - center).detach() / temperature, 1)
}

/// Returns the loss summed over the b images; divide by b.
///
/// # Shapes
/// - `students`: `[b, k]` for each view, not normalised.
/// - `teachers`: `[b, k]`, distributions for each of the first views, the global ones; no gradient reaches them.
/// - output: `[1]`
///
/// # Panics
/// If there is no pair of different views, if shapes differ, or if the temperature isn't positive.
#[must_use]
pub fn dino(students: &[Tensor<2>], teachers: &[Tensor<2>], student_temperature: f64) -> Tensor<1> {
    total(dino_per_image(students, teachers, student_temperature))
}

/// Returns the loss of each image, `[b]`; see [`dino`].
///
/// # Panics
/// As [`dino`].
#[must_use]
pub fn dino_per_image(students: &[Tensor<2>], teachers: &[Tensor<2>], student_temperature: f64) -> Tensor<1> {
    let mut terms = 0;
    let mut sum: Option<Tensor<1>> = None;
    for (view, student) in students.iter().enumerate() {
        let others =
            teachers.iter().enumerate().filter(|(teacher, _)| *teacher != view).map(|(_, probs)| probs.clone());
        // the log-softmax of a student meets the sum of its targets
        let Some((targets, count)) = others.fold(None, |sum: Option<(Tensor<2>, usize)>, probs| match sum {
            Some((sum, count)) => Some((sum + probs, count + 1)),
            None => Some((probs, 1)),
        }) else {
            continue;
        };
        let term = soft_cross_entropy(targets, student.clone(), student_temperature);
        sum = Some(match sum {
            Some(sum) => sum + term,
            None => term,
        });
        terms += count;
    }
    assert!(terms > 0, "a student's view and another one of the teacher are needed");
    sum.expect("there is a term") / terms as f64
}

/// Returns the entropy of each distribution, in nats: of the teacher's, what is left of the loss when the student agrees.
///
/// # Shapes
/// `[n, k]`, rows that sum to one, to `[n]`.
#[must_use]
pub fn entropy(probs: Tensor<2>) -> Tensor<1> {
    (probs.clone() * probs.clamp_min(f32::MIN_POSITIVE).log()).sum_dim(1).squeeze_dim::<1>(1).neg()
}

/// Returns the centre after a step: `momentum * center + (1 - momentum) * mean of the rows`. To be called after the centre was used, once
/// a step, with all the teacher's outputs of the global batch.
///
/// # Shapes
/// - `center`: `[1, k]`
/// - `teacher`: `[n, k]`, of all global views (or of all masked tokens).
/// - output: `[1, k]`
///
/// # Panics
/// If the widths differ.
#[must_use]
pub fn update_center(center: Tensor<2>, teacher: Tensor<2>, momentum: f64) -> Tensor<2> {
    let [rows, dim] = teacher.dims();
    assert_eq!(center.dims(), [1, dim], "one centre a prototype");
    if rows == 0 {
        return center; // a batch without a masked token
    }
    (center * momentum + teacher.mean_dim(0) * (1.0 - momentum)).detach()
}

/// Returns the teacher's temperature of an epoch: `warmup_epochs` values from `warmup` to `temperature`, both ends included, then `temperature`.
#[must_use]
pub fn teacher_temperature(epoch: usize, warmup_epochs: usize, warmup: f64, temperature: f64) -> f64 {
    if epoch >= warmup_epochs {
        temperature
    } else if warmup_epochs == 1 {
        warmup
    } else {
        warmup + (temperature - warmup) * (epoch as f64 / (warmup_epochs - 1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, numbers, tensor, ugly_pairs, values};

    fn softmax(row: &[f64]) -> Vec<f64> {
        let sum: f64 = row.iter().map(|v| v.exp()).sum();
        row.iter().map(|v| v.exp() / sum).collect()
    }

    #[test]
    fn agrees_with_the_double_loop() {
        let (batch, k, t_s, t_t) = (3, 4, 0.3, 0.2);
        let center = values(k, 0.45);
        for (views, globals) in [(2, 2), (2, 1), (1, 2), (5, 2), (4, 3)] {
            let teachers: Vec<Vec<f64>> = (0..globals).map(|t| values(batch * k, 0.05 + 0.2 * t as f64)).collect();
            let inputs: Vec<_> = (0..views).map(|v| (values(batch * k, 0.1 * v as f64), [batch, k])).collect();
            let naive = |x: &[Vec<f64>]| {
                let (mut sum, mut terms) = (0.0, 0);
                for (t, teacher) in teachers.iter().enumerate() {
                    for (_, student) in x.iter().enumerate().filter(|(v, _)| *v != t) {
                        for (t, s) in teacher.chunks(k).zip(student.chunks(k)) {
                            let p = softmax(&t.iter().zip(&center).map(|(t, c)| (t - c) / t_t).collect::<Vec<_>>());
                            let q = softmax(&s.iter().map(|s| s / t_s).collect::<Vec<_>>());
                            sum -= p.iter().zip(&q).map(|(p, q)| p * q.ln()).sum::<f64>();
                        }
                        terms += 1;
                    }
                }
                sum / f64::from(terms)
            };
            let probs: Vec<_> = teachers
                .iter()
                .map(|t| centered_softmax(tensor(t, [batch, k]), tensor(&center, [1, k]), t_t))
                .collect();
            agrees(&inputs, |x| dino(&x, &probs, t_s), naive);
        }
    }

    #[test]
    fn the_centre_moves_towards_the_mean() {
        let got = numbers(update_center(tensor(&[1.0, 2.0], [1, 2]), tensor(&[0.0, 4.0, 2.0, 8.0], [2, 2]), 0.75));
        assert_eq!(got, [1.0, 3.0]);
        let empty = Tensor::<2>::zeros([0, 2], &burn::tensor::Device::flex());
        assert_eq!(numbers(update_center(Tensor::ones([1, 2], &empty.device()), empty, 0.75)), [1.0, 1.0]);
    }

    #[test]
    fn entropies_go_from_none_to_that_of_the_uniform_distribution() {
        let got = numbers(entropy(tensor(&[1.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25], [2, 4])));
        assert!(got[0].abs() < 1e-7 && (got[1] - 4f64.ln()).abs() < 1e-6, "{got:?}");
    }

    #[test]
    fn temperatures_include_both_ends_of_the_warmup() {
        let at = |epoch| teacher_temperature(epoch, 4, 0.04, 0.07);
        assert_eq!([at(0), at(3), at(4), at(100)], [0.04, 0.07, 0.07, 0.07]);
        assert!((at(1) - 0.05).abs() < 1e-12);
        assert_eq!([teacher_temperature(0, 1, 0.04, 0.07), teacher_temperature(0, 0, 0.04, 0.07)], [0.04, 0.07]);
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for pair in ugly_pairs(2, 3).into_iter().chain(ugly_pairs(1, 4)) {
            finite(&pair, |x| {
                let [_, k] = x[0].dims();
                let center = Tensor::zeros([1, k], &x[0].device());
                let teachers: Vec<_> = x.iter().map(|t| centered_softmax(t.clone(), center.clone(), 1e-3)).collect();
                dino(&x, &teachers, 1e-3)
            });
        }
    }

    #[test]
    #[should_panic(expected = "another one")]
    fn one_view_has_nobody_to_learn_from() {
        let view = || vec![tensor::<2>(&[0.0; 4], [2, 2])];
        let _ = dino(&view(), &view(), 0.1);
    }
}
