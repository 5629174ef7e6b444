//! Images: sources, decoding, order, loader.
mod config;
pub use config::{DataConfig, OnError, SourceKind};
