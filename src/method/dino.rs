//! DINO: the student, whatever part of an image it sees, tells what its moving average makes of the whole.
//!
//! Caron, Touvron, Misra, Jegou, Mairal, Bojanowski, Joulin, 2021, <https://arxiv.org/abs/2104.14294>, algorithm 1 and equations 1 to 4; official code
//! `main_dino.py`. The first two views are global: the teacher sees them alone, the student sees all. The teacher's logits are centred by the centre of
//! the steps before and sharpened; the centre then moves to the mean of the global batch.
//!
//! Deviations: batch norm (in a residual network) takes its statistics over a micro-batch, not over all replicas. Positions of small views are
//! resized with antialiasing, to the grid's size; the official code passes the factor `(n + 0.1) / m` without. The class token starts at 1e-6 times a
//! normal, timm's, not 0.02. Values that a recipe leaves open follow from the number of images (`method::small_data`); from a million on they are
//! those of the paper's best runs.

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::center::Center;
use super::multicrop::{self, GLOBAL_VIEWS};
use super::small_data::SmallData;
use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, RunFacts, Sees, Update, check};
use crate::loss::{dino, total};
use crate::model::{Backbone, ConfigError, DinoHead, DinoHeadArch, Pass, Scope};
use crate::optim::{ParameterRule, RampConfig};
use crate::problem::Numbers;

const PROTOTYPES: usize = 65_536;

/// The `[method.dino]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Outputs of the head, from 2 (65536 in the paper); absent: by the number of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prototypes: Option<usize>,
    /// Hidden width of the head.
    pub hidden: usize,
    /// Linear layers of the head in front of the prototypes.
    pub layers: usize,
    /// Width that is compared with the prototypes.
    pub bottleneck: usize,
    /// All prototypes have length 1; without, each has a trained length, which is better and less stable (the paper's small transformers).
    pub norm_last_layer: bool,
    /// Divides the student's logits; positive.
    pub student_temperature: f64,
    /// Divides the teacher's logits; positive. Absent: by the number of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher_temperature: Option<RampConfig>,
    /// Momentum of the centre, below 1.
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

impl Default for Config {
    fn default() -> Self {
        Self {
            prototypes: None,
            hidden: 2048,
            layers: 3,
            bottleneck: 256,
            norm_last_layer: true,
            student_temperature: 0.1,
            teacher_temperature: None,
            center_momentum: 0.9,
            momentum: None,
            freeze_epochs: None,
            freeze_steps: None,
        }
    }
}

impl Config {
    fn head(&self, inputs: usize) -> DinoHeadArch {
        DinoHeadArch {
            inputs,
            hidden: self.hidden,
            layers: self.layers,
            bottleneck: self.bottleneck,
            prototypes: self.prototypes.unwrap_or(PROTOTYPES),
            norm_last_layer: self.norm_last_layer,
        }
    }
}

/// Student, teacher and centre.
#[derive(Module, Debug)]
pub struct Dino {
    backbone: Backbone,
    head: DinoHead,
    teacher: Teacher,
    center: Center,
    student_temperature: f64,
    #[module(skip)]
    teacher_temperature: RampConfig,
    #[module(skip)]
    momentum: RampConfig,
}

/// The moving average.
#[derive(Module, Debug)]
struct Teacher {
    backbone: Backbone,
    head: DinoHead,
}

