//! The `[[views]]` tables of a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::RandAugmentConfig;
use super::erase::EraseConfig;

/// One group of views: `count` crops of `size` pixels, each transformed in the order of the fields below
/// (crop, flip, RandAugment, jitter, grayscale, blur, solarize), the order of SimCLR, BYOL and DINO's code and of torchvision's recipes.
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
    /// RandAugment, as for training with labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rand_augment: Option<RandAugmentConfig>,
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
    /// Random erasing, after normalisation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub erase: Option<EraseConfig>,
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
    /// Which filter.
    #[serde(default)]
    pub filter: BlurFilter,
    /// Kernel size in pixels of `filter = "gaussian"`, odd; default: a tenth of the view, made odd, at least 3 (SimCLR).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<u32>,
}

/// What blurs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BlurFilter {
    /// A Gaussian cut to the kernel: torchvision's `gaussian_blur`, SimCLR's.
    #[default]
    Gaussian,
    /// Pillow's `GaussianBlur` with `sigma` as its radius: three box filters in each direction, what the code of MoCo, BYOL and DINO has.
    Pillow,
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

/// Largest view in pixels; a mistyped size would otherwise ask for all memory.
const MAX_SIZE: u32 = 4096;
/// Largest number of views of one table; a mistyped count would otherwise ask for all memory.
const MAX_COUNT: usize = 256;

impl ViewConfig {
    /// Checks all numbers; of the first that cannot be, returns the key (relative to the table) and what to do.
    ///
    /// # Errors
    /// `(key, message)`, for example `("crop.scale", "...")`.
    pub fn check(&self) -> Result<(), (String, String)> {
        require((1..=MAX_COUNT).contains(&self.count), "count", || {
            format!(
                "`count` is {}, the limits are 1 and {MAX_COUNT}; remove the table to have no such views",
                self.count
            )
        })?;
        require((1..=MAX_SIZE).contains(&self.size), "size", || {
            format!("`size` is {}, the limits are 1 and {MAX_SIZE} pixels; 224 is usual, 32 for CIFAR", self.size)
        })?;
        probability("flip", self.flip)?;
        probability("grayscale", self.grayscale)?;
        if let Some(crop) = &self.crop {
            let [low, high] = crop.scale;
            require(0.0 < low && low <= high && high <= 1.0, "crop.scale", || {
                format!(
                    "`scale` is [{low}, {high}], needs 0 < low <= high <= 1 (fractions of the area); write [0.08, 1.0]"
                )
            })?;
            let [low, high] = crop.ratio;
            require(0.01 <= low && low <= high && high <= 100.0, "crop.ratio", || {
                format!(
                    "`ratio` is [{low}, {high}], needs 0.01 <= low <= high <= 100 (width / height); write [0.75, 1.3333333333333333]"
                )
            })?;
        }
        if let Some(RandAugmentConfig { num_ops, magnitude, num_magnitude_bins: bins }) = self.rand_augment {
            require(num_ops <= 100, "rand_augment.num_ops", || {
                format!("`num_ops` is {num_ops}, the limits are 0 and 100; 2 is usual")
            })?;
            require((2..=1000).contains(&bins), "rand_augment.num_magnitude_bins", || {
                format!("`num_magnitude_bins` is {bins}, the limits are 2 and 1000; 31 is usual")
            })?;
            require(magnitude < bins, "rand_augment.magnitude", || {
                format!(
                    "`magnitude` is {magnitude}, the limits are 0 and {} (`num_magnitude_bins` - 1); 9 is usual",
                    bins - 1
                )
            })?;
        }
        if let Some(jitter) = &self.jitter {
            probability("jitter.prob", jitter.prob)?;
            let strengths =
                [("brightness", jitter.brightness), ("contrast", jitter.contrast), ("saturation", jitter.saturation)];
            for (name, strength) in strengths {
                require((0.0..=100.0).contains(&strength), &format!("jitter.{name}"), || {
                    format!("`{name}` is {strength}, the limits are 0 (off) and 100; 0.4 is usual")
                })?;
            }
            require((0.0..=0.5).contains(&jitter.hue), "jitter.hue", || {
                format!(
                    "`hue` is {}, the limits are 0 (off) and 0.5 (half a turn either way is every hue); 0.1 is usual",
                    jitter.hue
                )
            })?;
        }
        if let Some(blur) = &self.blur {
            probability("blur.prob", blur.prob)?;
            let [low, high] = blur.sigma;
            require(0.0 < low && low <= high && high <= 100.0, "blur.sigma", || {
                format!("`sigma` is [{low}, {high}], needs 0 < low <= high <= 100 pixels; write [0.1, 2.0]")
            })?;
            require(blur.kernel.is_none() || blur.filter == BlurFilter::Gaussian, "blur.kernel", || {
                "`kernel` is of `filter = \"gaussian\"`, Pillow's filter has none; remove it".to_owned()
            })?;
            if let Some(kernel) = blur.kernel {
                require(kernel % 2 == 1 && kernel < 1024, "blur.kernel", || {
                    let advice = if kernel < 1024 { kernel + 1 } else { 23 };
                    format!(
                        "`kernel` is {kernel}, needs an odd number of pixels below 1024; write {advice}, or leave it out"
                    )
                })?;
            }
        }
        if let Some(solarize) = &self.solarize {
            probability("solarize.prob", solarize.prob)?;
        }
        if let Some(erase) = &self.erase {
            probability("erase.prob", erase.prob)?;
            let [low, high] = erase.area;
            require(0.0 < low && low <= high && high <= 1.0, "erase.area", || {
                format!(
                    "`area` is [{low}, {high}], needs 0 < low <= high <= 1 (fractions of the image); write [0.02, 0.33]"
                )
            })?;
            require((0.01..=1.0).contains(&erase.aspect), "erase.aspect", || {
                format!("`aspect` is {}, the limits are 0.01 and 1 (squares); 0.3 is usual", erase.aspect)
            })?;
            require((1..=MAX_COUNT).contains(&erase.count), "erase.count", || {
                format!("`count` is {}, the limits are 1 and {MAX_COUNT} boxes; 1 is usual", erase.count)
            })?;
        }
        Ok(())
    }
}

