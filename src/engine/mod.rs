//! The step and the loop.

mod config;
mod error;
mod evaluate;
mod step;
mod train;
mod watch;

pub use config::{BatchConfig, CheckpointConfig, EmaConfig, LogConfig, Memory};
pub use error::EngineError;
pub use evaluate::{EvalSet, Evaluation, Weights, evaluate};
pub use train::{Job, Trained, specs, train};
