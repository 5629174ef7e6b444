//! Regression of a teacher's token features: I-JEPA and data2vec.
//!
//! - I-JEPA: Assran et al., 2023, <https://arxiv.org/abs/2301.08243>; the released code: smooth L1 (beta 1) of predictions and layer-normed teacher tokens.
//! - data2vec: Baevski et al., 2022, <https://arxiv.org/abs/2202.03555>, section 3.3; the released vision code: layer-normed outputs of the last
//!   blocks, averaged, layer-normed again if asked, smooth L1 (beta 2) on masked tokens.

use burn::tensor::{Int, Tensor};

use super::reduce::total;

/// Epsilon of torch's layer norm.
const EPSILON: f64 = 1e-5;

/// Returns the smooth L1 loss of each token (the mean over its features), summed over tokens; divide by the number of tokens.
///
/// `e^2 / (2 beta)` for errors below `beta`, `e - beta / 2` beyond; `beta = 0` is the absolute error.
///
/// # Shapes
/// - `prediction`, `target`: `[..., d]`; no gradient reaches the target.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ or beta is negative.
#[must_use]
pub fn smooth_l1<const D: usize>(prediction: Tensor<D>, target: Tensor<D>, beta: f64) -> Tensor<1> {
    let dims = prediction.dims();
    assert_eq!(target.dims(), dims, "one target a prediction");
    assert!(beta >= 0.0, "beta isn't negative, got {beta}");
    let error = (prediction - target.detach()).abs();
    let loss = if beta == 0.0 {
        error
    } else {
        let quadratic = error.clone().clamp_max(beta);
        quadratic.clone() * (error - quadratic * 0.5) / beta
    };
    total(loss) / dims[D - 1] as f64
}

/// Standardises the last dimension as a layer norm without weights does (biased variance plus 1e-5).
///
/// # Shapes
/// `[..., d]` to `[..., d]`.
#[must_use]
pub fn layer_norm<const D: usize>(tokens: Tensor<D>) -> Tensor<D> {
    let centered = tokens.clone() - tokens.mean_dim(D - 1);
    let variance = centered.clone().square().mean_dim(D - 1);
    centered / (variance + EPSILON).sqrt()
}

/// Returns I-JEPA's targets: layer-normed teacher tokens at the prediction masks; each mask's targets stand `repeat` times in a
/// row, once for each context mask. No gradient passes through.
///
/// # Shapes
/// - `teacher`: `[b, n, d]`
/// - `masks`: `[m, b, k]`, token indices of each prediction mask.
/// - output: `[m * repeat, b, k, d]`
///
/// # Panics
/// If the numbers of images differ.
#[must_use]
pub fn ijepa_targets(teacher: Tensor<3>, masks: Tensor<3, Int>, repeat: usize) -> Tensor<4> {
    let ([batch, _, dim], [count, images, tokens]) = (teacher.dims(), masks.dims());
    assert_eq!(images, batch, "one mask an image");
    let teacher = layer_norm(teacher.detach());
    let index = masks.permute([1, 0, 2]).reshape([batch, count * tokens, 1]).expand([batch, count * tokens, dim]);
    let picked = teacher.gather(1, index).reshape([batch, count, tokens, dim]).permute([1, 0, 2, 3]); // [m, b, k, d]
    picked.unsqueeze_dim::<5>(1).expand([count, repeat, batch, tokens, dim]).reshape([
        count * repeat,
        batch,
        tokens,
        dim,
    ])
}

/// Returns data2vec's targets: the mean of layer-normed block outputs, layer-normed again if `normalize`. No gradient passes through.
///
/// # Shapes
/// - `layers`: `[l, b, n, d]`, outputs of the teacher's last `l` blocks.
/// - output: `[b, n, d]`
#[must_use]
pub fn data2vec_targets(layers: Tensor<4>, normalize: bool) -> Tensor<3> {
    let mean = layer_norm(layers.detach()).mean_dim(0).squeeze_dim(0);
    if normalize { layer_norm(mean) } else { mean }
}

