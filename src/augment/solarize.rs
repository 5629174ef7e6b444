//! Solarisation.

use image::RgbImage;

/// Inverts the values at or above `threshold` (torchvision's and Pillow's `solarize` agree exactly).
pub fn solarize(image: &mut RgbImage, threshold: u8) {
    for value in image.iter_mut() {
        *value = if *value >= threshold { 255 - *value } else { *value };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_from_the_threshold_on_are_inverted() {
        let every_value = || RgbImage::from_fn(256, 1, |x, _| image::Rgb([x as u8; 3]));
        for threshold in [0, 1, 128, 255] {
            let mut image = every_value();
            solarize(&mut image, threshold);
            let expected = |v: u8| if v < threshold { v } else { 255 - v };
            assert!(image.pixels().zip(every_value().pixels()).all(|(got, given)| got.0[0] == expected(given.0[0])));
        }
    }
}
