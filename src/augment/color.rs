//! Colour jitter.
//!
//! Reference: torchvision's `transforms.v2.functional` on 8-bit tensors (its "tensor" back end): products in `f32`, clamped, the fraction
//! dropped. The Pillow back end differs by a level or two, and by up to fifteen for hue, which it quantises to 256 steps.

use image::RgbImage;

use super::JitterConfig;
use super::pixels::{BLOCK, floor_to_u8, for_each_block, luma, map_values};
use crate::rng::Stream;

/// One step of a colour jitter and its drawn factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ColorStep {
    /// [`adjust_brightness`] by this factor.
    Brightness(f64),
    /// [`adjust_contrast`] by this factor.
    Contrast(f64),
    /// [`adjust_saturation`] by this factor.
    Saturation(f64),
    /// [`adjust_hue`] by this many turns.
    Hue(f64),
}

impl ColorStep {
    /// Applies the step.
    pub fn apply(self, image: &mut RgbImage) {
        match self {
            Self::Brightness(factor) => adjust_brightness(image, factor),
            Self::Contrast(factor) => adjust_contrast(image, factor),
            Self::Saturation(factor) => adjust_saturation(image, factor),
            Self::Hue(turns) => adjust_hue(image, turns),
        }
    }
}

impl JitterConfig {
    /// Draws the steps in their order: torchvision's `ColorJitter` (a permutation of the four operations, each with a uniform
    /// factor) inside `RandomApply`; nothing with probability `1 - prob`. A strength of zero leaves its operation out.
    #[must_use]
    pub fn draw(&self, stream: &mut Stream) -> Vec<ColorStep> {
        if !stream.chance(self.prob) {
            return Vec::new();
        }
        let mut factor = |strength: f64| stream.uniform((1.0 - strength).max(0.0), 1.0 + strength);
        let mut steps = [
            (self.brightness, ColorStep::Brightness(factor(self.brightness))),
            (self.contrast, ColorStep::Contrast(factor(self.contrast))),
            (self.saturation, ColorStep::Saturation(factor(self.saturation))),
            (self.hue, ColorStep::Hue(stream.uniform(-self.hue, self.hue))),
        ];
        stream.shuffle(&mut steps);
        steps.into_iter().filter(|&(strength, _)| strength > 0.0).map(|(_, step)| step).collect()
    }
}

/// Multiplies all values by `factor`; a negative factor counts as zero.
pub fn adjust_brightness(image: &mut RgbImage, factor: f64) {
    blend_with_constant(image, factor, 0.0);
}

/// Blends with the mean luma: `factor * value + (1 - factor) * mean`; a negative factor counts as zero.
pub fn adjust_contrast(image: &mut RgbImage, factor: f64) {
    let (pixels, _) = image.as_chunks::<3>();
    if pixels.is_empty() {
        return;
    }
    // whole numbers, so that the order of summation does not matter
    let sum: u64 = pixels.iter().map(|&[r, g, b]| luma(r, g, b) as u64).sum();
    blend_with_constant(image, factor, (sum as f64 / pixels.len() as f64) as f32);
}

/// `trunc(clamp(value * factor + constant * (1 - factor)))` by table, with the fused multiply-add that torch's kernel uses.
fn blend_with_constant(image: &mut RgbImage, factor: f64, constant: f32) {
    let factor = factor.max(0.0);
    let mut table = [0; 256];
    for (value, entry) in (0..=255u8).zip(&mut table) {
        let scaled = f32::from(value) * factor as f32;
        *entry = constant.mul_add((1.0 - factor) as f32, scaled).clamp(0.0, 255.0) as u8;
    }
    map_values(image, &table);
}

