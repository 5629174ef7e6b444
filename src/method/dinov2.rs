//! `DINOv2`: DINO and iBOT with heads of their own, and features that spread out.
//!
//! Oquab et al., 2023, <https://arxiv.org/abs/2304.07193>, section 4; official code `ssl_meta_arch.py`. The loss is DINO's of the class tokens, plus iBOT's
//! of the hidden patches, plus `KoLeo` of the student's class tokens before the head, summed over the two global views. The teacher's
//! distributions come from centring ("softmax", the released ImageNet-1k setting) or from Sinkhorn-Knopp in its place ("sinkhorn", the paper's).
//!
//! Deviations: `KoLeo` finds neighbours within a micro-batch (official: the images of one GPU), and Sinkhorn-Knopp balances the prototypes over a
//! micro-batch (official: over the global batch), so that no logits are gathered and any number of ranks gives the same bits; targets get
//! softer with fewer images in a micro-batch. Each global view is masked with probability `mask_prob` and a uniform ratio, keyed by image, view
//! and epoch (official: exactly that share of a GPU's views, ratios from equal parts of the range). Centres move to the mean of the
//! global batch (official: of each GPU's means). The frozen last layer has neither
//! gradient nor moments until it thaws (official: a rate of 0). Positions, class token and open values as in [`super::dino`].

mod config;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

pub use config::{Centering, Config};

use super::center::Center;
use super::masked_views::{self, Masking};
use super::multicrop::{self, GLOBAL_VIEWS};
use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, RunFacts, Sees, Update};
use crate::loss::koleo::koleo;
use crate::loss::{dino, ibot, sinkhorn};
use crate::model::{Backbone, ConfigError, DinoHead, DinoHeadArch, Init, Pass, Scope, Vit};
use crate::optim::{ParameterRule, RampConfig};
use crate::problem::Numbers;

/// Smallest norm and distance of `KoLeo`.
const EPSILON: f64 = 1e-8;
/// Rounds of Sinkhorn-Knopp.
const ROUNDS: usize = 3;

/// Student, teacher and centres.
#[derive(Module, Debug)]
pub struct DinoV2 {
    backbone: Backbone,
    head: DinoHead,
    patch_head: Option<DinoHead>,
    mask_token: Param<Tensor<3>>,
    teacher: Teacher,
    center: Option<Center>,
    patch_center: Option<Center>,
    student_temperature: f64,
    ibot_weight: f64,
    koleo_weight: f64,
    #[module(skip)]
    masking: Masking,
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
    patch_head: Option<DinoHead>,
}

impl Teacher {
    fn new(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let head = DinoHead::new(&config.head(backbone.dim()), &scope.enter("head"));
        let patch_head = (!config.shared_head)
            .then(|| DinoHead::new(&config.patch_head(backbone.dim()), &scope.enter("patch_head")));
        Ok(Self { backbone, head, patch_head })
    }
}

impl DinoV2 {
    fn encoder(&self) -> &Vit {
        self.backbone.vit().expect("`build` accepts vision transformers only")
    }

    fn targets(&self, center: Option<&Center>, logits: Tensor<2>, progress: &Progress) -> Tensor<2> {
        let temperature = progress.at(&self.teacher_temperature);
        match center {
            Some(center) => center.softmax(logits, temperature),
            None => sinkhorn(logits, temperature, ROUNDS),
        }
    }
}

