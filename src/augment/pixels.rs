//! Loops over pixels that the compiler turns into vector instructions.
//!
//! Interleaved channels do not vectorise without gather instructions, so a block of pixels is split into one array a channel, worked on,
//! and joined. Nothing here depends on the instruction set: `f32` operations are single IEEE operations in a fixed order.

use image::RgbImage;

/// Pixels worked on at a time; a multiple of every vector width.
pub(super) const BLOCK: usize = 64;

/// One channel of a block.
pub(super) type Channel = [u8; BLOCK];

/// Calls `change` on every block of pixels, split by channel. The last block is filled up with black.
#[inline]
pub(super) fn for_each_block(image: &mut RgbImage, change: impl Fn(&mut Channel, &mut Channel, &mut Channel)) {
    let (pixels, _) = image.as_chunks_mut::<3>();
    let (blocks, rest) = pixels.as_chunks_mut::<BLOCK>();
    let work = |block: &mut [[u8; 3]; BLOCK]| {
        let (mut r, mut g, mut b) = ([0; BLOCK], [0; BLOCK], [0; BLOCK]);
        for (i, pixel) in block.iter().enumerate() {
            [r[i], g[i], b[i]] = *pixel;
        }
        change(&mut r, &mut g, &mut b);
        for (i, pixel) in block.iter_mut().enumerate() {
            *pixel = [r[i], g[i], b[i]];
        }
    };
    blocks.iter_mut().for_each(work);
    if !rest.is_empty() {
        let mut block = [[0; 3]; BLOCK];
        block[..rest.len()].copy_from_slice(rest);
        work(&mut block);
        rest.copy_from_slice(&block[..rest.len()]);
    }
}

/// Replaces every value by its entry in a table.
pub(super) fn map_values(image: &mut RgbImage, table: &[u8; 256]) {
    for value in image.iter_mut() {
        *value = table[usize::from(*value)];
    }
}

/// Adding this number to a small one leaves the latter, rounded half to even, in the low bits.
const ROUNDER: f32 = 12_582_912.0; // 1.5 * 2^23

/// Rounds half to even (torch's `round`); `value` must be within `[-0.5, 255.5)`.
#[inline]
pub(super) fn round_to_u8(value: f32) -> u8 {
    (value + ROUNDER).to_bits() as u8
}

/// Drops the fraction (torch's conversion to `uint8`); `value` must be within `[0, 256)`.
#[inline]
pub(super) fn floor_to_u8(value: f32) -> u8 {
    let biased = value + ROUNDER;
    let above = u32::from(biased - ROUNDER > value);
    biased.to_bits().wrapping_sub(above) as u8
}

/// Luma as torchvision computes it from 8 bits, `floor(0.2989 r + 0.587 g + 0.114 b)`, as a whole number.
///
/// Exact decimal arithmetic: every step up to the quotient is a whole number below 2^24, and the quotient is at least 1e-4 away from
/// the next whole number unless it is one. Torch's rounded products give another result for 3 of the 16.8 million colours.
#[inline]
pub(super) fn luma(r: u8, g: u8, b: u8) -> f32 {
    let sum = f32::from(r) * 2989.0 + f32::from(g) * 5870.0 + f32::from(b) * 1140.0;
    f32::from(floor_to_u8(sum / 10_000.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn luma_is_the_floor_of_the_exact_sum() {
        for (r, g, b) in
            (0..=255u8).flat_map(|r| (0..=255u8).flat_map(move |g| [(r, g, r), (g, r, 255 - g), (r, 10, g)]))
        {
            let exact = (2989 * u32::from(r) + 5870 * u32::from(g) + 1140 * u32::from(b)) / 10_000;
            assert_eq!(luma(r, g, b), exact as f32, "{r} {g} {b}");
        }
    }

    #[test]
    fn rounding_and_flooring() {
        for (value, rounded, floored) in
            [(0.0, 0, 0), (0.5, 0, 0), (1.5, 2, 1), (2.5, 2, 2), (254.999, 255, 254), (255.0, 255, 255)]
        {
            assert_eq!((round_to_u8(value), floor_to_u8(value)), (rounded, floored), "{value}");
        }
        assert_eq!(floor_to_u8(255.998), 255);
    }

    #[test]
    fn blocks_cover_every_pixel_once() {
        for pixels in [0u32, 1, 63, 64, 65, 200] {
            let mut image = RgbImage::from_fn(pixels, 1, |x, _| image::Rgb([x as u8, 1, 2]));
            for_each_block(&mut image, |r, g, b| {
                for i in 0..BLOCK {
                    (r[i], g[i], b[i]) = (r[i].wrapping_add(1), b[i], g[i]);
                }
            });
            assert_eq!(image, RgbImage::from_fn(pixels, 1, |x, _| image::Rgb([x as u8 + 1, 2, 1])));
        }
    }
}
