//! Masked autoencoder: mean squared error on the pixels of the removed patches.
//!
//! He, Chen, Xie, Li, Dollar, Girshick, 2021, <https://arxiv.org/abs/2111.06377>, section 3 and, for normalised targets,
//! "Reconstruction target"; order of the pixels and constants as in the released `models_mae.py`.

use burn::tensor::Tensor;

use super::reduce::total;

/// Added to the variance of a patch before its root, as in the released code.
const EPSILON: f64 = 1e-6;

/// Cuts images into patches: patches row by row, inside a patch (row, column, channel).
///
/// # Shapes
/// `[b, c, h, w]` to `[b, (h / patch) * (w / patch), patch * patch * c]`.
///
/// # Panics
/// If `patch` doesn't divide height and width.
#[must_use]
pub fn patchify(images: Tensor<4>, patch: usize) -> Tensor<3> {
    let [batch, channels, height, width] = images.dims();
    assert!(
        patch > 0 && height.is_multiple_of(patch) && width.is_multiple_of(patch),
        "patches of {patch} don't tile images of {height} x {width}"
    );
    let (rows, columns) = (height / patch, width / patch);
    images
        .reshape([batch, channels, rows, patch, columns, patch])
        .permute([0, 2, 4, 3, 5, 1]) // [b, rows, columns, patch, patch, c]
        .reshape([batch, rows * columns, patch * patch * channels])
}

/// Standardises the values of each patch: subtracts the mean, divides by the root of (unbiased variance + 1e-6).
///
/// # Shapes
/// `[b, l, n]` to `[b, l, n]`.
///
/// # Panics
/// If a patch has fewer than two values.
#[must_use]
pub fn normalize_patches(patches: Tensor<3>) -> Tensor<3> {
    let [_, _, len] = patches.dims();
    assert!(len >= 2, "an unbiased variance takes two values, a patch has {len}");
    let centered = patches.clone() - patches.mean_dim(2);
    let variance = centered.clone().square().sum_dim(2) / (len - 1) as f64; // [b, l, 1]
    centered / (variance + EPSILON).sqrt()
}

/// Returns the mean squared error of each removed patch, summed over the removed patches.
///
/// Divide by the number of removed patches of the global batch (the sum of all masks), which the caller knows from drawing
/// them: images and micro-batches may have unequal masks, so a mean of means would be another loss.
///
/// # Shapes
/// - `pred`, `target`: `[b, l, n]`
/// - `mask`: `[b, l]`, 1 for a removed patch, 0 for one that the encoder saw.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ.
#[must_use]
pub fn reconstruction(pred: Tensor<3>, target: Tensor<3>, mask: Tensor<2>) -> Tensor<1> {
    let [batch, patches, len] = pred.dims();
    assert_eq!(target.dims(), [batch, patches, len], "one target a prediction");
    assert_eq!(mask.dims(), [batch, patches], "one mask value a patch");
    let per_patch = (pred - target).square().mean_dim(2).squeeze_dim(2); // [b, l]
    total(per_patch * mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    fn values(len: usize, seed: f64) -> Vec<f32> {
        (0..len).map(|i| (((i as f64 + 1.0) * 0.618_033_988_749_894_9 + seed).fract() * 2.0 - 1.0) as f32).collect()
    }

    fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
        Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff())
    }

    fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn patches_are_in_the_published_order() {
        let (batch, channels, height, width, patch) = (2, 3, 4, 6, 2);
        let images = values(batch * channels * height * width, 0.1);
        let got = numbers(patchify(tensor(images.clone(), [batch, channels, height, width]), patch));
        let mut expected = Vec::new();
        for b in 0..batch {
            for (top, left) in (0..height / patch).flat_map(|r| (0..width / patch).map(move |c| (r * patch, c * patch)))
            {
                for (y, x) in (0..patch).flat_map(|y| (0..patch).map(move |x| (top + y, left + x))) {
                    for c in 0..channels {
                        expected.push(images[((b * channels + c) * height + y) * width + x]);
                    }
                }
            }
        }
        assert_eq!(got, expected);
    }

    #[test]
    fn normalised_patches_have_mean_zero_and_unbiased_variance_one() {
        let got = numbers(normalize_patches(tensor(values(2 * 3 * 12, 0.3), [2, 3, 12])));
        for patch in got.chunks(12) {
            let mean = patch.iter().sum::<f32>() / 12.0;
            let variance = patch.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 11.0;
            assert!(mean.abs() < 1e-6 && (variance - 1.0).abs() < 1e-4, "{mean} {variance}");
        }
    }

    #[test]
    fn a_flat_patch_becomes_zero() {
        assert!(numbers(normalize_patches(tensor(vec![0.25; 12], [1, 1, 12]))).iter().all(|&v| v == 0.0));
    }

    #[test]
    fn loss_and_gradient_agree_with_the_definition() {
        let (batch, patches, len) = (3, 4, 5);
        let (pred, target) = (values(batch * patches * len, 0.2), values(batch * patches * len, 0.8));
        let mask: Vec<f32> = (0..batch * patches).map(|i| f32::from(u8::from(i % 3 == 0))).collect();
        let leaf = tensor(pred.clone(), [batch, patches, len]).require_grad();
        let loss = reconstruction(
            leaf.clone(),
            tensor(target.clone(), [batch, patches, len]),
            tensor(mask.clone(), [batch, patches]),
        );
        let gradient = numbers(leaf.grad(&loss.backward()).unwrap());

        let error = |i: usize| f64::from(pred[i]) - f64::from(target[i]);
        let expected: f64 = (0..pred.len()).map(|i| error(i).powi(2) * f64::from(mask[i / len]) / len as f64).sum();
        assert!((f64::from(numbers(loss)[0]) - expected).abs() < 1e-5 * expected);
        for (i, &g) in gradient.iter().enumerate() {
            assert!((f64::from(g) - 2.0 * error(i) * f64::from(mask[i / len]) / len as f64).abs() < 1e-6);
        }
    }

    #[test]
    fn what_the_encoder_saw_costs_nothing() {
        let loss = reconstruction(
            tensor(values(24, 0.1), [1, 2, 12]),
            tensor(values(24, 0.5), [1, 2, 12]),
            tensor(vec![0.0; 2], [1, 2]),
        );
        assert_eq!(numbers(loss), [0.0]);
    }

    #[test]
    #[should_panic(expected = "don't tile")]
    fn patches_must_tile() {
        let _ = patchify(tensor(values(3 * 5 * 4, 0.0), [1, 3, 5, 4]), 4);
    }
}
