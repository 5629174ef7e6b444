//! Classification: targets from labels, cross-entropy of logits.

use burn::tensor::{Tensor, activation};

/// Returns the target distribution of each image, row by row: `share` for its own label, the rest for that of its partner, the image as far from the end of the batch
/// as it is from the beginning; then label smoothing (Szegedy et al., 2015, <https://arxiv.org/abs/1512.00567>, section 7). timm's `mixup_target`.
///
/// # Shapes
/// `[images]` and `[images]` to `[images, classes]`.
///
/// # Panics
/// When a label is not below `classes`, or the lengths differ.
#[must_use]
pub fn targets(labels: &[u32], shares: &[f64], classes: usize, smoothing: f64) -> Vec<f32> {
    assert_eq!(labels.len(), shares.len(), "a share for each label");
    let mut out = Vec::with_capacity(labels.len() * classes);
    for ((&own, &partner), &share) in labels.iter().zip(labels.iter().rev()).zip(shares) {
        let mut row = vec![smoothing / classes as f64; classes];
        row[own as usize] += (1.0 - smoothing) * share;
        row[partner as usize] += (1.0 - smoothing) * (1.0 - share);
        out.extend(row.into_iter().map(|value| value as f32));
    }
    out
}

/// Returns the targets of each image where it may have several classes or none: 1 for its own, and those of its partner, as [`targets`] mixes them; then label
/// smoothing between yes and no.
///
/// # Shapes
/// `[images]` and `[images]` to `[images, classes]`.
///
/// # Panics
/// When a label is not below `classes`, or the lengths differ.
#[must_use]
pub fn multi_label_targets(labels: &[Vec<u32>], shares: &[f64], classes: usize, smoothing: f64) -> Vec<f32> {
    assert_eq!(labels.len(), shares.len(), "a share for each image");
    let mut out = Vec::with_capacity(labels.len() * classes);
    for ((own, partner), &share) in labels.iter().zip(labels.iter().rev()).zip(shares) {
        let mut row = vec![smoothing / 2.0; classes];
        for (labels, share) in [(own, share), (partner, 1.0 - share)] {
            for &label in labels {
                row[label as usize] += (1.0 - smoothing) * share;
            }
        }
        out.extend(row.into_iter().map(|value| value as f32));
    }
    out
}

/// Returns the mean binary cross-entropy over the classes of each row,
/// `weight * target * softplus(-logit) + (1 - target) * softplus(logit)`: torch's `binary_cross_entropy_with_logits` with its `pos_weight`.
///
/// # Shapes
/// - `logits`, `targets`: `[images, classes]`
/// - `weights`: `[classes]`
/// - output: `[images]`
#[must_use]
pub fn binary_cross_entropy(logits: Tensor<2>, targets: Tensor<2>, weights: Option<Tensor<1>>) -> Tensor<1> {
    // softplus(x) = -log_sigmoid(-x), which does not overflow, and whose derivative at 0 is the right one
    let yes = activation::log_sigmoid(logits.clone()).neg();
    let no = activation::log_sigmoid(logits.neg()).neg();
    let rest = targets.clone().neg() + 1.0;
    let targets = match weights {
        Some(weights) => targets * weights.unsqueeze_dim(0),
        None => targets,
    };
    (targets * yes + rest * no).mean_dim(1).squeeze_dim::<1>(1)
}

