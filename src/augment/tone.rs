//! Operations on the values of each channel alone: posterise, autocontrast, equalise.

use image::RgbImage;

use super::pixels::map_values;

/// Keeps the highest `bits` bits of every value (torchvision's and Pillow's `posterize` agree exactly); 8 or more leave the image as it is.
pub fn posterize(image: &mut RgbImage, bits: u32) {
    let mask = if bits >= 8 { 0xff } else { !(0xffu8 >> bits) };
    for value in image.iter_mut() {
        *value &= mask;
    }
}

/// Stretches each channel so that its smallest value becomes 0 and its largest 255; a channel of one value stays: torchvision's
/// `autocontrast` on 8-bit tensors, a quotient in `f32` whose fraction is dropped.
pub fn autocontrast(image: &mut RgbImage) {
    map_channels(image, |histogram| {
        let least = histogram.iter().position(|&count| count > 0)?;
        let most = histogram.iter().rposition(|&count| count > 0)?;
        if least == most {
            return None;
        }
        let scale = (most - least) as f32 * (1.0f32 / 255.0);
        Some(std::array::from_fn(|value| {
            (value.saturating_sub(least) as f32 / scale).clamp(0.0, 255.0) as u8 // values outside do not occur
        }))
    });
}

/// Equalises the histogram of each channel: torchvision's and Pillow's `equalize`, which agree exactly.
///
/// With `n` pixels of which `m` have the largest value, and `step = floor((n - m) / 255)`, value `v` becomes
/// `min(floor((pixels below v + floor(step / 2)) / step), 255)`; a channel whose step is 0 stays.
pub fn equalize(image: &mut RgbImage) {
    map_channels(image, |histogram| {
        let most = histogram.iter().rposition(|&count| count > 0)?;
        let step = histogram[..most].iter().sum::<u64>() / 255;
        if step == 0 {
            return None;
        }
        let mut below = 0;
        Some(std::array::from_fn(|value| {
            let level = ((below + step / 2) / step).min(255);
            below += histogram[value];
            level as u8
        }))
    });
}

/// Replaces the values of each channel by the table that its histogram gives, if it gives one.
fn map_channels(image: &mut RgbImage, table: impl Fn(&[u64; 256]) -> Option<[u8; 256]>) {
    let mut histograms = [[0u64; 256]; 3];
    for pixel in image.pixels() {
        for (histogram, &value) in histograms.iter_mut().zip(&pixel.0) {
            histogram[usize::from(value)] += 1;
        }
    }
    let tables = histograms.map(|histogram| table(&histogram));
    if let [Some(r), Some(g), Some(b)] = &tables
        && r == g
        && g == b
    {
        return map_values(image, r);
    }
    for pixel in image.pixels_mut() {
        for (value, table) in pixel.0.iter_mut().zip(&tables) {
            if let Some(table) = table {
                *value = table[usize::from(*value)];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::test_images::noise;

    fn changed(image: &RgbImage, change: impl Fn(&mut RgbImage)) -> RgbImage {
        let mut image = image.clone();
        change(&mut image);
        image
    }

    #[test]
    fn posterize_keeps_high_bits() {
        let image = noise(20, 9, 1);
        for bits in 0..10 {
            let kept = changed(&image, |i| posterize(i, bits));
            for (&kept, &given) in kept.iter().zip(image.iter()) {
                let unit = 1u32 << (8 - bits.min(8));
                assert_eq!(u32::from(kept), u32::from(given) / unit * unit, "{bits} bits of {given}");
            }
        }
    }

    #[test]
    fn autocontrast_reaches_from_end_to_end() {
        let image = RgbImage::from_fn(4, 1, |x, _| image::Rgb([100 + 10 * x as u8, 7, 255 * (x as u8 % 2)]));
        let stretched = changed(&image, autocontrast);
        assert_eq!(stretched.pixels().map(|p| p.0[0]).collect::<Vec<_>>(), [0, 84, 169, 254], "rounded down, as there");
        assert!(stretched.pixels().zip(image.pixels()).all(|(a, b)| a.0[1..] == b.0[1..]));
    }

    #[test]
    fn equalize_flattens_the_histogram() {
        // 64 x 64 pixels, dark: after it the mean is in the middle and the order of values is kept
        let image = RgbImage::from_fn(64, 64, |x, y| image::Rgb([((x * y) % 61) as u8; 3]));
        let flat = changed(&image, equalize);
        let mean = flat.iter().map(|&v| f64::from(v)).sum::<f64>() / flat.len() as f64;
        assert!((mean - 127.5).abs() < 8.0, "{mean}");
        let mut pairs: Vec<_> = image.iter().zip(flat.iter()).collect();
        pairs.sort_unstable();
        assert!(pairs.is_sorted_by_key(|(_, flat)| **flat));
    }

    #[test]
    fn ugly_images() {
        for (width, height) in [(0, 0), (0, 3), (1, 1), (2, 1)] {
            let image = noise(width, height, 2);
            assert_eq!(changed(&image, equalize), image, "too few pixels for a step");
            changed(&image, autocontrast);
        }
        let flat = RgbImage::from_pixel(50, 50, image::Rgb([3, 200, 0]));
        assert_eq!(changed(&flat, equalize), flat);
        assert_eq!(changed(&flat, autocontrast), flat);
    }
}
