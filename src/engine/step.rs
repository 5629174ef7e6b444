//! One optimizer step of one rank: forward, loss, backward, reduction. DESIGN: losses are sums over a global count, gradients are summed.

use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};

use super::config::{ActivationCheckpointing, Memory};
use super::error::EngineError;
use super::finding::{MicroSeen, Watcher};
use super::shape::Shape;
use crate::data::HostBatch;
use crate::method::{Learner, MicroBatch, Outputs, Progress, Sees};
use crate::model::params::{Flat, Layout};
use crate::model::{BatchStats, Noise, Pass, Tape, recomputed};
use crate::ops::{Autocast, autocast};
use crate::parallel::{Collective, Tensors, TreeSum};

/// What stays the same from step to step.
#[derive(Clone, Debug)]
pub(super) struct StepSpec {
    pub(super) seed: u64,
    /// Micro-batches of the global batch.
    pub(super) micros: usize,
    /// Those of this rank.
    pub(super) mine: Range<usize>,
    pub(super) memory: Memory,
    pub(super) activation_checkpointing: ActivationCheckpointing,
    pub(super) steps: u64,
    pub(super) steps_per_epoch: u64,
    pub(super) device: Device,
}

/// One of the attempts at a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt {
    /// What the forward pass computes in.
    pub(super) autocast: Autocast,
    /// What gradients are multiplied by until they are summed up.
    pub(super) factor: f32,
    /// A gradient overflows on purpose.
    pub(super) spoilt: bool,
}

