//! `VICReg`: two views have the same embedding (invariance), each feature varies over the batch (variance), no two vary together (covariance).
//!
//! Bardes, Ponce, `LeCun`, 2021, <https://arxiv.org/abs/2105.04906>, Algorithm 1 and equations 1 to 6; official code `facebookresearch/vicreg`.
//! Each view passes through the network alone. Variances and covariances are those of the whole global batch, however it is cut.
//!
//! Deviations: batch norm inside the network takes its statistics over a micro-batch, not over all devices.

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::vicreg::{self, Weights};
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::problem::Numbers;

/// The `[method.vicreg]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Factor of the mean squared difference of the views; at least 0, as the other two.
    pub invariance: f64,
    /// Factor of the hinge that keeps the standard deviation of each feature at 1 or above.
    pub variance: f64,
    /// Factor of the squared covariances.
    pub covariance: f64,
    /// Hidden width of the expander.
    pub hidden: usize,
    /// Width of the embeddings; the loss has as many numbers squared, so at most 16384.
    pub out: usize,
    /// Linear layers of the expander.
    pub layers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { invariance: 25.0, variance: 25.0, covariance: 1.0, hidden: 8192, out: 8192, layers: 3 }
    }
}

/// Backbone and expander.
#[derive(Module, Debug)]
pub struct VicReg {
    backbone: Backbone,
    expander: ProjectionHead,
    #[module(skip)]
    weights: Weights,
}

impl Method for VicReg {
    type Config = Config;

    const SEES: Sees = Sees::GlobalBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let Config { invariance, variance, covariance, hidden, out, layers } = *config;
        let last = LastLayer::Linear { bias: false };
        let arch = ProjectionHeadArch::mlp(backbone.dim(), hidden, out, layers, last).with_hidden_bias();
        let expander = ProjectionHead::new(&arch, &scope.enter("expander"));
        Ok(Self { backbone, expander, weights: Weights { invariance, variance, covariance } })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        let Config { invariance, variance, covariance, hidden, out, layers } = *config;
        for (key, weight) in [("invariance", invariance), ("variance", variance), ("covariance", covariance)] {
            found.not_negative(&format!("method.vicreg.{key}"), weight);
        }
        check::head("method.vicreg", hidden, out, layers, found);
        check::squared_width("method.vicreg", out, found);
        check::pair_of_views("vicreg", inputs, found);
        check::other_images("vicreg", inputs, found);
        check::batch_norm("vicreg", inputs, found);
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let num_images = batch.images.len();
        let mut outputs = Outputs::default();
        for (view, images) in batch.views.iter().enumerate() {
            pass.for_rows(view * num_images..(view + 1) * num_images);
            let pooled = self.backbone.forward(images.clone(), pass).pooled;
            outputs.tensors.push(self.expander.forward(pooled, pass)); // [micro, out]
        }
        outputs
    }

    /// The parts are the terms before their factors.
    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [first, second]: [Tensor<2>; 2] = outputs.tensors.try_into().expect("`encode` returns two tensors");
        let embeddings = first.clone();
        let terms = vicreg::terms(first, second);
        let parts = vec![
            ("invariance", terms.invariance.clone()),
            ("variance", terms.variance.clone()),
            ("covariance", terms.covariance.clone()),
        ];
        Loss { parts, ..Loss::new(terms.weigh(self.weights), 1.0).with_embeddings(embeddings) }
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}
