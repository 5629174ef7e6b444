//! iBOT: DINO, and the student tells what the teacher makes of the patches it does not see.
//!
//! Zhou, Wei, Wang, Shen, Xie, Yuille, Kong, 2021, <https://arxiv.org/abs/2111.07832>, equations 2 and 3; official code `main_ibot.py`, `loader.py`,
//! with a shared head. Blocks of patches are hidden in half of the student's global views; the loss of a view is the mean over its hidden
//! patches, zero where none is hidden. The class tokens' loss is [`super::dino`]'s, on the same masked views.
//!
//! Deviations: masks are keyed by image, view and epoch, so they depend on neither the place in a batch nor the rank; numbers of patches are rounded
//! down before blocks are drawn. The student's head sees the hidden patches alone (the others cost nothing in the official loss). Deviations of
//! positions, class token and open values as in [`super::dino`].

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::center::Center;
use super::masked_views::{self, Masking};
use super::multicrop::{self, GLOBAL_VIEWS};
use super::small_data::SmallData;
use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, RunFacts, Sees, Update, check};
use crate::loss::{dino, ibot};
use crate::model::{Backbone, ConfigError, DinoHead, DinoHeadArch, Init, Pass, Scope, Vit};
use crate::optim::{ParameterRule, RampConfig};
use crate::problem::Numbers;

const PROTOTYPES: usize = 8192;

/// The `[method.ibot]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Outputs of the head, from 2 (8192 in the paper); absent: by the number of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prototypes: Option<usize>,
    /// Hidden width of the head, which class token and patches share.
    pub hidden: usize,
    /// Linear layers of the head in front of the prototypes.
    pub layers: usize,
    /// Width that is compared with the prototypes.
    pub bottleneck: usize,
    /// All prototypes have length 1; without, each has a trained length, which is better and less stable (the paper's small transformers).
    pub norm_last_layer: bool,
    /// Probability that a global view has hidden patches.
    pub mask_prob: f64,
    /// Range of the share of patches that are hidden then, above 0 and below 1.
    pub mask_ratio: [f64; 2],
    /// Divides the student's logits; positive.
    pub student_temperature: f64,
    /// Divides the teacher's logits of the class token; positive. Absent: by the number of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher_temperature: Option<RampConfig>,
    /// Divides the teacher's logits of the patches; positive. Absent: by the number of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch_temperature: Option<RampConfig>,
    /// Momentum of the class tokens' centre, below 1.
    pub center_momentum: f64,
    /// Momentum of the patches' centre, below 1.
    pub patch_center_momentum: f64,
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
            mask_prob: 0.5,
            mask_ratio: [0.1, 0.5], // `--pred_ratio 0 0.3 --pred_ratio_var 0 0.2`
            student_temperature: 0.1,
            teacher_temperature: None,
            patch_temperature: None,
            center_momentum: 0.9,
            patch_center_momentum: 0.9,
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

    fn masking(&self, grid: [usize; 2]) -> Masking {
        let least = (grid[0].min(grid[1]) / 3).pow(2);
        Masking { prob: self.mask_prob, ratio: self.mask_ratio, least }
    }
}

/// Student, teacher and centres.
#[derive(Module, Debug)]
pub struct Ibot {
    backbone: Backbone,
    head: DinoHead,
    mask_token: Param<Tensor<3>>,
    teacher: Teacher,
    center: Center,
    patch_center: Center,
    student_temperature: f64,
    #[module(skip)]
    masking: Masking,
    #[module(skip)]
    teacher_temperature: RampConfig,
    #[module(skip)]
    patch_temperature: RampConfig,
    #[module(skip)]
    momentum: RampConfig,
}

/// The moving average.
#[derive(Module, Debug)]
struct Teacher {
    backbone: Backbone,
    head: DinoHead,
}

impl Ibot {
    fn encoder(&self) -> &Vit {
        self.backbone.vit().expect("`build` accepts vision transformers only")
    }
}

