//! The step and the loop.

mod alarms;
mod audit;
mod config;
mod error;
mod evaluate;
mod pace;
mod process_log;
mod shape;
mod step;
mod train;
mod trainer;
mod watch;

pub use config::{BatchConfig, CheckpointConfig, EmaConfig, LogConfig, Memory};
pub use error::EngineError;
pub use evaluate::{EvalSet, Evaluation, Weights, evaluate};
pub use shape::Shape;
pub use train::{Job, Trained, train};
pub use trainer::{Settings, StepNumbers, Trainer, specs};
