//! Gaussian blur.

use image::RgbImage;

use super::box_blur::box_blur;
use super::pixels::round_to_u8;
use super::{BlurConfig, BlurFilter};
use crate::rng::Stream;

/// A drawn blur.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Blur {
    /// Which filter.
    pub filter: BlurFilter,
    /// Side of the kernel in pixels, odd.
    pub kernel: u32,
    /// Standard deviation in pixels.
    pub sigma: f64,
}

impl Blur {
    /// Applies the blur.
    pub fn apply(self, image: &mut RgbImage) {
        match self.filter {
            BlurFilter::Gaussian => gaussian_blur(image, self.kernel, self.sigma),
            BlurFilter::Pillow => box_blur(image, self.sigma),
        }
    }
}

impl BlurConfig {
    /// Draws a blur for a view of `size` pixels, with probability `prob`; the standard deviation is uniform (SimCLR, appendix A).
    #[must_use]
    pub fn draw(&self, size: u32, stream: &mut Stream) -> Option<Blur> {
        let kernel = self.kernel.unwrap_or_else(|| default_kernel(size));
        stream.chance(self.prob).then(|| Blur {
            filter: self.filter,
            kernel,
            sigma: stream.uniform(self.sigma[0], self.sigma[1]),
        })
    }
}

/// A tenth of the view, made odd, at least 3 (SimCLR, appendix A: "kernel size is set to be 10% of the image height/width").
fn default_kernel(size: u32) -> u32 {
    ((size / 10) | 1).max(3)
}

/// Convolves with a normalised Gaussian cut to `kernel` x `kernel` pixels, reflecting at the borders without repeating the border pixel:
/// torchvision's `gaussian_blur` on 8-bit tensors, computed as two passes in `f32` and rounded half to even once.
///
/// Not Pillow's `GaussianBlur`, which is [`box_blur`]. Deviations: an even kernel is taken one larger; a kernel that reaches
/// beyond the mirror image (an error in torch) is reflected again; a standard deviation that is not positive leaves the image as it is.
pub fn gaussian_blur(image: &mut RgbImage, kernel: u32, sigma: f64) {
    let weights = half_kernel(kernel, sigma);
    let (width, height) = (image.width() as usize, image.height() as usize);
    if weights.len() < 2 || width == 0 || height == 0 {
        return;
    }
    let radius = weights.len() - 1;
    let row_len = 3 * width;
    let source = image.as_raw();
    let source_row = |y: usize| &source[y * row_len..(y + 1) * row_len];
    let mut output = vec![0u8; source.len()];
    let mut padded = vec![0f32; row_len + 6 * radius]; // a row after the vertical pass, with `radius` pixels on both sides
    let mut sums = vec![0f32; row_len];
    for (y, output_row) in output.chunks_exact_mut(row_len).enumerate() {
        let middle = &mut padded[3 * radius..][..row_len];
        for (sum, &value) in middle.iter_mut().zip(source_row(y)) {
            *sum = weights[0] * f32::from(value);
        }
        for (distance, &weight) in weights.iter().enumerate().skip(1) {
            let (above, below) = mirror(y, distance, height);
            for ((sum, &above), &below) in middle.iter_mut().zip(source_row(above)).zip(source_row(below)) {
                *sum += weight * f32::from(u16::from(above) + u16::from(below));
            }
        }
        for distance in 1..=radius {
            let (left, _) = mirror(0, distance, width);
            let (_, right) = mirror(width - 1, distance, width);
            for (to, from) in [(radius - distance, left), (radius + width - 1 + distance, right)] {
                let from = 3 * (radius + from);
                padded.copy_within(from..from + 3, 3 * to);
            }
        }
        for (sum, &value) in sums.iter_mut().zip(&padded[3 * radius..]) {
            *sum = weights[0] * value;
        }
        for (distance, &weight) in weights.iter().enumerate().skip(1) {
            let (left, right) = (&padded[3 * (radius - distance)..], &padded[3 * (radius + distance)..]);
            for ((sum, &left), &right) in sums.iter_mut().zip(left).zip(right) {
                *sum += weight * (left + right);
            }
        }
        for (value, &sum) in output_row.iter_mut().zip(&sums) {
            *value = round_to_u8(sum);
        }
    }
    image.copy_from_slice(&output);
}

