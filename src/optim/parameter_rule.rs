//! The `[[parameters]]` tables of a recipe: what is different for some of the parameters.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::layers::{LayerRule, layer_scales};
use super::params::ParamSpec;
use super::pattern;

/// What is different for some of the parameters. Every rule that a parameter matches applies, in their order: scales are multiplied,
/// of other values the last one counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ParameterRule {
    /// Paths it is about, such as `*.bias` or `backbone.*`: `*` stands for anything, `|` stands between alternatives. Paths are the keys of
    /// `model.safetensors`.
    #[serde(rename = "match")]
    pub pattern: String,
    /// Only tensors of at most this rank: 1 are biases and norms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_rank: Option<usize>,
    /// Weight decay instead of the optimizer's; it doesn't move. LARS and LAMB adapt where it is not 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Multiplies the optimizer's weight decay, wherever its schedule is. LARS and LAMB adapt where it is not 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_scale: Option<f64>,
    /// Multiplies the learning rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_scale: Option<f64>,
    /// Multiplies the learning rate by this to the power of the layers behind a parameter: block k of L by `layer_decay ^ (L + 1 - k)`,
    /// embeddings as a block 0, the rest by 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_decay: Option<f64>,
    /// Whether the step follows the norm of the parameter (LARS, LAMB).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapt: Option<bool>,
    /// Keeps the learning rate after the warm-up, from the first step to the last: no warm-up, no decay (`SimSiam`'s predictor).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fixed_lr: Option<bool>,
    /// Never trained: gradient cancelled, no decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frozen: Option<bool>,
    /// Not trained in the first epochs (may be fractional): gradient cancelled, no decay, no momentum (DINO's last layer).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freeze_epochs: Option<f64>,
    /// Not trained in the first steps (`SwAV`'s prototypes).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freeze_steps: Option<u64>,
}

impl Default for ParameterRule {
    /// Matches every parameter and changes nothing.
    fn default() -> Self {
        Self {
            pattern: "*".to_owned(),
            max_rank: None,
            weight_decay: None,
            decay_scale: None,
            lr_scale: None,
            layer_decay: None,
            adapt: None,
            fixed_lr: None,
            frozen: None,
            freeze_epochs: None,
            freeze_steps: None,
        }
    }
}

/// A rule that does nothing for these parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct RuleError {
    /// The key of the rule that is to blame.
    pub key: &'static str,
    /// What is wrong; follows "`parameters.0.match` ".
    pub problem: String,
    /// What to do.
    pub hint: String,
}

impl ParameterRule {
    /// Makes a rule for paths that match a pattern; it changes nothing yet.
    #[must_use]
    pub fn matching(pattern: &str) -> Self {
        Self { pattern: pattern.to_owned(), ..Self::default() }
    }

    /// Tells whether a parameter follows this rule.
    #[must_use]
    pub fn matches(&self, spec: &ParamSpec) -> bool {
        self.max_rank.is_none_or(|rank| spec.shape.len() <= rank) && pattern::matches(&self.pattern, &spec.path)
    }

    /// Checks that the rule does something for these parameters.
    ///
    /// # Errors
    /// When it matches none, or asks for layers and there are none.
    pub fn check(&self, specs: &[ParamSpec]) -> Result<(), RuleError> {
        let Some(matched) = specs.iter().find(|spec| self.matches(spec)) else {
            let near = specs.iter().filter(|spec| pattern::matches(&format!("*{}*", self.pattern), &spec.path));
            let hint = match near.map(|spec| &spec.path).next() {
                Some(path) if self.max_rank.is_none() => {
                    format!("a pattern is about whole paths: `*{}*` matches `{path}`", self.pattern)
                }
                _ => format!("paths look like `{}`", specs.first().map_or("", |spec| spec.path.as_str())),
            };
            let rank = self.max_rank.map_or(String::new(), |rank| format!(" of rank {rank} or less"));
            let problem = format!("is \"{}\", which no parameter{rank} matches", self.pattern);
            return Err(RuleError { key: "match", problem, hint });
        };
        match self.layer_decay {
            Some(decay) if self.layers(specs).is_none() => Err(RuleError {
                key: "layer_decay",
                problem: format!("is {decay}, but what \"{}\" matches has no numbered blocks", self.pattern),
                hint: format!("match a whole network, such as `backbone.*`; it matches `{}`", matched.path),
            }),
            _ => Ok(()),
        }
    }

    /// Returns layer and factor of each parameter, in order; none for those that don't match.
    pub(super) fn layers(&self, specs: &[ParamSpec]) -> Option<Vec<Option<(usize, f64)>>> {
        let paths: Vec<&str> = specs.iter().filter(|s| self.matches(s)).map(|spec| spec.path.as_str()).collect();
        let mut scales = layer_scales(&paths, self.layer_decay?, LayerRule::Dinov2)?.into_iter();
        Some(specs.iter().map(|spec| if self.matches(spec) { scales.next() } else { None }).collect())
    }

    /// Returns how many steps the parameter is not trained for, if the rule says so.
    pub(super) fn frozen_steps(&self, steps_per_epoch: u64) -> Option<u64> {
        let from_epochs = self.freeze_epochs.map(|epochs| (epochs * steps_per_epoch as f64).round() as u64);
        match self.frozen {
            Some(true) => Some(u64::MAX),
            Some(false) => Some(0),
            None => self.freeze_steps.or(from_epochs),
        }
    }
}
