//! `VISReg`: all views of an image have the embedding of its global views; scale, shape and centre of the embeddings each have a term of their own.
//!
//! Wu, Balestriero, Levine, 2026, <https://arxiv.org/abs/2606.02572>, Algorithm 1, as [`crate::loss::visreg`] defines it:
//! `(1 - lambda) invariance + lambda (scale + shape + centre)`, where shape is a sliced Wasserstein distance from a Gaussian. Views of the
//! first one's size are global; their mean is the centre of invariance. The projector has three layers, as the paper's.
//!
//! Deviations: the statistics are those of the whole global batch, along the same directions on every rank (the paper: of each device's
//! batch, along its own directions, so that devices multiply the directions); batch norm takes its statistics over a micro-batch; the projector has
//! `ReLU` (the paper: GELU) and sees what the backbone pools (there the class tokens of the last two blocks).

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check, multicrop};
use crate::loss::random_directions;
use crate::loss::visreg::{self, Weights};
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::problem::{MAX_WIDTH, Numbers};
use crate::rng::{Purpose, Stream};

/// The `[method.visreg]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Weight of the three terms of the batch, from 0 to 1; invariance has the rest. 0.9 for ImageNet, 0.6 for small data.
    pub lambda: f64,
    /// Factor of the standard deviations' distance from 1; at least 0, as the next two.
    pub scale: f64,
    /// Factor of the distance from a Gaussian; more for long-tailed data.
    pub shape: f64,
    /// Factor of the mean's distance from 0.
    pub center: f64,
    /// Random directions of a step.
    pub slices: usize,
    /// Hidden width of the projector.
    pub hidden: usize,
    /// Width of the embeddings.
    pub out: usize,
    /// Linear layers of the projector.
    pub layers: usize,
}

impl Default for Config {
    fn default() -> Self {
        let (scale, shape, center) = (1.0, 1.0, 1.0);
        Self { lambda: 0.9, scale, shape, center, slices: 4096, hidden: 2048, out: 512, layers: 3 }
    }
}

/// Backbone and projector.
#[derive(Module, Debug)]
pub struct VisReg {
    backbone: Backbone,
    projector: ProjectionHead,
    global: usize,
    #[module(skip)]
    config: Config,
}

impl Method for VisReg {
    type Config = Config;

    const SEES: Sees = Sees::GlobalBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let last = LastLayer::Linear { bias: true };
        let arch = ProjectionHeadArch::mlp(backbone.dim(), config.hidden, config.out, config.layers, last);
        let projector = ProjectionHead::new(&arch.with_hidden_bias(), &scope.enter("projector"));
        Ok(Self { backbone, projector, global: multicrop::num_global(inputs), config: config.clone() })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        found.probability("method.visreg.lambda", config.lambda);
        for (key, weight) in [("scale", config.scale), ("shape", config.shape), ("center", config.center)] {
            found.not_negative(&format!("method.visreg.{key}"), weight);
        }
        found.size("method.visreg.slices", config.slices, MAX_WIDTH);
        check::head("method.visreg", config.hidden, config.out, config.layers, found);
        check::global_views_first("visreg", inputs, found);
        check::other_images("visreg", inputs, found);
        check::batch_norm("visreg", inputs, found);
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let features = multicrop::pooled(&self.backbone, batch, 0..batch.views.len(), pass);
        let embeddings = self.projector.forward(features, pass); // [v * micro, out], one batch for the norms
        Outputs { tensors: embeddings.chunk(batch.views.len(), 0), constants: Vec::new() }
    }

    /// The parts are the terms before their factors.
    fn loss(&self, outputs: Outputs, progress: &Progress) -> Loss {
        let Config { lambda, scale, shape, center, slices, out, .. } = self.config;
        let embeddings = outputs.tensors[0].clone();
        let views = Tensor::stack(outputs.tensors, 0); // [v, b, out]
        let mut stream = Stream::new(progress.seed, Purpose::Directions, &[progress.step]);
        let directions = random_directions(&mut stream, out, slices, &views.device());
        let terms = visreg::terms(views, self.global, directions, EPSILON);
        let parts = vec![
            ("invariance", terms.invariance.clone()),
            ("scale", terms.scale.clone()),
            ("shape", terms.shape.clone()),
            ("center", terms.center.clone()),
        ];
        Loss {
            parts,
            ..Loss::new(terms.weigh(lambda, Weights { scale, shape, center }), 1.0).with_embeddings(embeddings)
        }
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}

/// Added to the standard deviation that embeddings are divided by.
const EPSILON: f64 = 1e-4;
