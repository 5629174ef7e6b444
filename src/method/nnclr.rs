//! NNCLR: the nearest neighbour of one view, among embeddings of earlier images, must be picked out by the other view.
//!
//! Dwibedi, Aytar, Tompson, Sermanet, Zisserman, 2021, <https://arxiv.org/abs/2104.14548>, equations 2 and 3, algorithm 1. There is no official
//! code. Neighbours are searched in a support set, a queue of the first views' embeddings that the batch
//! enters after its loss; gradients pass through the predictions alone.
//!
//! Deviations: each direction contrasts the neighbours and predictions of the batch all with all (NT-Xent, as lightly), where the
//! paper contrasts a neighbour with predictions only; the loss is the mean over these `4 B` anchors. Batch norm takes its statistics over a micro-batch,
//! not over all replicas.

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::queue::{MAX_QUEUE, Queue};
use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, Update, check};
use crate::loss::info_nce::{nearest_neighbors, nnclr};
use crate::model::layers::Affine;
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::problem::{MAX_WIDTH, Numbers};

/// The `[method.nnclr]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Divides the similarities; positive.
    pub temperature: f64,
    /// Hidden width of the projector, which has 3 layers.
    pub hidden: usize,
    /// Width of the embeddings.
    pub out: usize,
    /// Hidden width of the predictor, which has 2 layers.
    pub predictor_hidden: usize,
    /// Embeddings in the support set. It starts with random ones, so it should be full within an epoch or two.
    pub queue: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { temperature: 0.1, hidden: 2048, out: 256, predictor_hidden: 4096, queue: 98_304 }
    }
}

/// Backbone, projector, predictor and support set.
#[derive(Module, Debug)]
pub struct Nnclr {
    backbone: Backbone,
    projector: ProjectionHead,
    predictor: ProjectionHead,
    queue: Queue,
    temperature: f64,
}

impl Method for Nnclr {
    type Config = Config;

    const SEES: Sees = Sees::GlobalBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let Config { temperature, hidden, out, predictor_hidden, queue } = *config;
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let projector = ProjectionHeadArch::mlp(backbone.dim(), hidden, out, 3, LastLayer::Norm(Affine::Full));
        let predictor = ProjectionHeadArch::mlp(out, predictor_hidden, out, 2, LastLayer::Linear { bias: true });
        Ok(Self {
            backbone,
            projector: ProjectionHead::new(&projector, &scope.enter("projector")),
            predictor: ProjectionHead::new(&predictor, &scope.enter("predictor")),
            queue: Queue::random(queue, out, &scope.enter("queue")),
            temperature,
        })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        found.positive("method.nnclr.temperature", config.temperature);
        found.size("method.nnclr.hidden", config.hidden, MAX_WIDTH);
        found.size("method.nnclr.out", config.out, MAX_WIDTH);
        found.size("method.nnclr.predictor_hidden", config.predictor_hidden, MAX_WIDTH);
        found.size("method.nnclr.queue", config.queue, MAX_QUEUE);
        check::pair_of_views("nnclr", inputs, found);
        check::other_images("nnclr", inputs, found);
        check::images_to_normalise("nnclr", inputs, found);
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let num_images = batch.images.len();
        let mut outputs = Outputs::default();
        for (view, images) in batch.views.iter().enumerate() {
            pass.for_rows(view * num_images..(view + 1) * num_images);
            let embedding = self.projector.forward(self.backbone.forward(images.clone(), pass).pooled, pass);
            outputs.constants.push(embedding.clone().detach()); // [micro, out]
            outputs.tensors.push(self.predictor.forward(embedding, pass));
        }
        outputs
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let predictions: [Tensor<2>; 2] = outputs.tensors.try_into().expect("`encode` returns two tensors");
        let embeddings: [Tensor<2>; 2] = outputs.constants.try_into().expect("`encode` returns two constants");
        let anchors = 4 * predictions[0].dims()[0];
        let shown = embeddings[0].clone();
        let newest = shown.clone().flatten(0, 1);
        let neighbors = embeddings.map(|embedding| nearest_neighbors(embedding, self.queue.rows()));
        let sum = nnclr(neighbors, predictions, self.temperature);
        let uniform = (anchors as f64 / 2.0 - 1.0).ln(); // against the 2b - 1 others
        let loss = Loss::new(sum, anchors as f64).with_uniform(uniform).with_embeddings(shown);
        Loss { statistics: vec![newest], ..loss }
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn update(&self, statistics: &[Vec<f32>], _progress: &Progress) -> Vec<Update> {
        self.queue.push(&statistics[0]).into()
    }
}
