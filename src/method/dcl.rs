//! DCL: SimCLR without the positive pair in the denominator of its loss, and DCLW, which weights pairs by how far apart they are.
//!
//! Yeh, Hong, Hsu, Liu, Chen, `LeCun`, 2021, <https://arxiv.org/abs/2110.06848>, equations 5 (DCL) and 6 (DCLW); the losses are as in
//! `raminnakhli/Decoupled-Contrastive-Learning`. Without the positive the gradient does not fade where a pair is easy, so small batches suffice. The
//! network is SimCLR's.
//!
//! Deviations: those of SimCLR; the weights of equation 6 are a softmax over the whole global batch.

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check, simclr};
use crate::loss::dcl::dcl;
use crate::model::{Backbone, ConfigError, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::problem::Numbers;

/// The `[method.dcl]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Divides the similarities; positive.
    pub temperature: f64,
    /// Hidden width of the projection head.
    pub hidden: usize,
    /// Width of the projections.
    pub out: usize,
    /// Linear layers of the projection head.
    pub layers: usize,
    /// Makes it DCLW: pairs have the weight `2 - B softmax(cos / sigma)`, more for those far apart. The paper has 0.5; absent: all weights are 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sigma: Option<f64>,
}

impl Default for Config {
    fn default() -> Self {
        Self { temperature: 0.1, hidden: 2048, out: 128, layers: 2, sigma: None }
    }
}

/// Backbone and projection head.
#[derive(Module, Debug)]
pub struct Dcl {
    backbone: Backbone,
    head: ProjectionHead,
    temperature: f64,
    #[module(skip)]
    sigma: Option<f64>,
}

impl Method for Dcl {
    type Config = Config;

    const SEES: Sees = Sees::GlobalBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let arch = ProjectionHeadArch::simclr(backbone.dim(), config.hidden, config.out, config.layers);
        let head = ProjectionHead::new(&arch, &scope.enter("head"));
        Ok(Self { backbone, head, temperature: config.temperature, sigma: config.sigma })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        found.positive("method.dcl.temperature", config.temperature);
        config.sigma.map(|sigma| found.positive("method.dcl.sigma", sigma));
        check::head("method.dcl", config.hidden, config.out, config.layers, found);
        check::pair_of_views("dcl", inputs, found);
        check::other_images("dcl", inputs, found);
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        simclr::project(&self.backbone, &self.head, batch, pass)
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [first, second]: [Tensor<2>; 2] = outputs.tensors.try_into().expect("`encode` returns two tensors");
        let anchors = 2 * first.dims()[0];
        let embeddings = first.clone();
        let uniform = (anchors as f64 - 2.0).ln(); // against the 2b - 2 of other images
        Loss::new(dcl(first, second, self.temperature, self.sigma), anchors as f64)
            .with_uniform(uniform)
            .with_embeddings(embeddings)
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}
