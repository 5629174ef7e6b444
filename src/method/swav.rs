//! `SwAV`: a view's code, an assignment to prototypes that uses all of them equally, must be predicted from the other views.
//!
//! Caron, Misra, Mairal, Goyal, Bojanowski, Joulin, 2020, <https://arxiv.org/abs/2006.09882>, equations 2 and 5, algorithm 1; official code
//! `facebookresearch/swav`, `main_swav.py`. The first two views have codes, all views predict them (multi-crop: give smaller views in a second table);
//! consecutive views of one size pass through the backbone together, and all through the head, as in the official code. Prototypes have length 1
//! and are kept as they were drawn in the first steps.
//!
//! Codes are made over the whole global batch by every rank alike, and over the queue where there is one: embeddings of earlier batches, one
//! queue for each of the two views, in use once it is full.
//!
//! Deviations: batch norm takes its statistics over a micro-batch, not over 8 GPUs; Sinkhorn-Knopp works with logarithms, which don't
//! overflow; prototypes are scaled behind each step instead of in front of it; the resnet is torchvision's (the official one pads its input).

use burn::module::{Module, ParamId};
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::queue::{MAX_QUEUE, Queue};
use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, RunFacts, Sees, Update, check, multicrop};
use crate::loss::{l2_normalize, swav};
use crate::model::layers::Linear;
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::optim::ParameterRule;
use crate::problem::{MAX_DEPTH, MAX_WIDTH, Numbers};

/// Views with codes, `crops_for_assign` of the official code.
const CODED: usize = 2;

/// The `[method.swav]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Divides the scores that predict a code; positive.
    pub temperature: f64,
    /// Divides the scores that a code is made of; positive. Smaller codes are harder; 0.03 helps where the loss stays at `ln(prototypes)`.
    pub epsilon: f64,
    /// Rounds of Sinkhorn-Knopp.
    pub iterations: usize,
    /// Hidden width of the projection head.
    pub hidden: usize,
    /// Width of embeddings and prototypes.
    pub out: usize,
    /// Prototypes; the paper has about three for each class of `ImageNet`.
    pub prototypes: usize,
    /// Steps in which the prototypes stay as they were drawn.
    pub freeze_steps: u64,
    /// Embeddings of earlier batches that share in the assignment, for batches of fewer images than prototypes; 0: none.
    pub queue: usize,
    /// Epoch from which on the queue is filled, counted from 0.
    pub queue_start_epoch: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            temperature: 0.1,
            epsilon: 0.05,
            iterations: 3,
            hidden: 2048,
            out: 128,
            prototypes: 3000,
            freeze_steps: 313,
            queue: 0,
            queue_start_epoch: 15,
        }
    }
}

/// Backbone, head, prototypes and queues.
#[derive(Module, Debug)]
pub struct SwAv {
    backbone: Backbone,
    head: ProjectionHead,
    prototypes: Linear,
    queues: Vec<Queue>,
    #[module(skip)]
    config: Config,
}

impl Method for SwAv {
    type Config = Config;

