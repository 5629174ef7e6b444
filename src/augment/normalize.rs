//! From pixels to what a network reads.

use image::RgbImage;

/// Mean of the channels of ImageNet, for values in `[0, 1]` (torchvision's model documentation).
pub const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
/// Standard deviation of the channels of ImageNet, for values in `[0, 1]` (torchvision's model documentation).
pub const IMAGENET_STD: [f32; 3] = [0.229, 0.224, 0.225];

/// Writes `(value / 255 - mean) / std`, channel by channel (CHW), into `out`.
///
/// Bitwise torchvision's `to_dtype(scale=True)` followed by `normalize`: all in `f32`, multiplied by the rounded 1/255. A zero in `std`
/// gives infinities, as the division does.
///
/// # Panics
/// When `out` does not have `3 * width * height` elements.
pub fn normalize_into(image: &RgbImage, mean: [f32; 3], std: [f32; 3], out: &mut [f32]) {
    let num_pixels = image.width() as usize * image.height() as usize;
    assert_eq!(out.len(), 3 * num_pixels, "`out` holds all channels of a {} x {} image", image.width(), image.height());
    if num_pixels == 0 {
        return;
    }
    let mut tables = [[0.0; 256]; 3];
    for ((table, mean), std) in tables.iter_mut().zip(mean).zip(std) {
        for (value, entry) in (0..=255u8).zip(table) {
            *entry = (f32::from(value) * (1.0 / 255.0) - mean) / std;
        }
    }
    let (red, rest) = out.split_at_mut(num_pixels);
    let (green, blue) = rest.split_at_mut(num_pixels);
    let (pixels, _) = image.as_chunks::<3>();
    for (((pixel, red), green), blue) in pixels.iter().zip(red).zip(green).zip(blue) {
        *red = tables[0][usize::from(pixel[0])];
        *green = tables[1][usize::from(pixel[1])];
        *blue = tables[2][usize::from(pixel[2])];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::test_images::noise;

    #[test]
    fn channels_are_separated_and_scaled() {
        let image = noise(5, 3, 2);
        let mut out = vec![f32::NAN; 45];
        normalize_into(&image, IMAGENET_MEAN, IMAGENET_STD, &mut out);
        for (x, y, pixel) in image.enumerate_pixels() {
            for c in 0..3 {
                let expected = (f32::from(pixel.0[c]) / 255.0 - IMAGENET_MEAN[c]) / IMAGENET_STD[c];
                assert!((out[c * 15 + y as usize * 5 + x as usize] - expected).abs() < 1e-6);
            }
        }
    }

    #[test]
    #[should_panic(expected = "holds all channels")]
    fn a_buffer_of_another_size_is_refused() {
        normalize_into(&RgbImage::new(2, 2), IMAGENET_MEAN, IMAGENET_STD, &mut [0.0; 11]);
    }
}