/// What a step came to.
#[derive(Debug)]
pub(super) struct StepResult {
    /// Mean loss of the global batch.
    pub(super) loss: f64,
    /// On the first rank of a process: what the step moves.
    pub(super) moved: Option<Moved>,
    /// Statistics of every batch-norm layer, one after another for each micro-batch of the global batch.
    pub(super) batch_stats: Vec<Vec<f32>>,
    /// Where those statistics belong.
    pub(super) stats_places: Vec<Range<usize>>,
    /// Parts of the loss, means as the loss is.
    pub(super) parts: Vec<(&'static str, f64)>,
    /// What the method's update needs, of the global batch.
    pub(super) statistics: Vec<Vec<f32>>,
    /// A loss, whole or a part, and what it is when the network tells nothing apart.
    pub(super) uniform: Option<[f64; 2]>,
    /// How the embeddings of a micro-batch, or of the global batch, lie; on the first rank.
    pub(super) shape: Option<Shape>,
}

/// Gradient and weights, which no other rank holds any more.
#[derive(Debug)]
pub(super) struct Moved {
    /// Gradient of the sum of the losses, a vector for each parameter.
    pub(super) gradient: Tensors,
    /// What makes that the gradient of the mean.
    pub(super) scale: f32,
    /// Weights and buffers before the step.
    pub(super) flat: Flat,
}

impl StepSpec {
    pub(super) fn progress(&self, step: u64) -> Progress {
        Progress { seed: self.seed, step, steps: self.steps, steps_per_epoch: self.steps_per_epoch }
    }
}

/// Runs this rank's micro-batches of one step and reduces over all ranks. The learner has released its weights then.
pub(super) fn run(
    spec: &StepSpec,
    step: u64,
    attempt: Attempt,
    batches: &[MicroBatch],
    learner: &mut dyn Learner,
    ranks: &dyn Collective,
) -> Result<StepResult, EngineError> {
    let mut rank = RankStep { spec, step, attempt, learner: &*learner, stats: Stats::default(), watcher: None };
    let mut gradients = TreeSum::new(spec.micros);
    let Terms { sum, count, parts, statistics, uniform, shape } =
        rank.forward_backward(batches, &mut gradients, ranks)?;
    let Stats { places, values } = rank.stats;
    // before the gradient arrives, every rank has let go of the weights, so that the first one can move them where they are
    let flat = learner.release().filter(|_| ranks.leads());
    let gradient = ranks.reduce(spec.micros, gradients.into_nodes())?;
    let scale = (1.0 / (count * f64::from(attempt.factor))) as f32;
    let moved = gradient.zip(flat).map(|(gradient, flat)| Moved { gradient, scale, flat });
    let per_micro: usize = places.iter().map(ExactSizeIterator::len).sum();
    let gathered = if per_micro == 0 { Vec::new() } else { ranks.all_gather(values)? };
    let batch_stats = gathered.chunks(per_micro.max(1)).map(<[f32]>::to_vec).collect();
    let parts: Vec<(&'static str, f64)> = parts.into_iter().map(|(name, sum)| (name, sum / count)).collect();
    let uniform = uniform.and_then(|(part, uniform)| {
        let judged = match part {
            Some(part) => parts.iter().find(|(name, _)| *name == part)?.1,
            None => sum / count,
        };
        Some([judged, uniform])
    });
    Ok(StepResult { loss: sum / count, moved, batch_stats, stats_places: places, parts, statistics, uniform, shape })
}

/// Runs a step's passes again and tells what layers put out and which gradients they got, for each micro-batch of this rank; moves nothing.
pub(super) fn watch(
    spec: &StepSpec,
    step: u64,
    attempt: Attempt,
    batches: &[MicroBatch],
    learner: &dyn Learner,
    ranks: &dyn Collective,
) -> Result<Vec<MicroSeen>, EngineError> {
    let watcher = Some(Watcher::default());
    let mut rank = RankStep { spec, step, attempt, learner, stats: Stats::default(), watcher };
    rank.forward_backward(batches, &mut TreeSum::new(spec.micros), ranks)?;
    Ok(rank.watcher.map(Watcher::finish).unwrap_or_default())
}

/// The loss of the global batch on the host.
struct Terms {
    sum: f64,
    count: f64,
    parts: Vec<(&'static str, f64)>,
    statistics: Vec<Vec<f32>>,
    uniform: Option<(Option<&'static str>, f64)>,
    shape: Option<Shape>,
}

/// Which of the forward passes over a micro-batch it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// The only one.
    Only,
    /// One that nothing goes backward through: burn would keep its graph until something does.
    First,
    /// The one behind that.
    Second,
}

struct RankStep<'a> {
    spec: &'a StepSpec,
    step: u64,
    attempt: Attempt,
    learner: &'a dyn Learner,
    stats: Stats,
    watcher: Option<Watcher>,
}

impl RankStep<'_> {
    fn forward_backward(
        &mut self,
        batches: &[MicroBatch],
        gradients: &mut TreeSum<Tensors>,
        ranks: &dyn Collective,
    ) -> Result<Terms, EngineError> {
        match self.learner.sees() {
            Sees::MicroBatch => self.by_micro_batch(batches, gradients, ranks),
            Sees::GlobalBatch => self.over_global_batch(batches, gradients, ranks),
        }
    }

    /// The loss is a sum over micro-batches: each goes forward and backward at once, so one graph is alive at a time.
    fn by_micro_batch(
        &mut self,
        batches: &[MicroBatch],
        gradients: &mut TreeSum<Tensors>,
        ranks: &dyn Collective,
    ) -> Result<Terms, EngineError> {
        let (mut terms, mut values) = (Vec::new(), Vec::new());
        let (mut names, mut lengths) = (Vec::new(), Vec::new());
        let (mut uniform, mut shape) = (None, None);
        for (index, batch) in self.spec.mine.clone().zip(batches) {
            let (outputs, tape) = self.encode(batch, Turn::Only);
            let loss = self.learner.loss(outputs, &batch.progress);
            terms.extend([scalar(&loss.sum), loss.count]);
            terms.extend(loss.parts.iter().map(|(_, part)| scalar(part)));
            uniform = loss.uniform;
            if index == 0 {
                shape = loss.embeddings.and_then(Shape::of);
            }
            names = loss.parts.iter().map(|(name, _)| *name).collect();
            lengths.clear();
            for statistic in loss.statistics {
                lengths.push(statistic.dims()[0]);
                values.extend(to_host(statistic));
            }
            gradients.push_leaf(index, self.backward(&self.scaled(loss.sum), tape));
        }
        let terms = ranks.all_gather_f64(terms)?;
        let width = 2 + names.len();
        let total = |at: usize| tree_sum(terms.iter().skip(at).step_by(width));
        let parts = names.into_iter().enumerate().map(|(at, name)| (name, total(2 + at))).collect();
        let mut statistics = Vec::new();
        if !lengths.is_empty() {
            let gathered = ranks.all_gather(values)?;
            let mut sum = TreeSum::new(self.spec.micros);
            let per_micro = gathered.chunks(lengths.iter().sum::<usize>().max(1));
            per_micro.enumerate().for_each(|(micro, values)| sum.push_leaf(micro, values.to_vec()));
            let sum = sum.finish();
            let mut rest = sum.as_slice();
            for length in lengths {
                let (values, others) = rest.split_at(length);
                statistics.push(values.to_vec());
                rest = others;
            }
        }
        Ok(Terms { sum: total(0), count: total(1), parts, statistics, uniform, shape })
    }

    /// The loss sees all outputs: every rank evaluates it on detached leaves, then pushes its rows of the gradient back through its own
    /// micro-batches by `sum(output * gradient)`, whose gradient is the chain rule.
    fn over_global_batch(
        &mut self,
        batches: &[MicroBatch],
        gradients: &mut TreeSum<Tensors>,
        ranks: &dyn Collective,
    ) -> Result<Terms, EngineError> {
        let mut graphs = Vec::new();
        let mut local: Vec<HostOutputs> = Vec::new();
        for batch in batches {
            let turn = if self.spec.memory == Memory::Keep { Turn::Only } else { Turn::First };
            let (outputs, tape) = self.encode(batch, turn);
            local.push(HostOutputs::read(&outputs));
            graphs.push((turn == Turn::Only).then_some((outputs, tape)));
        }
        let rows = batches.first().map_or(0, |batch| batch.images.len());
        let gathered = gather(&local, rows, self.spec.micros, ranks)?;

        let leaves: Vec<Tensor<2>> =
            gathered.tensors.iter().map(|t| t.leaf(&self.spec.device).require_grad()).collect();
        let constants = gathered.constants.iter().map(|t| t.leaf(&self.spec.device)).collect();
        let loss = self.learner.loss(Outputs { tensors: leaves.clone(), constants }, &self.spec.progress(self.step));
        let terms = Terms {
            sum: scalar(&loss.sum),
            count: loss.count,
            parts: loss.parts.iter().map(|(name, part)| (*name, scalar(part))).collect(),
            uniform: loss.uniform,
            shape: loss.embeddings.filter(|_| ranks.rank() == 0).and_then(Shape::of),
            statistics: if ranks.leads() { loss.statistics.into_iter().map(to_host).collect() } else { Vec::new() },
        };
        let mut leaf_gradients = loss.sum.backward();
        let upstream: Vec<Option<Tensor<2>>> =
            leaves.iter().map(|leaf| leaf.grad_remove(&mut leaf_gradients)).collect();

        for ((index, batch), graph) in self.spec.mine.clone().zip(batches).zip(graphs) {
            let (outputs, tape) = graph.unwrap_or_else(|| self.encode(batch, Turn::Second));
            let own = index * rows..(index + 1) * rows;
            let pairs = outputs.tensors.into_iter().zip(&upstream);
            let terms = pairs.filter_map(|(output, upstream)| {
                let gradient = self.scaled(upstream.clone()?.slice([own.clone()]));
                Some((output * Tensor::from_inner(gradient)).sum_dim(1).sum())
            });
            let gradient = match terms.reduce(|a, b| a + b) {
                Some(surrogate) => self.backward(&surrogate, tape),
                None => self.learner.layout().zeros(),
            };
            gradients.push_leaf(index, gradient);
        }
        Ok(terms)
    }

    fn encode(&mut self, batch: &MicroBatch, turn: Turn) -> (Outputs, Tape) {
        let views = 0..batch.views.len() as u64;
        let rows = views.flat_map(|view| batch.images.iter().map(move |&image| (image, view))).collect();
        let mut pass = Pass::train(Noise { seed: self.spec.seed, step: self.step, rows });
        let (learner, again) = (self.learner, self.spec.activation_checkpointing);
        let mut tape = Tape::default();
        let mut encode = || {
            autocast(self.attempt.autocast, || match again {
                _ if turn == Turn::First => learner.encode_untracked(batch, &mut pass),
                ActivationCheckpointing::None => learner.encode(batch, &mut pass),
                ActivationCheckpointing::Every(blocks) => {
                    let (outputs, recorded) = recomputed(blocks.get(), || learner.encode(batch, &mut pass));
                    tape = recorded;
                    outputs
                }
            })
        };
        let outputs = match &mut self.watcher {
            Some(watcher) if turn != Turn::Second => watcher.watch(batch, learner.layout(), encode),
            _ => encode(),
        };
        let stats = pass.take_batch_stats();
        if turn != Turn::Second {
            self.stats.add(stats, self.learner.layout());
        }
        (outputs, tape)
    }

    /// Multiplies by what gradients are multiplied by.
    fn scaled<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        if self.attempt.factor == 1.0 { x } else { x * self.attempt.factor }
    }

