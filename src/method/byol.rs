//! BYOL: one network predicts what a slowly moving average of itself makes of another view.
//!
//! Grill et al., 2020, <https://arxiv.org/abs/2006.07733>, equations 1 and 2; official code `google-deepmind/deepmind-research`, folder
//! `byol`. The loss is `|q - z|^2 = 2 - 2 cos` of both directions, added, averaged over the images. Each view passes through the networks alone; the
//! target normalises with batch statistics too, and follows when the optimizer has moved the online network.
//!
//! Deviations: batch norm takes its statistics over a micro-batch, not over all replicas (the decay 0.9 of its running statistics is torch's
//! momentum 0.1); the target starts as the online network (the official code draws another, "did not notice a significant difference");
//! linear layers are drawn as torch's default, not from a truncated normal. The official code also trains a linear classifier on the side, from which no gradient comes.

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::cosine;
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::optim::RampConfig;
use crate::problem::{MAX_WIDTH, Numbers};

/// The `[method.byol]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Hidden width of projector and predictor, which have two linear layers each.
    pub hidden: usize,
    /// Width of the projections, and of the predictions.
    pub out: usize,
    /// Momentum of the target network, from 0 to 1: 0.996 to 1 over 1000 epochs, from 0.99 for 100 or 300, from 0.97 for 40.
    pub momentum: RampConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self { hidden: 4096, out: 256, momentum: RampConfig::cosine(0.996, 1.0) }
    }
}

/// Online network with predictor, and target network.
#[derive(Module, Debug)]
pub struct Byol {
    backbone: Backbone,
    projector: ProjectionHead,
    predictor: ProjectionHead,
    teacher: Target,
    #[module(skip)]
    momentum: RampConfig,
}

/// The moving average.
#[derive(Module, Debug)]
struct Target {
    backbone: Backbone,
    projector: ProjectionHead,
}

impl Method for Byol {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let network = |scope: &Scope| -> Result<(Backbone, ProjectionHead), ConfigError> {
            let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
            let arch = head(backbone.dim(), config);
            let projector = ProjectionHead::new(&arch, &scope.enter("projector"));
            Ok((backbone, projector))
        };
        let (backbone, projector) = network(scope)?;
        let predictor = ProjectionHead::new(&head(config.out, config), &scope.enter("predictor"));
        let target = network(&scope.untrained())?;
        let teacher = Target { backbone: target.0, projector: target.1 };
        Ok(Self { backbone, projector, predictor, teacher, momentum: config.momentum })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        found.size("method.byol.hidden", config.hidden, MAX_WIDTH);
        found.size("method.byol.out", config.out, MAX_WIDTH);
        check::momentum("method.byol.momentum", &config.momentum, found);
        check::pair_of_views("byol", inputs, found);
        check::batch_norm("byol", inputs, found);
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let num_images = batch.images.len();
        let mut targets_pass = pass.without_noise();
        let mut outputs = Outputs::default();
        for (view, images) in batch.views.iter().enumerate() {
            pass.for_rows(view * num_images..(view + 1) * num_images);
            let projection = self.projector.forward(self.backbone.forward(images.clone(), pass).pooled, pass);
            outputs.tensors.push(self.predictor.forward(projection, pass)); // [micro, out]
            let pooled = self.teacher.backbone.forward(images.clone(), &mut targets_pass).pooled;
            outputs.constants.push(self.teacher.projector.forward(pooled, &mut targets_pass));
        }
        pass.absorb(targets_pass);
        outputs
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let predictions: [Tensor<2>; 2] = outputs.tensors.try_into().expect("`encode` returns two tensors");
        let targets: [Tensor<2>; 2] = outputs.constants.try_into().expect("`encode` returns two constants");
        let images = predictions[0].dims()[0];
        let embeddings = targets[0].clone();
        Loss::new(cosine::byol(predictions, targets), images as f64).with_embeddings(embeddings)
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn teacher_momentum(&self, progress: &Progress) -> Option<f64> {
        Some(progress.at(&self.momentum))
    }
}

/// Linear with bias, batch norm, `ReLU`, linear without bias.
fn head(inputs: usize, config: &Config) -> ProjectionHeadArch {
    let last = LastLayer::Linear { bias: false };
    ProjectionHeadArch::mlp(inputs, config.hidden, config.out, 2, last).with_hidden_bias()
}
