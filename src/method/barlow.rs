//! Barlow Twins: a feature of one view agrees with itself in the other view and with no other feature.
//!
//! Zbontar, Jing, Misra, `LeCun`, Deny, 2021, <https://arxiv.org/abs/2103.03230>, Algorithm 1 and equation 1; official code
//! `facebookresearch/barlowtwins`. Each view passes through the network alone. The features are standardised, and correlated, over the whole global
//! batch, however it is cut; the gradient is that of this loss (the official code's is smaller by the number of devices, which
//! LARS hides for all but biases and norms).
//!
//! Deviations: batch norm inside the network takes its statistics over a micro-batch, not over all devices.

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::barlow_twins;
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::problem::Numbers;

/// The `[method.barlow]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Weight of the correlations of different features; at least 0.
    pub lambda: f64,
    /// Hidden width of the projector.
    pub hidden: usize,
    /// Width of the projections; the loss has as many numbers squared, so at most 16384.
    pub out: usize,
    /// Linear layers of the projector.
    pub layers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { lambda: 0.0051, hidden: 8192, out: 8192, layers: 3 }
    }
}

/// Backbone and projector.
#[derive(Module, Debug)]
pub struct BarlowTwins {
    backbone: Backbone,
    projector: ProjectionHead,
    lambda: f64,
}

impl Method for BarlowTwins {
    type Config = Config;

    const SEES: Sees = Sees::GlobalBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let last = LastLayer::Linear { bias: false };
        let arch = ProjectionHeadArch::mlp(backbone.dim(), config.hidden, config.out, config.layers, last);
        let projector = ProjectionHead::new(&arch, &scope.enter("projector"));
        Ok(Self { backbone, projector, lambda: config.lambda })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        found.not_negative("method.barlow.lambda", config.lambda);
        check::head("method.barlow", config.hidden, config.out, config.layers, found);
        check::squared_width("method.barlow", config.out, found);
        check::pair_of_views("barlow", inputs, found);
        check::other_images("barlow", inputs, found);
        check::batch_norm("barlow", inputs, found);
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let num_images = batch.images.len();
        let mut outputs = Outputs::default();
        for (view, images) in batch.views.iter().enumerate() {
            pass.for_rows(view * num_images..(view + 1) * num_images);
            let pooled = self.backbone.forward(images.clone(), pass).pooled;
            outputs.tensors.push(self.projector.forward(pooled, pass)); // [micro, out]
        }
        outputs
    }

    /// The parts are the two sums before `lambda`.
    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [first, second]: [Tensor<2>; 2] = outputs.tensors.try_into().expect("`encode` returns two tensors");
        let embeddings = first.clone();
        let terms = barlow_twins::terms(first, second);
        let parts = vec![("on_diagonal", terms.on_diagonal.clone()), ("off_diagonal", terms.off_diagonal.clone())];
        Loss { parts, ..Loss::new(terms.weigh(self.lambda), 1.0).with_embeddings(embeddings) }
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}
