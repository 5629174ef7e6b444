//! Weights of other programs: what timm, torchvision, Hugging Face and the authors of papers publish, read into our backbones.
//!
//! [`Checkpoint::open`] reads a file's contents without executing anything, and in memory bounded by the file.

mod adapt;
mod arch;
mod checkpoint;
mod dtype;
mod error;
mod export;
mod found;
mod globals;
mod layouts;
mod pattern;
mod pickle;
mod safetensors;
mod tensor;
mod torch;

pub use adapt::{adapt_channels, resample_patches, resample_positions};
pub use arch::{Arch, Hints};
pub use checkpoint::{Checkpoint, Format, is_folder_of_weights};
pub use dtype::Dtype;
pub use error::ImportError;
pub use export::{Exported, Head, Inexpressible, Input, Target, Weights, export};
pub use found::{Fate, Fit, Found, LEAST_MATCHED, Row};
pub use tensor::Tensor;
pub use torch::Setting;

#[cfg(test)]
mod tests;