    const SEES: Sees = Sees::GlobalBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let Config { hidden, out, prototypes, queue, .. } = *config;
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let last = LastLayer::Linear { bias: true };
        let arch = ProjectionHeadArch::mlp(backbone.dim(), hidden, out, 2, last).with_hidden_bias();
        let head = ProjectionHead::new(&arch, &scope.enter("head"));
        let prototypes = Linear::torch_default(out, prototypes, false, &scope.enter("prototypes"));
        let queues = if queue == 0 { 0..0 } else { 0..CODED };
        let queues = queues.map(|view| Queue::empty(queue, out, &scope.enter("queues").enter(view))).collect();
        Ok(Self { backbone, head, prototypes, queues, config: config.clone() })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        found.positive("method.swav.temperature", config.temperature);
        found.positive("method.swav.epsilon", config.epsilon);
        found.size("method.swav.iterations", config.iterations, MAX_DEPTH);
        found.size("method.swav.hidden", config.hidden, MAX_WIDTH);
        found.size("method.swav.out", config.out, MAX_WIDTH);
        if found.size("method.swav.prototypes", config.prototypes, MAX_WIDTH) && config.prototypes == 1 {
            found.limit("method.swav.prototypes", 1, "at least 2");
        }
        if config.queue > MAX_QUEUE {
            found.limit("method.swav.queue", config.queue, &format!("at most {MAX_QUEUE}"));
        }
        multicrop::check("swav", inputs, found);
        check::other_images("swav", inputs, found);
        let sizes: Vec<u32> = inputs.view_sizes().collect();
        if let Some(fewest) = sizes.chunk_by(|a, b| a == b).map(<[u32]>::len).min() {
            check::lone_pixels("swav", inputs, inputs.micro * fewest, found);
        }
    }

    fn rules(config: &Config) -> Vec<ParameterRule> {
        let rule = ParameterRule::matching("prototypes.*");
        vec![ParameterRule { freeze_steps: Some(config.freeze_steps), ..rule }]
    }

    fn resolve(config: &mut Config, facts: &RunFacts) -> Vec<String> {
        let epochs = facts.steps.div_ceil(facts.steps_per_epoch.max(1));
        let Config { queue, queue_start_epoch: start, .. } = *config;
        if queue == 0 || start < epochs {
            return Vec::new();
        }
        vec![format!(
            "`method.swav.queue_start_epoch` is {start} and the run has {epochs} epochs: its queue is never used"
        )]
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let num_images = batch.images.len();
        let (mut first, mut pooled) = (0, Vec::new());
        for views in batch.views.chunk_by(|a, b| a.dims() == b.dims()) {
            pass.for_rows(first * num_images..(first + views.len()) * num_images);
            pooled.push(self.backbone.forward(Tensor::cat(views.to_vec(), 0), pass).pooled);
            first += views.len();
        }
        let embeddings = l2_normalize(self.head.forward(Tensor::cat(pooled, 0), pass), 1e-6); // [views * micro, out]
        let scores = self.prototypes.forward(embeddings.clone()).chunk(batch.views.len(), 0);
        let queued = self.queues.len();
        let embeddings = (0..queued).map(|view| embeddings.clone().detach().narrow(0, view * num_images, num_images));
        Outputs { tensors: scores, constants: embeddings.collect() } // each [micro, prototypes], each [micro, out]
    }

    fn loss(&self, outputs: Outputs, progress: &Progress) -> Loss {
        let Outputs { tensors: scores, constants: embeddings } = outputs;
        let Config { temperature, epsilon, iterations, queue_start_epoch, .. } = self.config;
        let images = scores[0].dims()[0];
        let code = |(view, scores): (usize, &Tensor<2>)| {
            let queue = self.queues.get(view).filter(|queue| queue.is_full());
            let queue = queue.map(|queue| swav::scores(queue.rows(), self.prototypes.weight.val().detach()));
            swav::codes(scores.clone(), queue, epsilon, iterations)
        };
        let codes: Vec<Tensor<2>> = scores[..CODED].iter().enumerate().map(code).collect();
        let sum = swav::swav(&scores, &codes, temperature);
        let filling = progress.epoch() >= queue_start_epoch;
        let shown = scores[0].clone(); // one point in these is one point in the embeddings
        let newest = embeddings.into_iter().filter(|_| filling).map(|embeddings| embeddings.flatten(0, 1));
        let uniform = (scores[0].dims()[1] as f64).ln();
        let loss = Loss::new(sum, images as f64).with_uniform(uniform).with_embeddings(shown);
        Loss { statistics: newest.collect(), ..loss }
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn update(&self, statistics: &[Vec<f32>], _progress: &Progress) -> Vec<Update> {
        self.queues.iter().zip(statistics).flat_map(|(queue, newest)| queue.push(newest)).collect()
    }

    fn unit_rows(&self) -> Vec<ParamId> {
        vec![self.prototypes.weight.id]
    }
}