impl Method for Ibot {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let network = |scope: &Scope| -> Result<(Backbone, DinoHead), ConfigError> {
            let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
            let head = DinoHead::new(&config.head(backbone.dim()), &scope.enter("head"));
            Ok((backbone, head))
        };
        let (backbone, head) = network(scope)?;
        let arch = masked_views::encoder("ibot", &backbone)?.arch();
        let (grid, dim) = (arch.grid(), arch.dim);
        let teacher = network(&scope.untrained())?;
        let prototypes = config.prototypes.unwrap_or(PROTOTYPES);
        let temperature = |given: Option<RampConfig>| given.unwrap_or(RampConfig::constant(0.04));
        Ok(Self {
            backbone,
            head,
            mask_token: scope.param("mask_token", [1, 1, dim], Init::Zeros),
            teacher: Teacher { backbone: teacher.0, head: teacher.1 },
            center: Center::new(prototypes, config.center_momentum, &scope.enter("center")),
            patch_center: Center::new(prototypes, config.patch_center_momentum, &scope.enter("patch_center")),
            student_temperature: config.student_temperature,
            masking: config.masking(grid),
            teacher_temperature: temperature(config.teacher_temperature),
            patch_temperature: temperature(config.patch_temperature),
            momentum: config.momentum.unwrap_or(RampConfig::cosine(0.996, 1.0)),
        })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        check::dino_head("method.ibot", &config.head(1), found);
        found.positive("method.ibot.student_temperature", config.student_temperature);
        for (key, temperature) in
            [("teacher_temperature", config.teacher_temperature), ("patch_temperature", config.patch_temperature)]
        {
            if let Some(temperature) = &temperature {
                check::temperature(&format!("method.ibot.{key}"), temperature, found);
            }
        }
        found.momentum("method.ibot.center_momentum", config.center_momentum);
        found.momentum("method.ibot.patch_center_momentum", config.patch_center_momentum);
        if let Some(momentum) = &config.momentum {
            check::momentum("method.ibot.momentum", momentum, found);
        }
        check::freeze("method.ibot", config.freeze_epochs, config.freeze_steps, found);
        multicrop::check("ibot", inputs, found);
        masked_views::check("ibot", config.mask_prob, config.mask_ratio, inputs, found);
    }

    fn resolve(config: &mut Config, facts: &RunFacts) -> Vec<String> {
        let mut rule = SmallData::new("method.ibot", facts);
        rule.prototypes("prototypes", &mut config.prototypes, PROTOTYPES);
        rule.teacher_temperature("teacher_temperature", &mut config.teacher_temperature);
        rule.teacher_temperature("patch_temperature", &mut config.patch_temperature);
        rule.momentum(&mut config.momentum, 0.996);
        rule.freeze_steps(config.freeze_epochs, &mut config.freeze_steps);
        rule.notes()
    }

    fn rules(config: &Config) -> Vec<ParameterRule> {
        let Config { freeze_epochs, freeze_steps, .. } = *config;
        vec![ParameterRule { freeze_epochs, freeze_steps, ..ParameterRule::matching("head.last_layer.*") }]
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let (num_views, num_images) = (batch.views.len(), batch.images.len());
        let encoder = self.encoder();
        let masks = self.masking.draw(batch, encoder.arch().grid());
        let global = Tensor::cat(batch.views[..GLOBAL_VIEWS].to_vec(), 0); // [2 * micro, 3, h, w]
        let device = global.device();

        let tokens = encoder.embed_masked(global.clone(), self.mask_token.val(), masks.tensor(&device));
        let tokens = encoder.encode_tokens(tokens, pass.for_rows(0..GLOBAL_VIEWS * num_images));
        let mut features = vec![encoder.pool(tokens.clone())];
        if num_views > GLOBAL_VIEWS {
            features.push(multicrop::pooled(&self.backbone, batch, GLOBAL_VIEWS..num_views, pass));
        }
        features.extend(masks.select(encoder.patches(tokens)));
        let logits = self.head.forward(Tensor::cat(features, 0)); // [views * micro + hidden, k]
        let [rows, _] = logits.dims();
        let of_views = num_views * num_images;
        let mut tensors = logits.clone().narrow(0, 0, of_views).chunk(num_views, 0);

        let teacher = &self.teacher;
        let mut teacher_pass = pass.without_noise();
        let features = teacher.backbone.forward(global, &mut teacher_pass);
        pass.absorb(teacher_pass);
        let mut constants = teacher.head.forward(features.pooled).chunk(GLOBAL_VIEWS, 0);
        let patches = features.patches.expect("a vision transformer has patches");
        let [views, num_patches, dim] = patches.dims();
        let patches = teacher.head.forward(patches.reshape([views * num_patches, dim])); // [2 * micro * patches, k]
        let [num_rows, k] = patches.dims();
        // the centre of the patches is that of all of them, hidden or not
        let [sum, count] = Center::statistics(patches.clone());
        constants.extend([sum.reshape([1, k]), count.reshape([1, 1])]);
        if let Some(hidden) = masks.select(patches.reshape([views, num_rows / views, k])) {
            tensors.push(logits.narrow(0, of_views, rows - of_views));
            constants.extend([hidden, masks.weights(&device)]);
        }
        Outputs { tensors, constants }
    }

    fn loss(&self, outputs: Outputs, progress: &Progress) -> Loss {
        let Outputs { tensors: mut students, mut constants } = outputs;
        let num_images = students[0].dims()[0] as f64;
        let hidden = constants.split_off(GLOBAL_VIEWS + 2);
        let patch_statistics = constants.split_off(GLOBAL_VIEWS);
        let patches = match <[Tensor<2>; 2]>::try_from(hidden) {
            Ok([teacher, weights]) => {
                let targets = self.patch_center.softmax(teacher, progress.at(&self.patch_temperature));
                let student = students.pop().expect("`encode` puts the hidden patches last");
                let sum = ibot::ibot_masked(student, targets, weights.squeeze_dim(1), self.student_temperature);
                sum / GLOBAL_VIEWS as f64 // a mean over the views of an image
            }
            Err(_) => Tensor::zeros([1], &students[0].device()),
        };
        let temperature = progress.at(&self.teacher_temperature);
        let targets: Vec<_> = constants.iter().map(|logits| self.center.softmax(logits.clone(), temperature)).collect();
        let class = dino::dino(&students, &targets, self.student_temperature);

        let mut statistics = Center::statistics(Tensor::cat(constants, 0)).to_vec();
        statistics.extend(patch_statistics.into_iter().map(|statistic| statistic.squeeze_dim::<1>(0)));
        let parts = vec![("dino", class.clone().detach()), ("ibot", patches.clone().detach())];
        let [_, prototypes] = students[0].dims();
        let loss = Loss::new(class + patches, num_images)
            .with_embeddings(targets[0].clone())
            .with_uniform_part("dino", (prototypes as f64).ln());
        Loss { parts, statistics, ..loss }
    }

    /// The teacher's: it is ahead of the student, and what the released code evaluates.
    fn backbone(&self) -> &Backbone {
        &self.teacher.backbone
    }

    fn teacher_momentum(&self, progress: &Progress) -> Option<f64> {
        Some(progress.at(&self.momentum))
    }

    fn update(&self, statistics: &[Vec<f32>], _progress: &Progress) -> Vec<Update> {
        let moved = |center: &Center, at: usize| center.moved([&statistics[at], &statistics[at + 1]]);
        vec![moved(&self.center, 0), moved(&self.patch_center, 2)]
    }
}
