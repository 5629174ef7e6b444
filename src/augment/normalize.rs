//! From pixels to what a network reads.

use image::RgbImage;

/// Mean of the channels of ImageNet, for values in `[0, 1]` (torchvision's model documentation).
pub const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
/// Standard deviation of the channels of ImageNet, for values in `[0, 1]` (torchvision's model documentation).
pub const IMAGENET_STD: [f32; 3] = [0.229, 0.224, 0.225];

/// Pixel values 0 to 255 to `(value / 255 - mean) / std`, from a table for each channel.
///
/// Bitwise torchvision's `to_dtype(scale=True)` followed by `normalize`: all in `f32`, multiplied by the rounded 1/255.
#[derive(Clone)]
pub struct Normalize {
    tables: Box<[[f32; 256]; 3]>,
}

impl Normalize {
    /// Makes the tables. A zero in `std` gives infinities, as the division does.
    #[must_use]
    pub fn new(mean: [f32; 3], std: [f32; 3]) -> Self {
        let entry = |value: usize, channel: usize| (value as f32 * (1.0 / 255.0) - mean[channel]) / std[channel];
        let table = |channel| std::array::from_fn(|value| entry(value, channel));
        Self { tables: Box::new(std::array::from_fn(table)) }
    }

    /// Writes the normalised pixels of an image.
    ///
    /// # Shapes
    /// `out` is `[3, height, width]`.
    ///
    /// # Panics
    /// When `out` has another length.
    pub fn write(&self, image: &RgbImage, out: &mut [f32]) {
        let plane = image.width() as usize * image.height() as usize;
        assert_eq!(out.len(), 3 * plane, "`out` holds all channels of a {} x {} image", image.width(), image.height());
        let (pixels, _) = image.as_chunks::<3>();
        for (channel, (table, out)) in self.tables.iter().zip(out.chunks_exact_mut(plane.max(1))).enumerate() {
            for (out, pixel) in out.iter_mut().zip(pixels) {
                *out = table[usize::from(pixel[channel])];
            }
        }
    }
}

impl std::fmt::Debug for Normalize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Normalize").finish_non_exhaustive()
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
        Normalize::new(IMAGENET_MEAN, IMAGENET_STD).write(&image, &mut out);
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
        Normalize::new(IMAGENET_MEAN, IMAGENET_STD).write(&RgbImage::new(2, 2), &mut [0.0; 11]);
    }
}
