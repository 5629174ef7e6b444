//! Networks as segments.
mod backbone;
mod config;
mod decoder;
mod dino_head;
mod error;
mod heads;
pub mod layers;
pub mod params;
mod pass;
pub mod position;
mod resnet;
mod scope;
mod segment;
mod vit;

pub use backbone::Backbone;
pub use config::{BackboneConfig, Pool, PositionEmbedding, ResNetConfig, Stem, VitConfig, VitInit, VitSize};
pub use decoder::{Decoder, DecoderArch};
pub use dino_head::{DinoHead, DinoHeadArch};
pub use error::ConfigError;
pub use heads::{LastLayer, ProjectionHead, ProjectionHeadArch};
pub use pass::{BatchStats, Noise, Pass};
pub use resnet::{ResNet, ResNetArch, ResidualBlock, ResidualKind};
pub use scope::{Init, Kind, Scope};
pub use segment::{Boundary, Features, Segmented};
pub use vit::{PatchEmbed, Vit, VitArch, gather_tokens};
