//! Sharpness.

use image::RgbImage;

use super::pixels::{floor_to_u8, round_to_u8};

/// Blends with a smoothed image: `factor * value + (1 - factor) * smooth`, where `smooth` is the mean of the 3 x 3 pixels around with the weights
/// 1 and, in the middle, 5, rounded to 8 bits. Border pixels stay. 0 smooths, 1 changes nothing, 2 sharpens; a negative factor counts as zero.
///
/// torchvision's `adjust_sharpness` on 8-bit tensors: the blend in `f32`, clamped, its fraction dropped.
pub fn adjust_sharpness(image: &mut RgbImage, factor: f64) {
    let away = (1.0 - factor.max(0.0)) as f32;
    let (width, height) = (image.width() as usize, image.height() as usize);
    if width <= 2 || height <= 2 {
        return;
    }
    let line = 3 * width;
    let source = image.as_raw().clone();
    for y in 1..height - 1 {
        let rows = [y - 1, y, y + 1].map(|y| &source[y * line..(y + 1) * line]);
        for at in 3..line - 3 {
            let value = rows[1][at];
            let around: u16 =
                rows.iter().map(|row| u16::from(row[at - 3]) + u16::from(row[at]) + u16::from(row[at + 3])).sum();
            let smooth = f32::from(round_to_u8(f32::from(around + 4 * u16::from(value)) / 13.0));
            let value = f32::from(value);
            image.as_flat_samples_mut().samples[y * line + at] =
                floor_to_u8((smooth - value).mul_add(away, value).clamp(0.0, 255.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::test_images::noise;

    fn with(factor: f64, image: &RgbImage) -> RgbImage {
        let mut image = image.clone();
        adjust_sharpness(&mut image, factor);
        image
    }

    #[test]
    fn one_changes_nothing_and_more_is_further_from_smooth() {
        let image = noise(17, 11, 4);
        assert_eq!(with(1.0, &image), image);
        assert_eq!(with(-3.0, &image), with(0.0, &image));
        assert_eq!(with(f64::NAN, &image), with(0.0, &image));
        let contrast = |image: &RgbImage| image.iter().map(|&v| (f64::from(v) - 127.5).powi(2)).sum::<f64>();
        assert!(contrast(&with(0.0, &image)) < contrast(&image) && contrast(&image) < contrast(&with(2.0, &image)));
    }

    #[test]
    fn borders_and_small_images_stay() {
        let image = noise(9, 7, 5);
        let smooth = with(0.0, &image);
        for (x, y, pixel) in smooth.enumerate_pixels() {
            assert_eq!(pixel == image.get_pixel(x, y), x == 0 || y == 0 || x == 8 || y == 6, "{x} {y}");
        }
        for (width, height) in [(0, 0), (1, 9), (2, 9), (9, 2)] {
            let image = noise(width, height, 1);
            assert_eq!(with(0.0, &image), image);
        }
    }
}
