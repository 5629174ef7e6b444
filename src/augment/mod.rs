//! Augmentation: pixels in, pixels out.
mod config;
pub use config::{BlurConfig, CropConfig, Interpolation, JitterConfig, SolarizeConfig, ViewConfig};