impl Method for DinoV2 {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let Teacher { backbone, head, patch_head } = Teacher::new(config, inputs, scope)?;
        let arch = masked_views::encoder("dinov2", &backbone)?.arch();
        let masking = Masking { prob: config.mask_prob, ratio: config.mask_ratio, least: 4 };
        let mask_token = scope.param("mask_token", [1, 1, arch.dim], Init::Zeros);
        let center = |name: &str, arch: &DinoHeadArch| {
            (config.centering == Centering::Softmax)
                .then(|| Center::new(arch.prototypes, config.center_momentum, &scope.enter(name)))
        };
        Ok(Self {
            backbone,
            head,
            patch_head,
            mask_token,
            teacher: Teacher::new(config, inputs, &scope.untrained())?,
            center: center("center", &config.head(1)),
            patch_center: center("patch_center", &config.patch_head(1)),
            student_temperature: config.student_temperature,
            ibot_weight: config.ibot_weight,
            koleo_weight: config.koleo_weight,
            masking,
            teacher_temperature: config.teacher_temperature.unwrap_or(RampConfig::constant(0.04)),
            momentum: config.momentum.unwrap_or(RampConfig::cosine(0.992, 1.0)),
        })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        config.check(inputs, found);
    }

    fn resolve(config: &mut Config, facts: &RunFacts) -> Vec<String> {
        config.resolve(facts)
    }

    fn rules(config: &Config) -> Vec<ParameterRule> {
        let Config { freeze_epochs, freeze_steps, .. } = *config;
        let heads = "head.last_layer.*|patch_head.last_layer.*";
        vec![ParameterRule { freeze_epochs, freeze_steps, ..ParameterRule::matching(heads) }]
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let (num_views, num_images) = (batch.views.len(), batch.images.len());
        let encoder = self.encoder();
        let masks = self.masking.draw(batch, encoder.arch().grid());
        let global = Tensor::cat(batch.views[..GLOBAL_VIEWS].to_vec(), 0); // [2 * micro, 3, h, w]
        let device = global.device();

        let tokens = encoder.embed_masked(global.clone(), self.mask_token.val(), masks.tensor(&device));
        let tokens = encoder.encode_tokens(tokens, pass.for_rows(0..GLOBAL_VIEWS * num_images));
        let class = encoder.pool(tokens.clone()); // [2 * micro, dim]
        let mut features = vec![class.clone()];
        if num_views > GLOBAL_VIEWS {
            features.push(multicrop::pooled(&self.backbone, batch, GLOBAL_VIEWS..num_views, pass));
        }
        let mut tensors = self.head.forward(Tensor::cat(features, 0)).chunk(num_views, 0);
        tensors.extend(class.chunk(GLOBAL_VIEWS, 0));

        let teacher = &self.teacher;
        let mut teacher_pass = pass.without_noise();
        let features = teacher.backbone.forward(global, &mut teacher_pass);
        pass.absorb(teacher_pass);
        let mut constants = teacher.head.forward(features.pooled).chunk(GLOBAL_VIEWS, 0);
        let patches = masks.select(features.patches.expect("a vision transformer has patches"));
        if let (Some(student), Some(target)) = (masks.select(encoder.patches(tokens)), patches) {
            tensors.push(self.patch_head.as_ref().unwrap_or(&self.head).forward(student)); // [hidden, k]
            constants.push(teacher.patch_head.as_ref().unwrap_or(&teacher.head).forward(target));
            constants.push(masks.weights(&device));
        }
        Outputs { tensors, constants }
    }

    fn loss(&self, outputs: Outputs, progress: &Progress) -> Loss {
        let Outputs { tensors: mut students, constants: mut teachers } = outputs;
        let device = students[0].device();
        let [num_images, _] = students[0].dims();
        let hidden = <[Tensor<2>; 2]>::try_from(teachers.split_off(GLOBAL_VIEWS)).ok();
        let (patches, patch_statistics) = match hidden {
            Some([teacher, weights]) => {
                let student = students.pop().expect("`encode` puts the hidden patches last");
                let targets = self.targets(self.patch_center.as_ref(), teacher.clone(), progress);
                let sum = ibot::ibot_masked(student, targets, weights.squeeze_dim(1), self.student_temperature);
                // a mean over the views of an image
                let sum = sum * (self.ibot_weight / GLOBAL_VIEWS as f64);
                (sum, self.patch_center.as_ref().map(|_| Center::statistics(teacher)))
            }
            None => (Tensor::zeros([1], &device), self.patch_center.as_ref().map(Center::no_statistics)),
        };

        let tokens = students.split_off(students.len() - GLOBAL_VIEWS);
        let spread = if self.koleo_weight == 0.0 {
            Tensor::zeros([1], &device)
        } else {
            tokens.into_iter().map(|view| koleo(view, EPSILON)).reduce(|a, b| a + b).expect("two views")
                * self.koleo_weight
        };

        let teacher = Tensor::cat(teachers, 0);
        let statistics = self.center.as_ref().map(|_| Center::statistics(teacher.clone()));
        let targets = self.targets(self.center.as_ref(), teacher, progress).chunk(GLOBAL_VIEWS, 0);
        let class = dino::dino(&students, &targets, self.student_temperature);
        let [_, prototypes] = students[0].dims();
        let loss = Loss::new(class.clone() + patches.clone() + spread.clone(), num_images as f64)
            .with_embeddings(targets[0].clone())
            .with_uniform_part("dino", (prototypes as f64).ln());
        let parts = [("dino", &class), ("ibot", &patches), ("koleo", &spread)];
        Loss {
            parts: parts.map(|(name, part)| (name, part.clone().detach())).to_vec(),
            statistics: [statistics, patch_statistics].into_iter().flatten().flatten().collect(),
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
        let centers = [self.center.as_ref(), self.patch_center.as_ref()].into_iter().flatten();
        centers.zip(statistics.chunks(2)).map(|(center, both)| center.moved([&both[0], &both[1]])).collect()
    }
}