/// Blends with the pixel's luma: `factor * value + (1 - factor) * luma`; a negative factor counts as zero.
pub fn adjust_saturation(image: &mut RgbImage, factor: f64) {
    let factor = factor.max(0.0);
    let (color, grey) = (factor as f32, (1.0 - factor) as f32);
    for_each_block(image, |r, g, b| {
        for i in 0..BLOCK {
            let luma = luma(r[i], g[i], b[i]) * grey;
            let blend = |value: u8| {
                let sum = f32::from(value) * color + luma;
                let sum = if sum < 0.0 { 0.0 } else { sum };
                floor_to_u8(if sum > 255.0 { 255.0 } else { sum })
            };
            (r[i], g[i], b[i]) = (blend(r[i]), blend(g[i]), blend(b[i]));
        }
    });
}

/// torchvision goes back from `[0, 1]` to 8 bits by `trunc(value * (256 - 0.001))` (`to_dtype`).
const TO_U8: f32 = 255.999 / 255.0;

/// Turns the hue by `turns` (1 is the whole circle) in HSV; other than finite numbers count as zero.
///
/// Written without division: with `c = max - min` and the hue in units of `c / 6`, a channel is `max - clamp(min(k, 4c - k), 0, c)` for
/// `k = (hue + n c) mod 6c`, `n` = 5, 3, 1 for red, green, blue. The reference's rounding of quotients moves a value by one level now and then.
pub fn adjust_hue(image: &mut RgbImage, turns: f64) {
    let shift = if turns.is_finite() { (6.0 * turns.rem_euclid(1.0)) as f32 } else { 0.0 };
    for_each_block(image, |red, green, blue| {
        for i in 0..BLOCK {
            let (r, g, b) = (f32::from(red[i]), f32::from(green[i]), f32::from(blue[i]));
            let max = greater(greater(r, g), b);
            let c = max - lesser(lesser(r, g), b);
            let hue = if max == r {
                g - b
            } else if max == g {
                2.0 * c + (b - r)
            } else {
                4.0 * c + (r - g)
            };
            let hue = if hue < 0.0 { hue + 6.0 * c } else { hue };
            let hue = wrap(hue + shift * c, 6.0 * c);
            let channel = |n: f32| {
                let k = wrap(hue + n * c, 6.0 * c);
                floor_to_u8((max - greater(lesser(lesser(k, 4.0 * c - k), c), 0.0)) * TO_U8)
            };
            (red[i], green[i], blue[i]) = (channel(5.0), channel(3.0), channel(1.0));
        }
    });
}

// `f32::max` and `min` care for NaN and so cost three instructions instead of one

