//! `LeJEPA`: all views of an image have the embedding of its global views, and embeddings are distributed as an isotropic Gaussian.
//!
//! Balestriero, `LeCun`, 2025, <https://arxiv.org/abs/2511.08544>; official code `rbalestr-lab/lejepa` (`MINIMAL.md`). The loss is
//! `lambda SIGReg + (1 - lambda) mean((z_v - centre)^2)`: no teacher, no stopped gradient. Views of the first one's size are global; their
//! mean is the centre. Where all views have one size, as in the official minimal example, the centre is the mean of all.
//!
//! `SIGReg` compares the embeddings of the whole global batch, one view at a time, with a Gaussian along random directions, which are new in each
//! step and the same for all views and ranks.
//!
//! Deviations: batch norm takes its statistics over a micro-batch, not over the batch of a device; the projector stands on the backbone's features
//! themselves (the minimal example has one more linear layer between them, and evaluates its outputs).

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check, multicrop};
use crate::loss::{random_directions, sigreg};
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::problem::{MAX_WIDTH, Numbers};
use crate::rng::{Purpose, Stream};

/// The `[method.lejepa]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Weight of `SIGReg`, from 0 to 1; invariance has the rest.
    pub lambda: f64,
    /// Random directions of a step.
    pub slices: usize,
    /// Points of the integral over the characteristic function, on its positive half; at least 2.
    pub knots: usize,
    /// Where the integral ends; positive.
    pub t_max: f64,
    /// Hidden width of the projector.
    pub hidden: usize,
    /// Width of the embeddings (16 to 128 in the paper and its code).
    pub out: usize,
    /// Linear layers of the projector.
    pub layers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { lambda: 0.05, slices: 1024, knots: 17, t_max: 3.0, hidden: 2048, out: 64, layers: 3 }
    }
}

/// Backbone and projector.
#[derive(Module, Debug)]
pub struct LeJepa {
    backbone: Backbone,
    projector: ProjectionHead,
    global: usize,
    #[module(skip)]
    config: Config,
}

impl Method for LeJepa {
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
        found.probability("method.lejepa.lambda", config.lambda);
        found.size("method.lejepa.slices", config.slices, MAX_WIDTH);
        if config.knots < 2 || config.knots > MAX_KNOTS {
            found.limit("method.lejepa.knots", config.knots, &format!("from 2 to {MAX_KNOTS}"));
        }
        found.positive("method.lejepa.t_max", config.t_max);
        check::head("method.lejepa", config.hidden, config.out, config.layers, found);
        check::global_views_first("lejepa", inputs, found);
        check::other_images("lejepa", inputs, found);
        check::batch_norm("lejepa", inputs, found);
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let features = multicrop::pooled(&self.backbone, batch, 0..batch.views.len(), pass);
        let embeddings = self.projector.forward(features, pass); // [v * micro, out], one batch for the norms
        Outputs { tensors: embeddings.chunk(batch.views.len(), 0), constants: Vec::new() }
    }

    /// The parts are the terms before their factors.
    fn loss(&self, outputs: Outputs, progress: &Progress) -> Loss {
        let Config { lambda, slices, knots, t_max, out, .. } = self.config;
        let embeddings = outputs.tensors[0].clone();
        let views = Tensor::stack(outputs.tensors, 0); // [v, b, out]
        let mut stream = Stream::new(progress.seed, Purpose::Directions, &[progress.step]);
        let directions = random_directions(&mut stream, out, slices, &views.device());
        let terms = sigreg::terms(views, self.global, directions, knots, t_max);
        let parts = vec![("invariance", terms.invariance.clone()), ("sigreg", terms.sigreg.clone())];
        Loss { parts, ..Loss::new(terms.weigh(lambda), 1.0).with_embeddings(embeddings) }
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}

/// Each knot is a pass over all projections; the paper finds 17 enough.
const MAX_KNOTS: usize = 1000;