    fn backward(&mut self, scalar: &Tensor<1>, tape: Tape) -> Tensors {
        let mut sums = Vec::new();
        // what is computed again, is in the same precision
        autocast(self.attempt.autocast, || {
            tape.backward(scalar, &mut |gradients| self.learner.add_gradients(gradients, &mut sums));
        });
        let mut gradients = self.learner.layout().filled(sums);
        if std::mem::take(&mut self.attempt.spoilt) {
            gradients.iter_mut().flatten().take(1).for_each(|value| *value = f32::INFINITY);
        }
        if let Some(watcher) = &mut self.watcher {
            watcher.gradients(&gradients);
        }
        gradients
    }
}

/// Batch statistics of this rank's micro-batches on the host.
#[derive(Debug, Default)]
struct Stats {
    places: Vec<Range<usize>>,
    values: Vec<f32>,
}

impl Stats {
    fn add(&mut self, stats: Vec<BatchStats>, layout: &Layout) {
        let known = !self.places.is_empty();
        for layer in stats {
            if !known {
                self.places.extend(layout.places(&layer));
            }
            self.values.extend(to_host(layer.mean));
            self.values.extend(to_host(layer.var));
        }
    }
}

/// Brings a micro-batch to the device.
pub(super) fn to_device(spec: &StepSpec, step: u64, batch: HostBatch) -> MicroBatch {
    let images = batch.images.len();
    let views = batch.views.into_iter().map(|view| {
        let side = view.size as usize;
        Tensor::from_data(TensorData::new(view.pixels, [images, 3, side, side]), &spec.device)
    });
    MicroBatch { progress: spec.progress(step), views: views.collect(), images: batch.images, labels: batch.labels }
}

