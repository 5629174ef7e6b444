//! What a run tells: metrics on disk, progress on the terminal, a summary at the end.

mod environment;
mod evaluations;
mod metrics;
mod progress;
mod summary;
mod tensorboard;

pub(crate) use environment::cpu_features;
pub use environment::{Environment, utc};
pub use evaluations::{EvaluationLog, EvaluationRecord, csv_field, write_tables};
pub use metrics::{MetricsLog, Pace, Removed, StepRecord, read_metrics};
pub use progress::{Progress, Style};
pub use summary::{KnnResult, LinearResult, Summary, quoted};
pub use tensorboard::EventLog;
