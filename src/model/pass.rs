//! What a forward pass carries beside its tensors.

use burn::module::ParamId;
use burn::tensor::Tensor;

/// One forward pass: training or evaluation, the keys of its random draws, and the batch statistics it collects.
///
/// Layers never keep state behind a forward pass: batch norm pushes its statistics here and the engine folds them into
/// the running statistics in micro-batch order, so a pass may be run again (gradient caching) or on another rank.
#[derive(Debug)]
pub struct Pass {
    noise: Option<Noise>,
    batch_stats: Vec<BatchStats>,
}

/// Keys of the random draws of a training pass: `(seed, step, image, view, layer)`.
#[derive(Clone, Debug)]
pub struct Noise {
    /// The run's seed.
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Per row of the batch that enters the network: the image's index in the data and its view.
    pub rows: Vec<(u64, u64)>,
}

/// Statistics of one batch-norm layer over one micro-batch, detached.
#[derive(Debug)]
pub struct BatchStats {
    /// Identifies the layer: the id of its running mean.
    pub running_mean: ParamId,
    /// Id of its running variance.
    pub running_var: ParamId,
    /// Mean of each channel; without autodiff, as is the variance.
    pub mean: Tensor<1>,
    /// Unbiased variance of each channel (what torch folds into the running variance).
    pub var: Tensor<1>,
}

impl Pass {
    /// A training pass.
    #[must_use]
    pub fn train(noise: Noise) -> Self {
        Self { noise: Some(noise), batch_stats: Vec::new() }
    }

    /// An evaluation pass: running statistics, no noise.
    #[must_use]
    pub fn eval() -> Self {
        Self { noise: None, batch_stats: Vec::new() }
    }

    /// Returns the keys of the random draws while training, nothing while evaluating.
    #[must_use]
    pub fn noise(&self) -> Option<&Noise> {
        self.noise.as_ref()
    }

    /// Tells whether this is a training pass.
    #[must_use]
    pub fn is_train(&self) -> bool {
        self.noise.is_some()
    }

    /// Hands over a layer's batch statistics.
    pub fn push_batch_stats(&mut self, stats: BatchStats) {
        self.batch_stats.push(stats);
    }

    /// Takes the statistics collected so far, in call order.
    pub fn take_batch_stats(&mut self) -> Vec<BatchStats> {
        std::mem::take(&mut self.batch_stats)
    }
}
