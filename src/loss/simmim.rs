//! `SimMIM`: absolute error of the masked pixels.
//!
//! Xie, Zhang, Cao, Lin, Bao, Yao, Dai, Hu, 2021, <https://arxiv.org/abs/2111.09886>, section 3.4, as in the released code:
//! `sum(|x - rec| * mask) / (masked pixels + 1e-5) / channels`.

use burn::tensor::Tensor;

use super::reduce::total;

/// Added to the number of masked pixels, as in the released code.
const EPSILON: f64 = 1e-5;

/// Returns the absolute error summed over the masked pixels and their channels; divide by [`simmim_count`] of the global batch.
///
/// # Shapes
/// - `images`, `reconstruction`: `[b, c, h, w]`
/// - `mask`: `[b, h / patch, w / patch]`, 1 for a masked patch.
/// - output: `[1]`
///
/// # Panics
/// If the shapes don't fit.
#[must_use]
pub fn simmim(images: Tensor<4>, reconstruction: Tensor<4>, mask: Tensor<3>) -> Tensor<1> {
    let [batch, channels, height, width] = images.dims();
    assert_eq!(reconstruction.dims(), [batch, channels, height, width], "one reconstruction an image");
    let [masks, rows, columns] = mask.dims();
    assert!(
        masks == batch && height.is_multiple_of(rows) && width.is_multiple_of(columns),
        "masks of {rows} x {columns} patches don't fit images of {height} x {width}"
    );
    let error =
        (images - reconstruction).abs().reshape([batch, channels, rows, height / rows, columns, width / columns]);
    total(error * mask.reshape([batch, 1, rows, 1, columns, 1]))
}

/// Returns what the sum of [`simmim`] is divided by: `(masked pixels + 1e-5) * channels`.
#[must_use]
pub fn simmim_count(masked_patches: f64, patch: usize, channels: usize) -> f64 {
    (masked_patches * (patch * patch) as f64 + EPSILON) * channels as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, tensor, values};

    #[test]
    fn agrees_with_the_definition() {
        let (batch, channels, height, width, patch) = (2, 3, 4, 6, 2);
        let shape = [batch, channels, height, width];
        let images = values(shape.iter().product(), 0.7);
        let mask: Vec<f64> = (0..batch * 6).map(|i| f64::from(u8::from(i % 3 == 0))).collect();
        let naive = |x: &[Vec<f64>]| {
            let masked = |i: usize| {
                let (b, y, x) = (i / (channels * height * width), i / width % height, i % width);
                mask[(b * 2 + y / patch) * 3 + x / patch]
            };
            (0..images.len()).map(|i| (x[0][i] - images[i]).abs() * masked(i)).sum()
        };
        let loss = |x: Vec<Tensor<4>>| simmim(tensor(&images, shape), x[0].clone(), tensor(&mask, [batch, 2, 3]));
        agrees(&[(values(images.len(), 0.2), shape)], loss, naive);
    }

    #[test]
    fn nothing_masked_and_nothing_wrong_stay_finite() {
        for mask in [0.0, 1.0] {
            let loss = finite(&[(vec![0.5; 16], [1, 1, 4, 4])], |x| {
                simmim(x[0].clone(), x[0].clone(), tensor(&[mask; 4], [1, 2, 2])) / simmim_count(4.0 * mask, 2, 1)
            });
            assert_eq!(loss, 0.0);
        }
    }
}
