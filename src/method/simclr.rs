//! SimCLR: each view must pick out the other view of its image from the batch.
//!
//! Chen, Kornblith, Norouzi, Hinton, 2020, <https://arxiv.org/abs/2002.05709>, Algorithm 1. Both views of a micro-batch pass
//! through the network together, as in the official code, so batch norm sees them as one batch.
//!
//! Deviations: batch norm takes its statistics over a micro-batch, not over all replicas; the loss is the mean over the `2 B` anchors (the
//! official code adds the means of the two directions, twice as much).

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::nt_xent;
use crate::model::{Backbone, ConfigError, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::problem::Numbers;

/// The `[method.simclr]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Divides the similarities; positive.
    pub temperature: f64,
    /// Hidden width of the projection head.
    pub hidden: usize,
    /// Width of the projections.
    pub out: usize,
    /// Linear layers of the projection head (2 in the paper, 3 in the released code).
    pub layers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { temperature: 0.1, hidden: 2048, out: 128, layers: 2 }
    }
}

/// Backbone and projection head.
#[derive(Module, Debug)]
pub struct SimClr {
    backbone: Backbone,
    head: ProjectionHead,
    temperature: f64,
}

impl Method for SimClr {
    type Config = Config;

    const SEES: Sees = Sees::GlobalBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let arch = ProjectionHeadArch::simclr(backbone.dim(), config.hidden, config.out, config.layers);
        let head = ProjectionHead::new(&arch, &scope.enter("head"));
        Ok(Self { backbone, head, temperature: config.temperature })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        found.positive("method.simclr.temperature", config.temperature);
        check::head("method.simclr", config.hidden, config.out, config.layers, found);
        check::pair_of_views("simclr", inputs, found);
        check::other_images("simclr", inputs, found);
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        project(&self.backbone, &self.head, batch, pass)
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [first, second]: [Tensor<2>; 2] = outputs.tensors.try_into().expect("`encode` returns two tensors");
        let anchors = 2 * first.dims()[0];
        let uniform = ((anchors - 1) as f64).ln();
        let embeddings = first.clone();
        Loss::new(nt_xent(first, second, self.temperature), anchors as f64)
            .with_uniform(uniform)
            .with_embeddings(embeddings)
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}

/// Passes both views of a micro-batch through the network together; DCL does the same.
pub(super) fn project(backbone: &Backbone, head: &ProjectionHead, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
    let images = Tensor::cat(batch.views.clone(), 0); // [2 * micro, 3, h, w]
    let projections = head.forward(backbone.forward(images, pass).pooled, pass); // [2 * micro, out]
    Outputs { tensors: projections.chunk(2, 0), constants: Vec::new() }
}
