//! Optimizers over flat parameters, schedules, moving averages.

mod clip;
mod config;
pub mod ema;
mod norm;
mod optimizer;
mod params;
pub mod published;
mod schedule;

pub use clip::{clip_each_norm, clip_global_norm};
pub use config::{AdamWConfig, LarsConfig, LrScaling, OptimizerConfig, ScheduleConfig, SgdConfig};
pub use norm::{norm, sum_of_squares};
pub use optimizer::{Optimizer, StateError};
pub use params::{Group, Groups, ParamSpec};
pub use schedule::{Schedule, cosine, warmup_cosine};