/// Returns the tokens at flat positions `image * n + token`.
///
/// # Shapes
/// `[b, n, d]` and `[m]` to `[m, d]`.
#[must_use]
pub fn select_tokens(tokens: Tensor<3>, positions: Tensor<1, Int>) -> Tensor<2> {
    let [batch, count, dim] = tokens.dims();
    tokens.reshape([batch * count, dim]).select(0, positions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, numbers, tensor, values};
    use burn::tensor::{Device, TensorData};

    fn index<const D: usize>(values: Vec<i64>, shape: [usize; D]) -> Tensor<D, Int> {
        Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff())
    }

    fn normed(row: &[f64]) -> Vec<f64> {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / row.len() as f64;
        row.iter().map(|v| (v - mean) / (variance + 1e-5).sqrt()).collect()
    }

    #[test]
    fn smooth_l1_agrees_with_the_definition() {
        let target = values(12, 0.6);
        for beta in [0.0, 0.1, 1.0, 2.0] {
            let naive = |x: &[Vec<f64>]| {
                let each = |(a, b): (&f64, &f64)| {
                    let e = (a - b).abs();
                    if e < beta { e * e / (2.0 * beta) } else { e - beta / 2.0 }
                };
                x[0].iter().zip(&target).map(each).sum::<f64>() / 4.0
            };
            agrees(&[(values(12, 0.1), [3, 4])], |x| smooth_l1(x[0].clone(), tensor(&target, [3, 4]), beta), naive);
        }
        let same = finite(&[(vec![1.0; 4], [1, 4])], |x| smooth_l1(x[0].clone(), x[0].clone(), 0.0));
        assert_eq!(same, 0.0);
    }

    #[test]
    fn ijepa_targets_are_the_masks_tokens_repeated_mask_by_mask() {
        let (batch, n, dim) = (2, 4, 3);
        let teacher = values(batch * n * dim, 0.2);
        let masks = [[[3, 1], [0, 0]], [[2, 2], [1, 3]]]; // [m][b][k]
        let flat = vec![3, 1, 0, 0, 2, 2, 1, 3];
        let got = numbers(ijepa_targets(tensor(&teacher, [batch, n, dim]), index(flat, [2, 2, 2]), 2));
        let mut expected = Vec::new();
        for mask in masks {
            for _ in 0..2 {
                for (b, tokens) in mask.iter().enumerate() {
                    for t in tokens {
                        expected.extend(normed(&teacher[(b * n + t) * dim..(b * n + t + 1) * dim]));
                    }
                }
            }
        }
        assert!(got.len() == expected.len() && got.iter().zip(&expected).all(|(g, e)| (g - e).abs() < 1e-5));
    }

    #[test]
    fn data2vec_targets_are_means_of_normed_layers() {
        let layers = values(2 * 4, 0.3);
        let mean: Vec<f64> =
            normed(&layers[..4]).iter().zip(normed(&layers[4..])).map(|(a, b)| (a + b) / 2.0).collect();
        for (normalize, expected) in [(false, mean.clone()), (true, normed(&mean))] {
            let got = numbers(data2vec_targets(tensor(&layers, [2, 1, 1, 4]), normalize));
            assert!(got.iter().zip(&expected).all(|(g, e)| (g - e).abs() < 1e-5), "{got:?} {expected:?}");
        }
    }

    #[test]
    fn constant_tokens_become_zero() {
        assert!(numbers(layer_norm(tensor::<2>(&[0.5; 8], [2, 4]))).iter().all(|&v| v == 0.0));
    }

    #[test]
    fn tokens_are_picked_by_flat_position() {
        let tokens = tensor::<3>(&[0.0, 1.0, 2.0, 3.0], [2, 2, 1]);
        assert_eq!(numbers(select_tokens(tokens, index(vec![3, 0], [2]))), [3.0, 0.0]);
    }
}
