//! Pillow's `GaussianBlur`.

use image::RgbImage;

/// Passes of the box filter in each direction.
const PASSES: usize = 3;

/// Blurs as Pillow's `ImageFilter.GaussianBlur(radius)` does, to the bit: three box filters in each direction, of a width that is no whole number
/// so that their variances add up to `radius^2`, each rounded to 8 bits.
///
/// The filter of the code of MoCo, BYOL and DINO, which transform Pillow images. Gwosdek et al., "Theoretical Foundations of Gaussian Convolution
/// by Extended Box Filtering", equations 7, 11 and 14. A radius that is not positive leaves the image as it is; one above 10,000
/// counts as that.
pub fn box_blur(image: &mut RgbImage, radius: f64) {
    let (width, height) = (image.width() as usize, image.height() as usize);
    if radius.is_nan() || radius <= 0.0 || width == 0 || height == 0 {
        return;
    }
    let filter = BoxFilter::new(box_radius(radius.min(1e4) as f32));
    let mut line = vec![[0u8; 3]; width.max(height)];
    let (pixels, _) = image.as_chunks_mut::<3>();
    for row in pixels.chunks_exact_mut(width) {
        for _ in 0..PASSES {
            filter.apply(row, &mut line);
            row.copy_from_slice(&line[..width]);
        }
    }
    let mut column = vec![[0u8; 3]; height];
    for x in 0..width {
        for (value, pixel) in column.iter_mut().zip(pixels[x..].iter().step_by(width)) {
            *value = *pixel;
        }
        for _ in 0..PASSES {
            filter.apply(&column, &mut line);
            column.copy_from_slice(&line[..height]);
        }
        for (value, pixel) in column.iter().zip(pixels[x..].iter_mut().step_by(width)) {
            *pixel = *value;
        }
    }
}

/// Half the box's length beyond its middle, `l + alpha`, in Pillow's mix of `f32` and `f64`.
fn box_radius(sigma: f32) -> f32 {
    let variance = sigma * sigma / PASSES as f32;
    let length = (12.0 * f64::from(variance) + 1.0).sqrt() as f32;
    let whole = ((f64::from(length) - 1.0) / 2.0).floor() as f32;
    let part = (2.0 * whole + 1.0) * (whole * (whole + 1.0) - 3.0 * variance);
    whole + part / (6.0 * (variance - (whole + 1.0) * (whole + 1.0)))
}

/// A box of `2 radius + 1` pixels and a part of one more at each end, in 24-bit fixed point.
struct BoxFilter {
    radius: usize,
    /// Weight of a pixel.
    whole: u32,
    /// Weight of a pixel at an end.
    part: u32,
}

impl BoxFilter {
    fn new(radius: f32) -> Self {
        let whole = ((1u32 << 24) as f32 / (radius * 2.0 + 1.0)) as u32;
        let pixels = radius as u32;
        // the largest radius is bounded by the image below, the weights are not
        let part = ((1u32 << 24).saturating_sub((2 * pixels + 1).saturating_mul(whole))) / 2;
        Self { radius: pixels as usize, whole, part }
    }

    /// Filters a line whose border pixels go on for ever.
    fn apply(&self, from: &[[u8; 3]], to: &mut [[u8; 3]]) {
        let last = from.len() - 1;
        let ahead = |x: usize, by: usize| from[x.saturating_add(by).min(last)];
        let behind = |x: usize, by: usize| from[x.saturating_sub(by)];
        let mut sums = [0u32; 3];
        // of the box around the pixel before the first
        let inside = self.radius.min(from.len());
        for (channel, sum) in sums.iter_mut().enumerate() {
            let outside = u32::from(from[0][channel]) * (self.radius as u32 + 1)
                + u32::from(from[last][channel]) * (self.radius - inside) as u32;
            *sum = outside + from[..inside].iter().map(|pixel| u32::from(pixel[channel])).sum::<u32>();
        }
        for (x, to) in to.iter_mut().enumerate().take(from.len()) {
            let (enters, leaves) = (ahead(x, self.radius), behind(x, self.radius + 1));
            let (after, before) = (ahead(x, self.radius + 1), behind(x, self.radius + 1));
            for channel in 0..3 {
                sums[channel] = sums[channel] + u32::from(enters[channel]) - u32::from(leaves[channel]);
                let ends = u32::from(before[channel]) + u32::from(after[channel]);
                let value = sums[channel] * self.whole + ends * self.part;
                to[channel] = ((value + (1 << 23)) >> 24) as u8;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::test_images::noise;

    #[test]
    fn has_the_stated_variance() {
        for radius in [0.8, 1.0, 2.0, 3.7] {
            let mut image = RgbImage::from_fn(61, 1, |x, _| image::Rgb([if x == 30 { 255 } else { 0 }; 3]));
            box_blur(&mut image, radius);
            let values: Vec<f64> = image.pixels().map(|pixel| f64::from(pixel.0[0])).collect();
            let total: f64 = values.iter().sum();
            let variance =
                values.iter().enumerate().map(|(x, value)| (x as f64 - 30.0).powi(2) * value).sum::<f64>() / total;
            assert!((variance / (radius * radius) - 1.0).abs() < 0.12, "radius {radius}: variance {variance}");
        }
    }

    #[test]
    fn identities_and_ugly_inputs() {
        let image = noise(9, 4, 5);
        for radius in [0.0, -1.0, f64::NAN, 1e-9] {
            let mut blurred = image.clone();
            box_blur(&mut blurred, radius);
            assert_eq!(blurred, image, "{radius}");
        }
        for (width, height) in [(1, 1), (1, 40), (40, 1), (2, 2), (0, 0), (0, 4)] {
            for radius in [0.3, 2.0, 100.0] {
                let mut flat = RgbImage::from_pixel(width, height, image::Rgb([7, 100, 255]));
                box_blur(&mut flat, radius);
                assert!(flat.pixels().all(|p| p.0 == [7, 100, 255]), "{width} x {height}, {radius}");
            }
        }
    }
}
