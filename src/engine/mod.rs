//! The step and the loop.

mod alarms;
mod audit;
mod config;
mod error;
mod evaluate;
mod held_out;
mod pace;
mod process_log;
mod shape;
mod step;
mod train;
mod trainer;
mod watch;

pub use config::{BatchConfig, CheckpointConfig, EarlyStoppingConfig, EmaConfig, Judged, LogConfig, Memory};
pub use error::EngineError;
pub use evaluate::{EvalSet, Evaluation, Weights, evaluate};
pub use held_out::{HeldOut, best_step, best_weights};
pub use shape::Shape;
pub use train::{Job, Trained, train};
pub use trainer::{Settings, StepNumbers, Trainer, specs};