impl Method for Dino {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let network = |scope: &Scope| -> Result<(Backbone, DinoHead), ConfigError> {
            let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
            let head = DinoHead::new(&config.head(backbone.dim()), &scope.enter("head"));
            Ok((backbone, head))
        };
        let (backbone, head) = network(scope)?;
        let teacher = network(&scope.untrained())?;
        let prototypes = config.prototypes.unwrap_or(PROTOTYPES);
        Ok(Self {
            backbone,
            head,
            teacher: Teacher { backbone: teacher.0, head: teacher.1 },
            center: Center::new(prototypes, config.center_momentum, &scope.enter("center")),
            student_temperature: config.student_temperature,
            teacher_temperature: config.teacher_temperature.unwrap_or(RampConfig::constant(0.04)),
            momentum: config.momentum.unwrap_or(RampConfig::cosine(0.996, 1.0)),
        })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        check::dino_head("method.dino", &config.head(1), found);
        found.positive("method.dino.student_temperature", config.student_temperature);
        if let Some(temperature) = &config.teacher_temperature {
            check::temperature("method.dino.teacher_temperature", temperature, found);
        }
        found.momentum("method.dino.center_momentum", config.center_momentum);
        if let Some(momentum) = &config.momentum {
            check::momentum("method.dino.momentum", momentum, found);
        }
        check::freeze("method.dino", config.freeze_epochs, config.freeze_steps, found);
        multicrop::check("dino", inputs, found);
        let sizes: Vec<u32> = inputs.view_sizes().collect();
        if let Some(fewest) = sizes.chunk_by(|a, b| a == b).map(<[u32]>::len).min() {
            check::lone_pixels("dino", inputs, inputs.micro * fewest, found);
        }
    }

    fn resolve(config: &mut Config, facts: &RunFacts) -> Vec<String> {
        let mut rule = SmallData::new("method.dino", facts);
        rule.prototypes("prototypes", &mut config.prototypes, PROTOTYPES);
        rule.teacher_temperature("teacher_temperature", &mut config.teacher_temperature);
        rule.momentum(&mut config.momentum, 0.996);
        rule.freeze_steps(config.freeze_epochs, &mut config.freeze_steps);
        rule.notes()
    }

    fn rules(config: &Config) -> Vec<ParameterRule> {
        let Config { freeze_epochs, freeze_steps, .. } = *config;
        vec![ParameterRule { freeze_epochs, freeze_steps, ..ParameterRule::matching("head.last_layer.*") }]
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let num_views = batch.views.len();
        let features = multicrop::pooled(&self.backbone, batch, 0..num_views, pass);
        let student = self.head.forward(features); // [views * micro, k]

        let mut teacher_pass = pass.without_noise();
        let features = multicrop::pooled(&self.teacher.backbone, batch, 0..GLOBAL_VIEWS, &mut teacher_pass);
        let teacher = self.teacher.head.forward(features); // [2 * micro, k]
        pass.absorb(teacher_pass);
        Outputs { tensors: student.chunk(num_views, 0), constants: teacher.chunk(GLOBAL_VIEWS, 0) }
    }

    fn loss(&self, outputs: Outputs, progress: &Progress) -> Loss {
        let Outputs { tensors: students, constants: teachers } = outputs;
        let [num_images, _] = students[0].dims();
        let temperature = progress.at(&self.teacher_temperature);
        let targets: Vec<_> = teachers.iter().map(|logits| self.center.softmax(logits.clone(), temperature)).collect();
        let sum = dino::dino(&students, &targets, self.student_temperature);

        let shown = targets[0].clone();
        // Two ways to collapse (section 5.3 of the paper): no divergence, with an entropy of 0 or of ln K.
        let entropy = total(dino::entropy(Tensor::cat(targets, 0))) / GLOBAL_VIEWS as f64;
        let divergence = sum.clone().detach() - entropy.clone();
        let [_, prototypes] = students[0].dims();
        let loss = Loss::new(sum, num_images as f64).with_uniform((prototypes as f64).ln()).with_embeddings(shown);
        Loss {
            parts: vec![("entropy", entropy), ("divergence", divergence)],
            statistics: Center::statistics(Tensor::cat(teachers, 0)).to_vec(),
            ..loss
        }
    }

    /// The teacher's: it is ahead of the student, and what the released code evaluates.
    fn backbone(&self) -> &Backbone {
        &self.teacher.backbone
    }

    fn teacher_momentum(&self, progress: &Progress) -> Option<f64> {
        Some(progress.at(&self.momentum))
    }

    fn update(&self, statistics: &[Vec<f32>], _progress: &Progress) -> Vec<Update> {
        vec![self.center.moved([&statistics[0], &statistics[1]])]
    }
}