/// Returns the cross-entropy of each row, `-sum(weight * target * log_softmax(logits))`; divided by the sum of the labels' weights it is torch's weighted `cross_entropy`,
/// of any smoothing.
///
/// # Shapes
/// - `logits`, `targets`: `[images, classes]`
/// - `weights`: `[classes]`
/// - output: `[images]`
#[must_use]
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<2>, weights: Option<Tensor<1>>) -> Tensor<1> {
    let targets = match weights {
        Some(weights) => targets * weights.unsqueeze_dim(0),
        None => targets,
    };
    let log_probs = activation::log_softmax(logits, 1);
    (targets * log_probs).sum_dim(1).squeeze_dim::<1>(1).neg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, tensor, values};
    use crate::loss::total;

    #[test]
    fn targets_are_timms() {
        // timm.data.mixup.mixup_target(tensor([0, 2, 1]), 4, tensor([.3, 1., .6])[:, None], 0.1)
        let expected = [0.295, 0.655, 0.025, 0.025, 0.025, 0.025, 0.925, 0.025, 0.385, 0.565, 0.025, 0.025];
        let got = targets(&[0, 2, 1], &[0.3, 1.0, 0.6], 4, 0.1);
        assert!(got.iter().zip(expected).all(|(got, expected)| (f64::from(*got) - expected).abs() < 1e-6), "{got:?}");
    }

    #[test]
    fn agrees_with_the_definition() {
        let (rows, k) = (4, 5);
        let soft: Vec<f64> = targets(&[0, 3, 1, 1], &[0.7; 4], k, 0.1).into_iter().map(f64::from).collect();
        let weights = [0.5, 2.0, 1.0, 0.0, 1.5];
        for weighted in [false, true] {
            let weight = |class: usize| if weighted { weights[class] } else { 1.0 };
            let naive = |logits: &[Vec<f64>]| {
                let row = |r: usize| {
                    let logits = &logits[0][r * k..(r + 1) * k];
                    let norm = logits.iter().map(|v| v.exp()).sum::<f64>().ln();
                    (0..k).map(|c| weight(c) * soft[r * k + c] * (norm - logits[c])).sum::<f64>()
                };
                (0..rows).map(row).sum()
            };
            let loss = |x: Vec<Tensor<2>>| {
                let weights = weighted.then(|| tensor(&weights, [k]));
                total(cross_entropy(x[0].clone(), tensor(&soft, [rows, k]), weights))
            };
            agrees(&[(values(rows * k, 0.1), [rows, k])], loss, naive);
        }
    }

    #[test]
    fn several_labels_agree_with_the_definition() {
        let labels = [vec![0, 3], vec![], vec![1], vec![0, 1, 2, 3, 4]];
        let (rows, k) = (4, 5);
        let soft: Vec<f64> = multi_label_targets(&labels, &[0.7; 4], k, 0.1).into_iter().map(f64::from).collect();
        // the first image: 0.9 * (0.7 * own + 0.3 * the last one's) + 0.05
        let first = [0.95, 0.32, 0.32, 0.95, 0.32];
        assert!(soft.iter().zip(first).all(|(got, expected)| (got - expected).abs() < 1e-6), "{soft:?}");
        let weights = [0.5, 2.0, 1.0, 0.0, 1.5];
        for weighted in [false, true] {
            let weight = |class: usize| if weighted { weights[class] } else { 1.0 };
            let naive = |logits: &[Vec<f64>]| {
                let term = |at: usize| {
                    let p = 1.0 / (1.0 + (-logits[0][at]).exp());
                    -(weight(at % k) * soft[at] * p.ln() + (1.0 - soft[at]) * (1.0 - p).ln()) / k as f64
                };
                (0..rows * k).map(term).sum()
            };
            let loss = |x: Vec<Tensor<2>>| {
                let weights = weighted.then(|| tensor(&weights, [k]));
                total(binary_cross_entropy(x[0].clone(), tensor(&soft, [rows, k]), weights))
            };
            agrees(&[(values(rows * k, 0.1), [rows, k])], loss, naive);
        }
    }

    #[test]
    fn certain_answers_stay_finite() {
        let logits = tensor::<2>(&[1e4, -1e4, 0.0, 88.0], [2, 2]).require_grad();
        let loss = total(binary_cross_entropy(logits.clone(), tensor(&[0.0, 1.0, 1.0, 1.0], [2, 2]), None));
        let gradient = logits.grad(&loss.backward()).unwrap().into_data().try_to_vec::<f32>().unwrap();
        let expected = [0.5, -0.5, -0.25, 0.0];
        assert!(gradient.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-7), "{gradient:?}");
        assert!((loss.into_scalar::<f32>() - 1e4).abs() < 1.0);
    }

    #[test]
    fn logits_far_apart_stay_finite() {
        let logits = tensor::<2>(&[1e4, -1e4, 0.0, 0.0], [2, 2]).require_grad();
        let loss = total(cross_entropy(logits.clone(), tensor(&[0.0, 1.0, 0.5, 0.5], [2, 2]), None));
        let gradient = logits.grad(&loss.backward()).unwrap().into_data().try_to_vec::<f32>().unwrap();
        assert!(gradient.iter().all(|g| g.is_finite()));
    }
}
