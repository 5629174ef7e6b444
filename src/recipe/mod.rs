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

pub(crate) use crate::problem::{Numbers, plural};
pub use crate::problem::{Place, Problem};
pub(crate) use error::report;
pub use error::{Diagnostic, RecipeError};
pub use load::{Loaded, load, parse};
pub use schema::schema;

use std::borrow::Cow;
use std::path::PathBuf;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::augment::ViewConfig;
use crate::data::DataConfig;
use crate::engine::{BatchConfig, CheckpointConfig, EarlyStoppingConfig, EmaConfig, LogConfig};
use crate::eval::EvalConfig;
use crate::method::MethodConfig;
use crate::model::BackboneConfig;
use crate::ops::OpsConfig;
use crate::optim::{OptimizerConfig, ParameterRule, ScheduleConfig};
use crate::parallel::ParallelConfig;
use crate::precision::PrecisionConfig;

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
    /// Where the backbone's first weights come from: `"random"`; a run folder or one of its checkpoints; or a file of another program (safetensors,
    /// what `torch.save` wrote, a folder of Hugging Face's: docs/checkpoints.md), whose tensors must be those of the backbone. Everything else (heads,
    /// optimizer, schedule) starts anew.
    #[serde(default)]
    pub init: InitConfig,
    /// Takes from a file of another program what fits, and draws the rest, even where less than 95 % of the backbone is there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub init_allow_partial: bool,
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
    /// Mixed precision, and what happens when numbers are not finite.
    #[serde(default)]
    pub precision: PrecisionConfig,
    /// How ranks work together.
    #[serde(default)]
    pub parallel: ParallelConfig,
    /// Moving average of the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ema: Option<EmaConfig>,
    /// When a supervised run ends before its last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early_stopping: Option<EarlyStoppingConfig>,
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

/// Where a backbone's first weights come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum InitConfig {
    /// Drawn with the run's seed.
    #[default]
    Random,
    /// Read from this file or folder.
    From(PathBuf),
}

impl From<String> for InitConfig {
    fn from(text: String) -> Self {
        if text == "random" { Self::Random } else { Self::From(text.into()) }
    }
}

impl From<InitConfig> for String {
    fn from(config: InitConfig) -> Self {
        match config {
            InitConfig::Random => "random".to_owned(),
            // it was text in a recipe
            InitConfig::From(path) => path.to_string_lossy().into_owned(),
        }
    }
}

impl JsonSchema for InitConfig {
    fn schema_name() -> Cow<'static, str> {
        "InitConfig".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        String::json_schema(generator)
    }
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
