//! What a forward pass carries beside its tensors.

use std::ops::Range;

use burn::module::ParamId;
use burn::tensor::Tensor;

/// One forward pass: training or evaluation, the keys of its random draws, and the batch statistics it collects.
///
/// Layers never keep state behind a forward pass: batch norm pushes its statistics here and the engine folds them into
/// the running statistics in micro-batch order, so a pass may be run again (gradient caching) or on another rank.
#[derive(Debug)]
pub struct Pass {
    train: bool,
    /// The noise of the rows that enter the network now.
    noise: Option<Noise>,
    /// The rows of the whole micro-batch.
    rows: Vec<(u64, u64)>,
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
        Self { train: true, rows: noise.rows.clone(), noise: Some(noise), batch_stats: Vec::new() }
    }

    /// An evaluation pass: running statistics, no noise.
    #[must_use]
    pub fn eval() -> Self {
        Self { train: false, noise: None, rows: Vec::new(), batch_stats: Vec::new() }
    }

    /// Goes on with some of the micro-batch's rows: a method that sends its views through a network one after the other says so before each.
    ///
    /// # Panics
    /// When a training pass has fewer rows.
    pub fn for_rows(&mut self, rows: Range<usize>) -> &mut Self {
        if let Some(noise) = &mut self.noise {
            noise.rows = self.rows[rows].to_vec();
        }
        self
    }

    /// Makes a pass of the same kind without noise: for a teacher, which normalises with batch statistics but drops nothing.
    #[must_use]
    pub fn without_noise(&self) -> Self {
        Self { train: self.train, noise: None, rows: Vec::new(), batch_stats: Vec::new() }
    }

    /// Makes the same pass, as it is now, without the statistics collected so far.
    #[must_use]
    pub(super) fn again(&self) -> Self {
        Self { train: self.train, noise: self.noise.clone(), rows: self.rows.clone(), batch_stats: Vec::new() }
    }

    /// Takes over the statistics that another pass has collected.
    pub fn absorb(&mut self, other: Self) {
        self.batch_stats.extend(other.batch_stats);
    }

    /// Returns the keys of the random draws, nothing where there are none.
    #[must_use]
    pub fn noise(&self) -> Option<&Noise> {
        self.noise.as_ref()
    }

    /// Tells whether this is a training pass.
    #[must_use]
    pub fn is_train(&self) -> bool {
        self.train
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
