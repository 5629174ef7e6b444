//! The step and the loop.
mod config;
pub use config::{BatchConfig, CheckpointConfig, EmaConfig, LogConfig, Memory};
