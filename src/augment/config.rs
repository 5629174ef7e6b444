//! The `[[views]]` tables of a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One group of views: `count` crops of `size` pixels, each transformed in the order of the fields below
/// (crop, flip, jitter, grayscale, blur, solarize), the order of SimCLR, BYOL and DINO's code.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ViewConfig {
    /// Views of this kind an image is turned into.
    #[serde(default = "one")]
    pub count: usize,
    /// Height and width in pixels.
    pub size: u32,
    /// Random resized crop; without it the image is resized (shorter side) and centre-cropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crop: Option<CropConfig>,
    /// Probability of a horizontal flip.
    #[serde(default)]
    pub flip: f64,
    /// Colour jitter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jitter: Option<JitterConfig>,
    /// Probability of conversion to grey.
    #[serde(default)]
    pub grayscale: f64,
    /// Gaussian blur.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blur: Option<BlurConfig>,
    /// Solarisation: inverts values at or above the threshold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub solarize: Option<SolarizeConfig>,
}

/// Random resized crop, torchvision's `RandomResizedCrop`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CropConfig {
    /// Range of the crop's area as a fraction of the image's.
    #[serde(default = "crop_scale")]
    pub scale: [f64; 2],
    /// Range of width / height, drawn log-uniformly.
    #[serde(default = "crop_ratio")]
    pub ratio: [f64; 2],
    /// Resampling filter.
    #[serde(default)]
    pub interpolation: Interpolation,
}

/// Resampling filter (antialiased when shrinking, as Pillow).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Interpolation {
    /// Triangle filter.
    Bilinear,
    /// Catmull-Rom filter (a = -0.5, Pillow's).
    #[default]
    Bicubic,
}

/// Colour jitter, torchvision's `ColorJitter` inside `RandomApply`: the four operations in random order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JitterConfig {
    /// Probability of jittering at all.
    #[serde(default = "jitter_prob")]
    pub prob: f64,
    /// Factor drawn from `[max(0, 1 - b), 1 + b]`.
    pub brightness: f64,
    /// Factor drawn from `[max(0, 1 - c), 1 + c]`.
    pub contrast: f64,
    /// Factor drawn from `[max(0, 1 - s), 1 + s]`.
    pub saturation: f64,
    /// Shift drawn from `[-h, h]`, in turns; at most 0.5.
    pub hue: f64,
}

/// Gaussian blur with a drawn standard deviation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlurConfig {
    /// Probability of blurring.
    pub prob: f64,
    /// Range of the standard deviation in pixels.
    #[serde(default = "blur_sigma")]
    pub sigma: [f64; 2],
    /// Kernel size in pixels, odd; default: a tenth of the view, made odd, at least 3 (SimCLR).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<u32>,
}

/// Solarisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SolarizeConfig {
    /// Probability of solarising.
    pub prob: f64,
    /// Values at or above are inverted.
    #[serde(default = "solarize_threshold")]
    pub threshold: u8,
}

fn one() -> usize {
    1
}

fn crop_scale() -> [f64; 2] {
    [0.08, 1.0]
}

fn crop_ratio() -> [f64; 2] {
    [3.0 / 4.0, 4.0 / 3.0]
}

fn jitter_prob() -> f64 {
    0.8
}

fn blur_sigma() -> [f64; 2] {
    [0.1, 2.0]
}

fn solarize_threshold() -> u8 {
    128
}
