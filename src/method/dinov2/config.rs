//! The `[method.dinov2]` table.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::small_data::SmallData;
use crate::method::{Inputs, RunFacts, check, masked_views, multicrop};
use crate::model::DinoHeadArch;
use crate::optim::RampConfig;
use crate::problem::{MAX_WIDTH, Numbers, Problem};

const PROTOTYPES: usize = 65_536;
/// The `[method.dinov2]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Outputs of the class token's head, from 2 (65536 for ImageNet-1k); absent: by the number of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prototypes: Option<usize>,
    /// Outputs of the patches' head; absent: by the number of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch_prototypes: Option<usize>,
    /// Hidden width of the heads.
    pub hidden: usize,
    /// Linear layers of the heads in front of the prototypes.
    pub layers: usize,
    /// Width that is compared with the prototypes.
    pub bottleneck: usize,
    /// The same in the patches' head; absent: as `bottleneck`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch_bottleneck: Option<usize>,
    /// One head for class token and patches (the released ImageNet-1k setting).
    pub shared_head: bool,
    /// Probability that a global view has hidden patches.
    pub mask_prob: f64,
    /// Range of the share of patches that are hidden then, above 0 and below 1.
    pub mask_ratio: [f64; 2],
    /// Weight of the patches' loss.
    pub ibot_weight: f64,
    /// Weight of `KoLeo`; 0 for none.
    pub koleo_weight: f64,
    /// Divides the student's logits; positive.
    pub student_temperature: f64,
    /// Divides the teacher's logits; positive. Absent: by the number of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher_temperature: Option<RampConfig>,
    /// How the teacher's logits become distributions.
    pub centering: Centering,
    /// Momentum of the centres, below 1; for "softmax".
    pub center_momentum: f64,
    /// Momentum of the teacher. Absent: by the number of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub momentum: Option<RampConfig>,
    /// Epochs at the start in which the prototypes stay as they are (1 in the paper).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freeze_epochs: Option<f64>,
    /// The same in steps. Both absent: 1250, and at most a tenth of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freeze_steps: Option<u64>,
}

/// How the teacher's logits become distributions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Centering {
    /// Less a centre that follows the mean of all logits, then softmax.
    #[default]
    Softmax,
    /// Three rounds of Sinkhorn-Knopp over a micro-batch.
    Sinkhorn,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            prototypes: None,
            patch_prototypes: None,
            hidden: 2048,
            layers: 3,
            bottleneck: 256,
            patch_bottleneck: None,
            shared_head: false,
            mask_prob: 0.5,
            mask_ratio: [0.1, 0.5],
            ibot_weight: 1.0,
            koleo_weight: 0.1,
            student_temperature: 0.1,
            teacher_temperature: None,
            centering: Centering::Softmax,
            center_momentum: 0.9,
            momentum: None,
            freeze_epochs: None,
            freeze_steps: None,
        }
    }
}

impl Config {
    pub(super) fn head(&self, inputs: usize) -> DinoHeadArch {
        DinoHeadArch {
            inputs,
            hidden: self.hidden,
            layers: self.layers,
            bottleneck: self.bottleneck,
            prototypes: self.prototypes.unwrap_or(PROTOTYPES),
            norm_last_layer: false,
        }
    }

    pub(super) fn patch_head(&self, inputs: usize) -> DinoHeadArch {
        let class = self.head(inputs);
        if self.shared_head {
            return class;
        }
        DinoHeadArch {
            bottleneck: self.patch_bottleneck.unwrap_or(self.bottleneck),
            prototypes: self.patch_prototypes.unwrap_or(PROTOTYPES),
            ..class
        }
    }

    pub(super) fn check(&self, inputs: &Inputs<'_>, found: &mut Numbers) {
        let at = "method.dinov2";
        check::dino_head(at, &self.head(1), found);
        for (key, size, most) in [
            ("patch_prototypes", self.patch_prototypes, check::MAX_PROTOTYPES),
            ("patch_bottleneck", self.patch_bottleneck, MAX_WIDTH),
        ] {
            let (Some(size), key) = (size, format!("{at}.{key}")) else { continue };
            if self.shared_head {
                let message =
                    format!("`{key}` is {size}, but `{at}.shared_head` makes patches use the class token's head");
                found.push(
                    Problem::at(key, message)
                        .against("method.dinov2.shared_head")
                        .hint("remove it, or set `shared_head = false`"),
                );
            } else if found.size(&key, size, most) && size == 1 && key.ends_with("patch_prototypes") {
                found.limit(&key, 1, "at least 2");
            }
        }
        found.not_negative("method.dinov2.ibot_weight", self.ibot_weight);
        found.not_negative("method.dinov2.koleo_weight", self.koleo_weight);
        found.positive("method.dinov2.student_temperature", self.student_temperature);
        if let Some(temperature) = &self.teacher_temperature {
            check::temperature("method.dinov2.teacher_temperature", temperature, found);
        }
        found.momentum("method.dinov2.center_momentum", self.center_momentum);
        if let Some(momentum) = &self.momentum {
            check::momentum("method.dinov2.momentum", momentum, found);
        }
        check::freeze(at, self.freeze_epochs, self.freeze_steps, found);
        multicrop::check("dinov2", inputs, found);
        masked_views::check("dinov2", self.mask_prob, self.mask_ratio, inputs, found);
        if inputs.micro == 1 && self.koleo_weight != 0.0 {
            let message = "`batch.micro` is 1, but KoLeo of `method.dinov2` needs another image in each micro-batch";
            found.push(Problem::at("batch.micro", message).hint("use at least 2, or set `koleo_weight = 0`"));
        }
    }

    pub(super) fn resolve(&mut self, facts: &RunFacts) -> Vec<String> {
        let mut rule = SmallData::new("method.dinov2", facts);
        rule.prototypes("prototypes", &mut self.prototypes, PROTOTYPES);
        if !self.shared_head {
            rule.prototypes("patch_prototypes", &mut self.patch_prototypes, PROTOTYPES);
        }
        rule.teacher_temperature("teacher_temperature", &mut self.teacher_temperature);
        rule.momentum(&mut self.momentum, 0.992);
        rule.freeze_steps(self.freeze_epochs, &mut self.freeze_steps);
        rule.notes()
    }
}
