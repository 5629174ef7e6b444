//! The step and the loop.

mod alarms;
mod audit;
mod bench;
mod config;
mod error;
mod evaluate;
mod finding;
mod held_out;
mod pace;
mod process_log;
mod replay;
mod shape;
mod step;
mod train;
mod trainer;
mod watch;

pub use bench::{Lap, bench, product_rate};
pub use config::{
    ActivationCheckpointing, BatchConfig, CheckpointConfig, EarlyStoppingConfig, EmaConfig, Judged, LogConfig, Memory,
};
pub use error::{EngineError, NotFinite};
pub use evaluate::{EvalSet, Evaluation, Weights, evaluate};
pub use finding::{BUNDLE_FORMAT, Finding, First, Layer};
pub use held_out::{HeldOut, best_step, best_weights};
pub use replay::replay;
pub use shape::Shape;
pub use train::{Job, Trained, train};
pub use trainer::{Settings, StepNumbers, Stepped, Trainer, specs};