/// Weights at distance 0, 1, ... from the centre. Those below a millionth (a four-thousandth of a level) are left out.
fn half_kernel(kernel: u32, sigma: f64) -> Vec<f32> {
    if sigma.is_nan() || sigma <= 0.0 {
        return vec![1.0];
    }
    let weights: Vec<f64> = (0..=kernel / 2).map(|x| (-0.5 * (f64::from(x) / sigma).powi(2)).exp()).collect();
    let sum = 2.0 * weights.iter().sum::<f64>() - weights[0];
    weights.into_iter().map(|w| (w / sum) as f32).take_while(|&w| w >= 1e-6).collect()
}

/// Indices of what is seen `distance` pixels before and after `at` in a row of `len` pixels between two mirrors, which stand at the centres
/// of the border pixels.
fn mirror(at: usize, distance: usize, len: usize) -> (usize, usize) {
    let period = 2 * (len - 1);
    if period == 0 {
        return (0, 0);
    }
    let fold = |position: usize| (position % period).min(period - position % period);
    (fold(at + period - distance % period), fold(at + distance))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::augment::test_images::noise;
    use crate::rng::Purpose;

    fn blur_by_definition(image: &RgbImage, kernel: u32, sigma: f64) -> Vec<f64> {
        let radius = i64::from(kernel / 2);
        let weight = |d: i64| (-0.5 * (d as f64 / sigma).powi(2)).exp();
        let norm: f64 = (-radius..=radius).map(weight).sum::<f64>().powi(2);
        let (width, height) = image.dimensions();
        let mut out = Vec::new();
        for (y, x, c) in (0..height).flat_map(|y| (0..width).flat_map(move |x| (0..3).map(move |c| (y, x, c)))) {
            let mut sum = 0.0;
            for (dy, dx) in (-radius..=radius).flat_map(|dy| (-radius..=radius).map(move |dx| (dy, dx))) {
                let seen = |at: u32, d: i64, len: u32| {
                    let (before, after) = mirror(at as usize, d.unsigned_abs() as usize, len as usize);
                    if d < 0 { before as u32 } else { after as u32 }
                };
                let value = image.get_pixel(seen(x, dx, width), seen(y, dy, height)).0[c];
                sum += weight(dy) * weight(dx) * f64::from(value);
            }
            out.push(sum / norm);
        }
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn agrees_with_the_definition(width in 1u32..12, height in 1u32..12, half in 0u32..8, sigma in 0.05..4.0f64) {
            let image = noise(width, height, u64::from(width * height));
            let mut blurred = image.clone();
            gaussian_blur(&mut blurred, 2 * half + 1, sigma);
            for (&got, expected) in blurred.iter().zip(blur_by_definition(&image, 2 * half + 1, sigma)) {
                prop_assert!((f64::from(got) - expected).abs() < 0.501, "{got} {expected}");
            }
        }
    }

    #[test]
    fn identities_and_ugly_inputs() {
        let image = noise(9, 4, 5);
        for (kernel, sigma) in [(0, 1.0), (1, 1.0), (23, 0.0), (23, -1.0), (23, f64::NAN), (3, 1e-3)] {
            let mut blurred = image.clone();
            gaussian_blur(&mut blurred, kernel, sigma);
            assert_eq!(blurred, image, "{kernel} {sigma}");
        }
        for (width, height) in [(1, 1), (1, 400), (400, 1), (2, 2), (0, 0), (0, 4)] {
            let mut flat = RgbImage::from_pixel(width, height, image::Rgb([7, 100, 255]));
            gaussian_blur(&mut flat, 101, 30.0);
            assert!(flat.pixels().all(|p| p.0 == [7, 100, 255]), "{width} x {height}");
        }
    }

    #[test]
    fn mirrors() {
        assert_eq!([1, 2, 3, 4, 5, 6].map(|d| mirror(0, d, 3)), [(1, 1), (2, 2), (1, 1), (0, 0), (1, 1), (2, 2)]);
        assert_eq!([1, 2, 3].map(|d| mirror(1, d, 4)), [(0, 2), (1, 3), (2, 2)]);
        assert_eq!(mirror(0, 5, 1), (0, 0));
    }

    #[test]
    fn draws_have_the_stated_ranges_and_frequencies() {
        let config = BlurConfig { prob: 0.3, sigma: [0.1, 2.0], filter: BlurFilter::Gaussian, kernel: None };
        let draws: Vec<_> =
            (0..4000).filter_map(|i| config.draw(224, &mut Stream::new(1, Purpose::Augment, &[i]))).collect();
        assert!((draws.len() as f64 / 4000.0 - 0.3).abs() < 0.03);
        assert!(draws.iter().all(|b| b.kernel == 23 && (0.1..2.0).contains(&b.sigma)));
        assert_eq!([24, 32, 96, 100, 224, 256].map(default_kernel), [3, 3, 9, 11, 23, 25]);
    }
}
