//! Optimizers over flat parameters, parameter groups, schedules, moving averages.

mod clip;
mod config;
pub mod ema;
mod groups;
mod layers;
mod norm;
mod optimizer;
mod parameter_rule;
mod params;
mod pattern;
pub mod published;
mod ramp;
mod rules;
mod schedule;
mod schedule_config;
mod table;

pub use clip::{Clip, clip_each_norm, clip_global_norm};
pub use config::{AdamConfig, AdamWConfig, LambConfig, LarsConfig, LarsForm, LionConfig, OptimizerConfig, SgdConfig};
pub use groups::{Decay, Group, Groups};
pub use layers::{LayerRule, layer_scales};
pub use norm::{global_norm, norm, sum_of_squares};
pub use optimizer::{Optimizer, Rates, StateError};
pub use parameter_rule::{ParameterRule, RuleError};
pub use params::ParamSpec;
pub use ramp::{Each, Ramp, RampConfig, RampShape};
pub use schedule::{Schedule, cosine, warmup_cosine};
pub use schedule_config::{LrDecay, LrScaling, ScheduleConfig};
