//! Networks as segments.
mod config;
mod pass;
mod scope;
pub use config::{BackboneConfig, Pool, PositionEmbedding, ResNetConfig, Stem, VitConfig, VitSize};
pub use pass::{BatchStats, Noise, Pass};
pub use scope::{Init, Scope};
