//! The recipe: what the user typed, no more.
//!
//! Strict TOML; every table is a struct beside the part it configures. [`crate::plan`] turns a recipe into what will happen.

mod check;
mod error;
mod load;
mod locate;
mod overrides;
mod schema;
mod structure;

pub(crate) use crate::problem::plural;
pub use crate::problem::{Place, Problem};
pub(crate) use error::report;
pub use error::{Diagnostic, RecipeError};
pub use load::{Loaded, load, parse};
pub use schema::schema;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::augment::ViewConfig;
use crate::data::DataConfig;
use crate::engine::{BatchConfig, CheckpointConfig, EmaConfig, LogConfig};
use crate::eval::EvalConfig;
use crate::method::MethodConfig;
use crate::model::BackboneConfig;
use crate::ops::OpsConfig;
use crate::optim::{OptimizerConfig, ParameterRule, ScheduleConfig};

/// A complete run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name of the run and of its folder under `runs/`; default: the recipe's file name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Seed of every random draw.
    #[serde(default)]
    pub seed: u64,
    /// Images.
    pub data: DataConfig,
    /// Views an image is turned into.
    pub views: Vec<ViewConfig>,
    /// Network that is pretrained.
    pub backbone: BackboneConfig,
    /// Objective.
    pub method: MethodConfig,
    /// Global batch and micro-batches.
    pub batch: BatchConfig,
    /// Optimizer.
    pub optimizer: OptimizerConfig,
    /// Duration, learning rate, weight decay, clipping.
    pub schedule: ScheduleConfig,
    /// What is different for some of the parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parameters: Vec<ParameterRule>,
    /// Operations that compute on the CPU.
    #[serde(default)]
    pub ops: OpsConfig,
    /// Moving average of the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ema: Option<EmaConfig>,
    /// Checkpoints.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// Evaluation at the end.
    #[serde(default)]
    pub eval: EvalConfig,
    /// Progress lines.
    #[serde(default)]
    pub log: LogConfig,
}

impl Recipe {
    /// Writes the recipe as TOML, every default spelt out.
    ///
    /// # Errors
    /// When a value has no TOML form: a path that is not UTF-8, a whole number beyond 63 bits.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }
}

#[cfg(test)]
mod tests;