#[inline]
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline]
fn lesser(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

#[inline]
fn wrap(value: f32, period: f32) -> f32 {
    if value >= period { value - period } else { value }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::augment::test_images::noise;
    use crate::rng::Purpose;

    fn config() -> JitterConfig {
        JitterConfig { prob: 0.8, brightness: 0.4, contrast: 0.3, saturation: 2.0, hue: 0.1 }
    }

    fn one(color: [u8; 3], change: impl Fn(&mut RgbImage)) -> [u8; 3] {
        let mut image = RgbImage::from_pixel(1, 1, image::Rgb(color));
        change(&mut image);
        image.get_pixel(0, 0).0
    }

    #[test]
    fn identities() {
        let image = noise(33, 29, 3);
        for step in [
            ColorStep::Brightness(1.0),
            ColorStep::Contrast(1.0),
            ColorStep::Saturation(1.0),
            ColorStep::Hue(0.0),
            ColorStep::Hue(1.0),
        ] {
            let mut changed = image.clone();
            step.apply(&mut changed);
            assert_eq!(changed, image, "{step:?}");
        }
    }

    #[test]
    fn extreme_factors() {
        assert_eq!(one([9, 200, 30], |i| adjust_brightness(i, 0.0)), [0; 3]);
        assert_eq!(one([9, 200, 30], |i| adjust_brightness(i, 1e30)), [255; 3]);
        assert_eq!(one([9, 200, 30], |i| adjust_brightness(i, f64::NAN)), [0; 3]);
        assert_eq!(one([9, 200, 30], |i| adjust_contrast(i, 0.0)), [123; 3]);
        assert_eq!(one([9, 200, 30], |i| adjust_saturation(i, 0.0)), [123; 3]);
        assert_eq!(one([9, 200, 30], |i| adjust_saturation(i, 1e30)), [0, 255, 0]);
        assert_eq!(one([9, 200, 30], |i| adjust_hue(i, f64::NAN)), [9, 200, 30]);
    }

    #[test]
    fn hue_turns_primary_colours() {
        assert_eq!(one([255, 0, 0], |i| adjust_hue(i, 1.0 / 3.0)), [0, 255, 0]);
        assert_eq!(one([255, 0, 0], |i| adjust_hue(i, -1.0 / 3.0)), [0, 0, 255]);
        assert_eq!(one([200, 100, 100], |i| adjust_hue(i, 0.5)), [100, 200, 200]);
        assert_eq!(one([77, 77, 77], |i| adjust_hue(i, 0.3)), [77; 3]);
    }

    #[test]
    fn draws_have_the_stated_ranges_and_frequencies() {
        let draws: Vec<_> = (0..4000).map(|i| config().draw(&mut Stream::new(1, Purpose::Augment, &[i]))).collect();
        let jittered: Vec<_> = draws.iter().filter(|steps| !steps.is_empty()).collect();
        assert!((jittered.len() as f64 / 4000.0 - 0.8).abs() < 0.03);
        let hue_first = jittered.iter().filter(|steps| matches!(steps[0], ColorStep::Hue(_))).count();
        assert!((hue_first as f64 / jittered.len() as f64 - 0.25).abs() < 0.03);
        for steps in jittered {
            assert_eq!(steps.len(), 4);
            assert!(steps.iter().all(|step| match *step {
                ColorStep::Brightness(f) => (0.6..1.4).contains(&f),
                ColorStep::Contrast(f) => (0.7..1.3).contains(&f),
                ColorStep::Saturation(f) => (0.0..3.0).contains(&f),
                ColorStep::Hue(turns) => (-0.1..0.1).contains(&turns),
            }));
        }
    }

    #[test]
    fn a_strength_of_zero_leaves_the_operation_out() {
        let config = JitterConfig { prob: 1.0, hue: 0.0, contrast: 0.0, ..config() };
        let steps = config.draw(&mut Stream::new(1, Purpose::Augment, &[]));
        assert_eq!(steps.len(), 2);
        assert!(steps.iter().all(|s| matches!(s, ColorStep::Brightness(_) | ColorStep::Saturation(_))));
    }

    /// The textbook conversion in double precision.
    fn hue_by_the_book(color: [u8; 3], turns: f64) -> [f64; 3] {
        let [r, g, b] = color.map(|v| f64::from(v) / 255.0);
        let (max, min) = (r.max(g).max(b), r.min(g).min(b));
        let c = max - min;
        let sextant = match c {
            0.0 => 0.0,
            _ if max == r => (g - b) / c,
            _ if max == g => 2.0 + (b - r) / c,
            _ => 4.0 + (r - g) / c,
        };
        let h = (sextant / 6.0 + turns).rem_euclid(1.0) * 6.0;
        let s = if max == 0.0 { 0.0 } else { c / max };
        let (i, f) = (h.floor(), h - h.floor());
        let (p, q, t) = (max * (1.0 - s), max * (1.0 - s * f), max * (1.0 - s * (1.0 - f)));
        match i as u32 % 6 {
            0 => [max, t, p],
            1 => [q, max, p],
            2 => [p, max, t],
            3 => [p, q, max],
            4 => [t, p, max],
            _ => [max, p, q],
        }
    }

    proptest! {
        #[test]
        fn hue_agrees_with_the_textbook(color: [u8; 3], turns in -0.5..0.5f64) {
            let got = one(color, |image| adjust_hue(image, turns));
            for (got, expected) in got.into_iter().zip(hue_by_the_book(color, turns)) {
                let expected = expected * 255.999;
                prop_assert!((f64::from(got) - expected.floor()).abs() <= 1.0, "{got} {expected}");
                prop_assert!(f64::from(got) - expected < 1e-3 && expected - f64::from(got) < 1.001, "{got} {expected}");
            }
        }
    }
}
