//! Optimizers over flat parameters, schedules, moving averages.
mod config;
pub use config::{AdamWConfig, LarsConfig, LrScaling, OptimizerConfig, ScheduleConfig, SgdConfig};
