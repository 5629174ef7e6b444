//! `SimSiam`: one network predicts what it makes itself of another view; a stopped gradient keeps it from collapsing.
//!
//! Chen, He, 2020, <https://arxiv.org/abs/2011.10566>, Algorithm 1 and equation 2; official code `facebookresearch/simsiam`. The projector
//! ends in a batch norm without scale and offset (`affine=False`), and the learning rate of the predictor doesn't decay (section 4.2,
//! `--fix-pred-lr`). Each view passes through the network alone. As published, the rate moves between epochs, every parameter decays and residual branches
//! start at zero; those are the recipe's (`each = "epoch"`, `decay_all`, `zero_init_residual`).
//!
//! Deviations: batch norm takes its statistics over a micro-batch, not over all devices; the released code also freezes a bias in front of
//! the projector's last batch norm, which undoes it, so it isn't here.

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::{cosine, l2_normalize};
use crate::model::layers::Affine;
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::optim::ParameterRule;
use crate::problem::{MAX_WIDTH, Numbers};

/// The `[method.simsiam]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Hidden width of the projector.
    pub hidden: usize,
    /// Width of the projections, and of the predictions.
    pub out: usize,
    /// Linear layers of the projector: 3, and 2 for CIFAR-10 (appendix D).
    pub layers: usize,
    /// Hidden width of the predictor; a quarter of `out` works best (appendix B). 0: no predictor, which collapses (section 4.2).
    pub predictor_hidden: usize,
    /// Keeps the learning rate of the predictor where it is after the warm-up.
    pub fixed_predictor_lr: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { hidden: 2048, out: 2048, layers: 3, predictor_hidden: 512, fixed_predictor_lr: true }
    }
}

/// Backbone, projector and predictor.
#[derive(Module, Debug)]
pub struct SimSiam {
    backbone: Backbone,
    projector: ProjectionHead,
    predictor: Option<ProjectionHead>,
}

impl Method for SimSiam {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let Config { hidden, out, layers, predictor_hidden, .. } = *config;
        let projector = ProjectionHeadArch::mlp(backbone.dim(), hidden, out, layers, LastLayer::Norm(Affine::None));
        let predictor = ProjectionHeadArch::mlp(out, predictor_hidden, out, 2, LastLayer::Linear { bias: true });
        Ok(Self {
            backbone,
            projector: ProjectionHead::new(&projector, &scope.enter("projector")),
            predictor: (predictor_hidden > 0).then(|| ProjectionHead::new(&predictor, &scope.enter("predictor"))),
        })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        check::head("method.simsiam", config.hidden, config.out, config.layers, found);
        if config.predictor_hidden > 0 {
            found.size("method.simsiam.predictor_hidden", config.predictor_hidden, MAX_WIDTH);
        }
        check::pair_of_views("simsiam", inputs, found);
        check::batch_norm("simsiam", inputs, found);
    }

    fn rules(config: &Config) -> Vec<ParameterRule> {
        let fixed = ParameterRule { fixed_lr: Some(true), ..ParameterRule::matching("predictor.*") };
        if config.fixed_predictor_lr && config.predictor_hidden > 0 { vec![fixed] } else { Vec::new() }
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let num_images = batch.images.len();
        let mut outputs = Outputs::default();
        for (view, images) in batch.views.iter().enumerate() {
            pass.for_rows(view * num_images..(view + 1) * num_images);
            let projection = self.projector.forward(self.backbone.forward(images.clone(), pass).pooled, pass);
            outputs.constants.push(projection.clone().detach()); // [micro, out]
            outputs.tensors.push(match &self.predictor {
                Some(predictor) => predictor.forward(projection, pass),
                None => projection,
            });
        }
        outputs
    }

    /// The part `projection_std` is section 4.1's sign of collapse: the standard deviation of a channel of the projections scaled to
    /// length 1. It is about `1 / sqrt(out)` in a healthy run and 0 in a collapsed one, whose loss is -1.
    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let predictions: [Tensor<2>; 2] = outputs.tensors.try_into().expect("`encode` returns two tensors");
        let targets: [Tensor<2>; 2] = outputs.constants.try_into().expect("`encode` returns two constants");
        let images = predictions[0].dims()[0] as f64;
        let units = l2_normalize(Tensor::cat(targets.to_vec(), 0), 1e-8); // [2 * micro, out]
        let variance = (units.clone() - units.mean_dim(0)).square().mean_dim(0);
        let std = variance.sqrt().mean() * images; // the mean over micro-batches, once the engine has divided
        let embeddings = targets[0].clone();
        let loss = Loss::new(cosine::simsiam(predictions, targets), images).with_embeddings(embeddings);
        Loss { parts: vec![("projection_std", std)], ..loss }
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}
