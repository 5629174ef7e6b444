//! Why training stopped.

use crate::checkpoint::CheckpointError;
use crate::parallel::Aborted;

/// Why training stopped before its end.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The images.
    #[error(transparent)]
    Data(#[from] crate::data::Error),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The network.
    #[error(transparent)]
    Network(#[from] crate::model::ConfigError),
    /// The run folder.
    #[error(transparent)]
    File(#[from] crate::files::FileError),
    /// The features of the evaluation.
    #[error(transparent)]
    Evaluation(#[from] crate::eval::EvalError),
    /// Another rank.
    #[error(transparent)]
    Aborted(#[from] Aborted),
    /// The loss or the gradient is NaN or infinite.
    #[error(
        "step {step}: the {what} is {value}\nhint: the weights of step {step} are untouched and the newest checkpoint is good; lower `schedule.lr`, lengthen `schedule.warmup_epochs` or set `schedule.clip_norm = 1.0`"
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// Loss or gradient norm.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// A defect of ours.
    #[error("rank {rank} panicked: {text}\nhint: this is a defect of autodidact; the newest checkpoint is good")]
    Panicked {
        /// The rank.
        rank: usize,
        /// What it said.
        text: String,
    },
}