fn probability(key: &str, value: f64) -> Result<(), (String, String)> {
    let name = key.rsplit('.').next().unwrap_or(key);
    require((0.0..=1.0).contains(&value), key, || {
        format!("`{name}` is {value}, a probability has the limits 0 and 1; write 0.5 for every other image")
    })
}

fn require(holds: bool, key: &str, message: impl FnOnce() -> String) -> Result<(), (String, String)> {
    if holds { Ok(()) } else { Err((key.to_owned(), message())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        size = 224
        flip = 0.5
        grayscale = 0.2
        crop = { interpolation = "bilinear" }
        jitter = { brightness = 0.4, contrast = 0.4, saturation = 0.2, hue = 0.1 }
        blur = { prob = 0.5, kernel = 23 }
        solarize = { prob = 0.2 }
    "#;

    #[test]
    fn a_usual_table_is_accepted() {
        let config: ViewConfig = toml::from_str(GOOD).expect("parses");
        assert_eq!(config.check(), Ok(()));
    }

    #[test]
    fn each_bad_number_is_named() {
        for (from, to, key) in [
            ("size = 224", "size = 0", "size"),
            ("size = 224", "size = 5000", "size"),
            ("size = 224", "size = 224\ncount = 0", "count"),
            ("flip = 0.5", "flip = 1.5", "flip"),
            ("grayscale = 0.2", "grayscale = nan", "grayscale"),
            ("interpolation = \"bilinear\"", "scale = [0.5, 0.2]", "crop.scale"),
            ("interpolation = \"bilinear\"", "scale = [0.0, 1.0]", "crop.scale"),
            ("interpolation = \"bilinear\"", "ratio = [0.0, 1.0]", "crop.ratio"),
            ("brightness = 0.4", "brightness = -0.1", "jitter.brightness"),
            ("saturation = 0.2", "saturation = inf", "jitter.saturation"),
            ("hue = 0.1", "hue = 0.6", "jitter.hue"),
            ("hue = 0.1", "hue = 0.1, prob = -1.0", "jitter.prob"),
            ("kernel = 23", "kernel = 22", "blur.kernel"),
            ("kernel = 23", "sigma = [2.0, 1.0]", "blur.sigma"),
            ("solarize = { prob = 0.2", "solarize = { prob = 2.0", "solarize.prob"),
            ("size = 224", "size = 224\nrand_augment = { magnitude = 31 }", "rand_augment.magnitude"),
            ("size = 224", "size = 224\nrand_augment = { num_ops = 101 }", "rand_augment.num_ops"),
            ("size = 224", "size = 224\nrand_augment = { num_magnitude_bins = 1 }", "rand_augment.num_magnitude_bins"),
            ("flip = 0.5", "erase = { prob = 1.5 }", "erase.prob"),
            ("flip = 0.5", "erase = { prob = 0.5, area = [0.5, 0.2] }", "erase.area"),
            ("flip = 0.5", "erase = { prob = 0.5, aspect = 0.0 }", "erase.aspect"),
            ("flip = 0.5", "erase = { prob = 0.5, count = 0 }", "erase.count"),
        ] {
            let config: ViewConfig = toml::from_str(&GOOD.replace(from, to)).expect("parses");
            let (named, message) = config.check().expect_err(to);
            assert_eq!(named, key, "{message}");
            assert!(message.starts_with(&format!("`{}` is ", key.rsplit('.').next().expect("a name"))), "{message}");
        }
    }
}
