//! Augmentation: pixels in, pixels out.
//!
//! Operations agree with torchvision's `transforms.v2.functional` on 8-bit tensors, within one level of rounding (two for hue); where they
//! cannot or should not, the function says so. Each is one file. Random numbers come from one [`crate::rng::Stream`] per seed, epoch,
//! image, view and operation: [`Pipeline::draw`] draws, [`View::render`] computes. [`MultiView`] is what a loader uses.

mod affine;
mod blur;
mod box_blur;
mod color;
mod config;
mod crop;
mod erase;
mod flip;
mod grayscale;
mod mix;
mod normalize;
mod pixels;
mod rand_augment;
mod sharpness;
mod solarize;
mod tone;
mod view;

pub use affine::{Affine, Sampling, affine, rotate};
pub use blur::{Blur, gaussian_blur};
pub use box_blur::box_blur;
pub use color::{ColorStep, adjust_brightness, adjust_contrast, adjust_hue, adjust_saturation};
pub use config::{BlurConfig, BlurFilter, CropConfig, Interpolation, JitterConfig, SolarizeConfig, ViewConfig};
pub use crop::{CropBox, DrawnCrop, eval_shorter, eval_view, resize_center_crop, resized_crop};
pub use erase::{EraseConfig, EraseMode};
pub use flip::{flip_horizontal, flip_vertical};
pub use grayscale::grayscale;
pub use mix::{Mix, MixConfig, MixMode};
pub use normalize::{IMAGENET_MEAN, IMAGENET_STD, Normalize};
pub use rand_augment::{RandAugmentConfig, RandomOp};
pub use sharpness::adjust_sharpness;
pub use solarize::solarize;
pub use tone::{autocontrast, equalize, posterize};
pub use view::{MultiView, Pipeline, View, ViewKey};

#[cfg(test)]
mod test_images {
    use image::{Rgb, RgbImage};

    use crate::rng::{Purpose, Stream};

    /// An image of random values, the hardest for rounding.
    pub(super) fn noise(width: u32, height: u32, seed: u64) -> RgbImage {
        let mut stream = Stream::new(seed, Purpose::Evaluation, &[u64::from(width), u64::from(height)]);
        RgbImage::from_fn(width, height, |_, _| Rgb(stream.bits().to_le_bytes()[..3].try_into().expect("three bytes")))
    }
}
