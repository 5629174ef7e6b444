//! Networks as segments.
mod backbone;
mod block;
mod config;
mod convnext;
mod decoder;
mod dino_head;
mod error;
mod heads;
pub mod layers;
mod lora;
mod macs;
pub mod params;
mod pass;
pub mod position;
mod predictor;
mod recompute;
mod resnet;
mod rope;
mod scope;
mod segment;
mod start;
mod trace;
mod vit;
mod vit_arch;

pub use backbone::Backbone;
pub use block::{Attention, Block, BlockArch, LinearInit, Mlp};
pub use config::{
    BackboneConfig, ConvNextConfig, ConvNextSize, MlpKind, Pool, PositionEmbedding, ResNetConfig, Stem, VitConfig,
    VitInit, VitSize,
};
pub use convnext::{ConvNext, ConvNextArch, ConvNextBlock, ConvNextStage};
pub use decoder::{Decoder, DecoderArch};
pub use dino_head::{DinoHead, DinoHeadArch};
pub use error::ConfigError;
pub use heads::{LastLayer, ProjectionHead, ProjectionHeadArch};
pub use lora::{Adapter, LoraArch, is_adapter, merge};
pub use macs::{Macs, counted, uncounted};
pub use pass::{BatchStats, Noise, Pass};
pub use predictor::{Predictor, PredictorArch};
pub use recompute::{Tape, recomputed};
pub use resnet::{ResNet, ResNetArch, ResidualBlock, ResidualKind};
pub use rope::Rotary;
pub use scope::{Init, Kind, Scope};
pub use segment::{Boundary, Features, Segmented};
pub use start::{Start, Tensors};
pub use trace::{Seen, Spread, traced};
pub use vit::{PatchEmbed, Vit, gather_tokens};
pub use vit_arch::VitArch;
