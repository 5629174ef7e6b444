//! Conversion to grey.

use image::RgbImage;

use super::pixels::{BLOCK, for_each_block, luma};

/// Replaces every colour by its luma in all three channels: torchvision's `rgb_to_grayscale` on 8-bit tensors, which drops the
/// fraction. (Pillow uses the weights 0.299, 0.587, 0.114 and rounds; the two differ by at most one level.)
pub fn grayscale(image: &mut RgbImage) {
    for_each_block(image, |r, g, b| {
        for i in 0..BLOCK {
            let grey = luma(r[i], g[i], b[i]) as u8;
            (r[i], g[i], b[i]) = (grey, grey, grey);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::Rgb;

    #[test]
    fn primary_colours() {
        let mut image = RgbImage::from_fn(5, 1, |x, _| {
            [Rgb([255, 0, 0]), Rgb([0, 255, 0]), Rgb([0, 0, 255]), Rgb([255; 3]), Rgb([0; 3])][x as usize]
        });
        grayscale(&mut image);
        // white: 0.9999 * 255 = 254.97, as in torchvision
        assert_eq!(image.pixels().map(|p| p.0).collect::<Vec<_>>(), [[76; 3], [149; 3], [29; 3], [254; 3], [0; 3]]);
    }
}
