//! RandAugment.

use image::RgbImage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::affine::{Affine, Sampling, affine, rotate};
use super::color::{adjust_brightness, adjust_contrast, adjust_saturation};
use super::sharpness::adjust_sharpness;
use super::solarize::solarize;
use super::tone::{autocontrast, equalize, posterize};
use crate::rng::Stream;

/// RandAugment, torchvision's `RandAugment`: some of 14 operations, drawn with replacement, all at one strength, in either direction.
///
/// Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", <https://arxiv.org/abs/1909.13719>. Nearest pixels and
/// black borders, as torchvision's default. timm's variant (`rand-m9-mstd0.5-inc1`) draws each strength anew.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RandAugmentConfig {
    /// Operations of an image, the paper's N.
    #[serde(default = "num_ops")]
    pub num_ops: u32,
    /// Strength, the paper's M: one of `num_magnitude_bins` steps from 0.
    #[serde(default = "magnitude")]
    pub magnitude: u32,
    /// Steps of the strength, 31 in the paper.
    #[serde(default = "num_magnitude_bins")]
    pub num_magnitude_bins: u32,
}

fn num_ops() -> u32 {
    2
}

fn magnitude() -> u32 {
    9
}

fn num_magnitude_bins() -> u32 {
    31
}

/// One operation and its drawn strength.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RandomOp {
    /// Nothing.
    Identity,
    /// Shear along x by this many pixels a row, about the upper left corner.
    ShearX(f64),
    /// Shear along y by this many pixels a column, about the upper left corner.
    ShearY(f64),
    /// Shift to the right by this part of the width.
    TranslateX(f64),
    /// Shift down by this part of the height.
    TranslateY(f64),
    /// [`rotate`] by this many degrees.
    Rotate(f64),
    /// [`adjust_brightness`] by this factor.
    Brightness(f64),
    /// [`adjust_saturation`] by this factor.
    Color(f64),
    /// [`adjust_contrast`] by this factor.
    Contrast(f64),
    /// [`adjust_sharpness`] by this factor.
    Sharpness(f64),
    /// [`posterize`] to this many bits.
    Posterize(u32),
    /// [`solarize`] from this part of the largest value on.
    Solarize(f64),
    /// [`autocontrast`].
    AutoContrast,
    /// [`equalize`].
    Equalize,
}

impl RandAugmentConfig {
    /// Draws the operations in their order.
    #[must_use]
    pub fn draw(&self, stream: &mut Stream) -> Vec<RandomOp> {
        (0..self.num_ops).map(|_| self.draw_one(stream)).collect()
    }

    fn draw_one(&self, stream: &mut Stream) -> RandomOp {
        let strength = f64::from(self.magnitude) / f64::from(self.num_magnitude_bins.saturating_sub(1).max(1));
        let which = stream.below(14);
        let sign = if stream.chance(0.5) { -1.0 } else { 1.0 };
        let signed = |most: f64| sign * most * strength;
        match which {
            0 => RandomOp::Identity,
            1 => RandomOp::ShearX(signed(0.3)),
            2 => RandomOp::ShearY(signed(0.3)),
            3 => RandomOp::TranslateX(signed(150.0 / 331.0)),
            4 => RandomOp::TranslateY(signed(150.0 / 331.0)),
            5 => RandomOp::Rotate(signed(30.0)),
            6 => RandomOp::Brightness(1.0 + signed(0.9)),
            7 => RandomOp::Color(1.0 + signed(0.9)),
            8 => RandomOp::Contrast(1.0 + signed(0.9)),
            9 => RandomOp::Sharpness(1.0 + signed(0.9)),
            10 => RandomOp::Posterize(8 - (4.0 * strength).round_ties_even() as u32),
            11 => RandomOp::Solarize(1.0 - strength),
            12 => RandomOp::AutoContrast,
            _ => RandomOp::Equalize,
        }
    }
}