/// A two-dimensional tensor on the host.
#[derive(Clone, Debug)]
struct HostTensor {
    columns: usize,
    values: Vec<f32>,
}

impl HostTensor {
    fn read(tensor: &Tensor<2>) -> Self {
        Self { columns: tensor.dims()[1], values: to_host(tensor.clone()) }
    }

    fn leaf(&self, device: &Device) -> Tensor<2> {
        let rows = self.values.len() / self.columns.max(1);
        Tensor::from_data(TensorData::new(self.values.clone(), [rows, self.columns]), device)
    }
}

#[derive(Debug)]
struct HostOutputs {
    tensors: Vec<HostTensor>,
    constants: Vec<HostTensor>,
}

impl HostOutputs {
    fn read(outputs: &Outputs) -> Self {
        let read = |tensors: &[Tensor<2>]| tensors.iter().map(HostTensor::read).collect();
        Self { tensors: read(&outputs.tensors), constants: read(&outputs.constants) }
    }
}

/// Stacks every output over the global batch, in micro-batch order.
fn gather(
    local: &[HostOutputs],
    rows: usize,
    micros: usize,
    ranks: &dyn Collective,
) -> Result<HostOutputs, EngineError> {
    let stack = |pick: fn(&HostOutputs) -> &Vec<HostTensor>| -> Result<Vec<HostTensor>, EngineError> {
        let count = local.first().map_or(0, |outputs| pick(outputs).len());
        (0..count)
            .map(|i| {
                let parts: Vec<f32> =
                    local.iter().flat_map(|outputs| pick(outputs)[i].values.iter().copied()).collect();
                let columns = pick(&local[0])[i].columns;
                let values = ranks.all_gather(parts)?;
                assert_eq!(values.len(), micros * rows * columns, "one row for each image");
                Ok(HostTensor { columns, values })
            })
            .collect()
    };
    Ok(HostOutputs { tensors: stack(|outputs| &outputs.tensors)?, constants: stack(|outputs| &outputs.constants)? })
}

fn scalar(tensor: &Tensor<1>) -> f64 {
    f64::from(tensor.clone().into_scalar::<f32>())
}

fn to_host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec::<f32>().expect("networks compute in fp32")
}

/// The canonical tree over numbers that every rank already has.
fn tree_sum<'a>(values: impl ExactSizeIterator<Item = &'a f64>) -> f64 {
    let mut sum = TreeSum::new(values.len());
    values.enumerate().for_each(|(i, &value)| sum.push_leaf(i, vec![value]));
    sum.finish()[0]
}