impl RandomOp {
    /// Applies the operation.
    pub fn apply(self, image: &mut RgbImage) {
        let shear = |x: f64, y: f64| Affine {
            shear: [x, y].map(|slope| slope.atan().to_degrees()),
            center: Some([0.0; 2]),
            ..Affine::IDENTITY
        };
        // whole pixels, towards zero
        let shift = |x: f64, y: f64| Affine {
            translate: [(x * f64::from(image.width())).trunc(), (y * f64::from(image.height())).trunc()],
            ..Affine::IDENTITY
        };
        match self {
            Self::Identity => {}
            Self::ShearX(slope) => *image = affine(image, &shear(slope, 0.0), Sampling::Nearest),
            Self::ShearY(slope) => *image = affine(image, &shear(0.0, slope), Sampling::Nearest),
            Self::TranslateX(part) => *image = affine(image, &shift(part, 0.0), Sampling::Nearest),
            Self::TranslateY(part) => *image = affine(image, &shift(0.0, part), Sampling::Nearest),
            Self::Rotate(degrees) => *image = rotate(image, degrees, Sampling::Nearest),
            Self::Brightness(factor) => adjust_brightness(image, factor),
            Self::Color(factor) => adjust_saturation(image, factor),
            Self::Contrast(factor) => adjust_contrast(image, factor),
            Self::Sharpness(factor) => adjust_sharpness(image, factor),
            Self::Posterize(bits) => posterize(image, bits),
            // torchvision compares with 255 times the part, which need not be whole
            Self::Solarize(part) => solarize(image, (255.0 * part).ceil().clamp(0.0, 255.0) as u8),
            Self::AutoContrast => autocontrast(image),
            Self::Equalize => equalize(image),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::test_images::noise;
    use crate::rng::Purpose;

    fn draws(config: &RandAugmentConfig, count: u64) -> Vec<RandomOp> {
        (0..count).flat_map(|i| config.draw(&mut Stream::new(1, Purpose::Augment, &[i]))).collect()
    }

    #[test]
    fn all_operations_are_as_frequent_and_go_both_ways() {
        let ops = draws(&RandAugmentConfig { num_ops: 2, magnitude: 9, num_magnitude_bins: 31 }, 14_000);
        assert_eq!(ops.len(), 28_000);
        for kind in 0..14u8 {
            let of_kind: Vec<_> = ops.iter().filter(|op| number(op) == kind).collect();
            assert!((of_kind.len() as f64 / 2000.0 - 1.0).abs() < 0.1, "{kind}: {}", of_kind.len());
        }
        // torchvision's magnitudes at 9 of 31 bins
        let rotations: Vec<f64> =
            ops.iter().filter_map(|op| if let RandomOp::Rotate(d) = op { Some(*d) } else { None }).collect();
        assert!(rotations.iter().all(|degrees| (degrees.abs() - 9.0).abs() < 1e-9));
        assert!((rotations.iter().sum::<f64>() / rotations.len() as f64).abs() < 0.7);
        for op in ops {
            match op {
                RandomOp::Posterize(bits) => assert_eq!(bits, 7), // 8 - round(9 / 7.5)
                RandomOp::Solarize(part) => assert!((part - 0.7).abs() < 1e-9),
                RandomOp::Color(factor) => assert!(((factor - 1.0).abs() - 0.27).abs() < 1e-9),
                RandomOp::TranslateX(part) => assert!((part.abs() - 45.0 / 331.0).abs() < 1e-9),
                _ => {}
            }
        }
    }

    fn number(op: &RandomOp) -> u8 {
        match op {
            RandomOp::Identity => 0,
            RandomOp::ShearX(_) => 1,
            RandomOp::ShearY(_) => 2,
            RandomOp::TranslateX(_) => 3,
            RandomOp::TranslateY(_) => 4,
            RandomOp::Rotate(_) => 5,
            RandomOp::Brightness(_) => 6,
            RandomOp::Color(_) => 7,
            RandomOp::Contrast(_) => 8,
            RandomOp::Sharpness(_) => 9,
            RandomOp::Posterize(_) => 10,
            RandomOp::Solarize(_) => 11,
            RandomOp::AutoContrast => 12,
            RandomOp::Equalize => 13,
        }
    }

    #[test]
    fn no_strength_changes_nothing_but_the_operations_without_one() {
        let image = noise(14, 9, 2);
        for op in draws(&RandAugmentConfig { num_ops: 1, magnitude: 0, num_magnitude_bins: 31 }, 500) {
            let mut changed = image.clone();
            op.apply(&mut changed);
            let free = matches!(op, RandomOp::AutoContrast | RandomOp::Equalize);
            // solarising from 255 on turns white to black
            let white = matches!(op, RandomOp::Solarize(_)) && image.contains(&255);
            assert!(changed == image || free || white, "{op:?}");
        }
    }

    #[test]
    fn ugly_images() {
        for op in draws(&RandAugmentConfig { num_ops: 1, magnitude: 30, num_magnitude_bins: 31 }, 300) {
            for (width, height) in [(0, 0), (0, 3), (1, 1), (2, 700)] {
                let mut image = noise(width, height, 1);
                op.apply(&mut image);
                assert_eq!(image.dimensions(), (width, height));
            }
        }
    }
}
