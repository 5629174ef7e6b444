//! One rank's part of training: its network, and on the first rank of a process the state that all of its ranks share.
//!
//! Weights, optimizer state and running statistics are the same on every rank, so a process keeps them once: its first rank
//! takes the reduced gradient, moves the weights and publishes them again; the networks of all rank threads are views of what was
//! published last (`model::params::Flat`), and let go of it before the weights move.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::Device;

use super::config::{ActivationCheckpointing, EmaConfig, Memory};
use super::error::EngineError;
use super::finding::{self, BUNDLE_FORMAT, Finding};
use super::shape::Shape;
use super::step::{self, Attempt, Moved, StepResult, StepSpec};
use crate::checkpoint::{self, CheckpointError, Snapshot, State};
use crate::data::HostBatch;
use crate::method::{Learner, MicroBatch};
use crate::model::Kind;
use crate::model::params::{self, Flat, Layout};
use crate::optim::{
    Clip, Groups, Optimizer, OptimizerConfig, ParamSpec, ParameterRule, Ramp, Rates, Schedule, ema, sum_of_squares,
};
use crate::parallel::{Collective, share_tensors, value_from_leader};
use crate::precision::{Compute, MOST_SKIPPED, OnNonFinite, PrecisionConfig, PrecisionState};

/// What steps do; the same on every rank.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Seed of the run.
    pub seed: u64,
    /// Micro-batches of the global batch.
    pub micro_batches: usize,
    /// What is kept between forward and backward pass.
    pub memory: Memory,
    /// Activations that are computed again.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Steps of the run.
    pub steps: u64,
    /// Steps of one epoch.
    pub steps_per_epoch: u64,
    /// Optimizer.
    pub optimizer: OptimizerConfig,
    /// What is different for some of the parameters, in this order; those of a method come before the recipe's.
    pub parameters: Vec<ParameterRule>,
    /// Learning rate.
    pub schedule: Schedule,
    /// The optimizer's weight decay.
    pub weight_decay: Ramp,
    /// How the gradient is clipped.
    pub clip: Clip,
    /// Moving average of the weights.
    pub ema: Option<EmaConfig>,
    /// What products compute in; `auto` is resolved.
    pub precision: PrecisionConfig,
    /// Images of one step.
    pub images: usize,
    /// Digest of the run's plan.
    pub plan: String,
}

/// What became of a step.
#[derive(Debug, Default)]
pub struct Stepped {
    /// Its numbers, on the first rank of a process; nothing where the run has to stop.
    pub numbers: Option<StepNumbers>,
    /// What was not finite; the same on all ranks.
    pub finding: Option<Box<Finding>>,
    /// Whether the run has to stop. The state is that before the step.
    pub stops: bool,
}

/// What a step came to.
#[derive(Clone, Debug, PartialEq)]
pub struct StepNumbers {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean loss of the global batch.
    pub loss: f64,
    /// Learning rate.
    pub lr: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Parts of the loss, where the method names them.
    pub parts: Vec<(&'static str, f64)>,
    /// The loss, or a part of it, and what that is when the network tells nothing apart; where the method knows it.
    pub uniform_loss: Option<[f64; 2]>,
    /// How the embeddings lie on the sphere; where the method shows them.
    pub embeddings: Option<Shape>,
    /// The step was not finite and moved nothing.
    pub skipped: bool,
    /// What is known of the precision after the step.
    pub precision: PrecisionState,
}

/// One rank's part of training.
pub struct Trainer<'a> {
    spec: StepSpec,
    ranks: &'a dyn Collective,
    learner: Box<dyn Learner>,
    step: u64,
    leader: Option<Leader>,
    precision: PrecisionState,
    config: PrecisionConfig,
    images: usize,
    plan: String,
}

/// What an attempt at a step came to; the same on every rank.
enum Outcome {
    Moved(Box<StepNumbers>),
    NotFinite { what: &'static str, value: f64 },
}

/// What a process keeps once, beside the weights.
struct Leader {
    settings: Settings,
    optimizer: Optimizer,
    ema: Option<Vec<f32>>,
    threads: usize,
}

impl<'a> Trainer<'a> {
    /// Starts with the learner's own weights, or with those of a checkpoint.
    ///
    /// `device` has autodiff; `mine` are this rank's micro-batches.
    ///
    /// # Errors
    /// When the checkpoint cannot be read or is of another network, or another rank failed.
    pub fn start(
        settings: Settings,
        device: Device,
        mine: Range<usize>,
        learner: Box<dyn Learner>,
        ranks: &'a dyn Collective,
        resume: Option<&Path>,
    ) -> Result<Self, EngineError> {
        let spec = StepSpec {
            seed: settings.seed,
            micros: settings.micro_batches,
            mine,
            memory: settings.memory,
            activation_checkpointing: settings.activation_checkpointing,
            steps: settings.steps,
            steps_per_epoch: settings.steps_per_epoch,
            device,
        };
        let (config, images, plan) = (settings.precision.clone(), settings.images, settings.plan.clone());
        let start =
            ranks.leads().then(|| Leader::start(settings, learner.as_ref(), resume, ranks.threads())).transpose()?;
        let (leader, start) = match start {
            Some((leader, state)) => {
                let flat = Flat::upload(state.weights, state.buffers, &spec.device);
                (Some(leader), Some((state.step, flat, state.precision)))
            }
            None => (None, None),
        };
        let start = value_from_leader(ranks, start)?;
        let precision = start.2.clone();
        let mut trainer = Self { spec, ranks, learner, step: start.0, leader, precision, config, images, plan };
        trainer.learner.set(&start.1);
        Ok(trainer)
    }

    /// Steps done.
    #[must_use]
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// Runs one step over this rank's micro-batches; where an fp16 gradient overflows, again at smaller and smaller scales of the loss.
    ///
    /// Attempts are the same step: they move nothing, see the same images and draw the same noise. `spoilt` makes the first one
    /// overflow on purpose.
    ///
    /// # Errors
    /// When new weights are not finite, or another rank failed.
    pub fn step(&mut self, batches: Vec<HostBatch>, spoilt: bool) -> Result<Stepped, EngineError> {
        let batches: Vec<MicroBatch> =
            batches.into_iter().map(|batch| step::to_device(&self.spec, self.step, batch)).collect();
        let mut spoilt = spoilt;
        let mut stepped = Stepped::default();
        loop {
            let attempt = Attempt { spoilt: std::mem::take(&mut spoilt), ..self.attempt() };
            let (what, value) = match &*self.try_step(&batches, attempt)? {
                Outcome::Moved(numbers) => {
                    self.precision.observe(&self.config.scale, false);
                    self.precision.skipped_in_a_row = 0;
                    self.step += 1;
                    stepped.numbers = self.told(StepNumbers::clone(numbers));
                    return Ok(stepped);
                }
                Outcome::NotFinite { what, value } => (*what, *value),
            };
            // a smaller scale changes gradients alone
            if what == GRADIENT && self.precision.observe(&self.config.scale, true) {
                continue;
            }
            stepped.finding = Some(Box::new(self.explain(&batches, (what, value), 0)?));
            match self.config.on_nonfinite {
                OnNonFinite::FallbackBf16 if self.precision.scale.is_some() => self.precision.fall_back(self.step),
                OnNonFinite::Skip if self.precision.skipped_in_a_row < MOST_SKIPPED => {
                    let numbers = StepNumbers::skipped(what, value, self.lr());
                    self.precision.skipped += 1;
                    self.precision.skipped_in_a_row += 1;
                    self.step += 1;
                    stepped.numbers = self.told(numbers);
                    return Ok(stepped);
                }
                _ => {
                    stepped.stops = true;
                    return Ok(stepped);
                }
            }
        }
    }

    /// Runs the next step's passes and tells what layers put out, of the micro-batch `shown` where all of it is finite; moves nothing.
    ///
    /// # Errors
    /// When another rank failed.
    pub fn look(&mut self, batches: Vec<HostBatch>, shown: usize) -> Result<Finding, EngineError> {
        let batches: Vec<MicroBatch> =
            batches.into_iter().map(|batch| step::to_device(&self.spec, self.step, batch)).collect();
        self.explain(&batches, ("", 0.0), shown)
    }

    /// Sets what the scale of the loss and its counters are.
    pub fn set_precision(&mut self, state: PrecisionState) {
        self.precision = state;
    }

    fn attempt(&self) -> Attempt {
        let (autocast, factor) = (self.precision.autocast(&self.config), self.precision.factor(self.images));
        Attempt { autocast, factor, spoilt: false }
    }

    /// Tries a step once. Where its numbers are not finite, the weights are what they were.
    fn try_step(&mut self, batches: &[MicroBatch], attempt: Attempt) -> Result<Arc<Outcome>, EngineError> {
        let result = step::run(&self.spec, self.step, attempt, batches, self.learner.as_mut(), self.ranks)?;
        let made = match &mut self.leader {
            Some(leader) => {
                let (outcome, flat) = leader.update(&self.spec, self.step, result, self.learner.as_ref())?;
                Some((Arc::new(outcome), flat))
            }
            None => None,
        };
        let made = value_from_leader(self.ranks, made)?;
        self.learner.set(&made.1);
        Ok(Arc::clone(&made.0))
    }

    /// Adds what the leader of a process tells of a step.
    fn told(&self, numbers: StepNumbers) -> Option<StepNumbers> {
        let precision = self.precision.clone();
        self.leader.as_ref().map(|_| StepNumbers { step: self.step, precision, ..numbers })
    }

    fn lr(&self) -> f64 {
        self.leader.as_ref().map_or(0.0, |leader| leader.settings.schedule.lr_at(self.step))
    }

    /// Looks for what was not finite first.
    fn explain(
        &mut self,
        batches: &[MicroBatch],
        (what, value): (&str, f64),
        shown: usize,
    ) -> Result<Finding, EngineError> {
        let seen = step::watch(&self.spec, self.step, self.attempt(), batches, self.learner.as_ref(), self.ranks)?;
        let finding::Seen { first, images, micro_batch, layers, gradients } =
            finding::gather(&seen, self.learner.layout(), shown, self.ranks)?;
        let weights = self.leader.as_ref().map(|_| {
            let mut hasher = blake3::Hasher::new();
            params::hash(&mut hasher, &self.learner.weights());
            params::hash(&mut hasher, &self.learner.buffers());
            hasher.finalize().to_hex().to_string()
        });
        let weights = value_from_leader(self.ranks, weights)?;
        let fell_back = self.precision.fell_back_after.is_some();
        Ok(Finding {
            format: BUNDLE_FORMAT,
            autodidact: env!("CARGO_PKG_VERSION").to_owned(),
            plan: self.plan.clone(),
            step: self.step + 1,
            seed: self.spec.seed,
            compute: if fell_back { Compute::Bf16 } else { self.config.compute },
            precision: self.precision.clone(),
            weights: weights.to_string(),
            what: what.to_owned(),
            value: value.to_string(),
            first,
            images,
            micro_batch,
            layers,
            gradients,
        })
    }

    /// Hands the state to `save`, on the first rank of a process.
    pub fn with_snapshot<R>(&self, save: impl FnOnce(&Layout, &Snapshot<'_>) -> R) -> Option<R> {
        let Leader { optimizer, ema, .. } = self.leader.as_ref()?;
        let (weights, buffers) = (self.learner.weights(), self.learner.buffers());
        let snapshot = Snapshot {
            step: self.step,
            weights: &weights,
            buffers: &buffers,
            optimizer: optimizer.state(),
            ema: ema.as_deref(),
            precision: &self.precision,
        };
        Some(save(self.learner.layout(), &snapshot))
    }

    /// Ends training; the first rank of a process gets the state, without the optimizer's.
    #[must_use]
    pub fn finish(self) -> Option<State> {
        let Self { learner, step, leader, precision, .. } = self;
        leader.map(|leader| State {
            step,
            weights: learner.weights(),
            buffers: learner.buffers(),
            optimizer: Vec::new(),
            ema: leader.ema,
            precision,
        })
    }
}

impl Leader {
    /// Returns what is kept, and the state to start from.
    fn start(
        settings: Settings,
        learner: &dyn Learner,
        resume: Option<&Path>,
        threads: usize,
    ) -> Result<(Self, State), EngineError> {
        let (specs, rules) = (specs(learner.layout()), &settings.parameters);
        let groups = Groups::new(&settings.optimizer, &specs, rules, settings.steps_per_epoch);
        let mut optimizer = Optimizer::new(&settings.optimizer, groups).on_threads(threads);
        let with_ema = settings.ema.is_some();
        let Some(path) = resume else {
            let mut weights = learner.weights();
            learner.at_start(&mut weights);
            let ema = with_ema.then(|| weights.clone());
            let state = State {
                step: 0,
                weights,
                buffers: learner.buffers(),
                optimizer: Vec::new(),
                ema: None,
                precision: settings.precision.start(),
            };
            return Ok((Self { settings, optimizer, ema, threads }, state));
        };
        let names: Vec<&str> = optimizer.state().iter().map(|(name, _)| *name).collect();
        let (mut state, _) = checkpoint::load(path, learner.layout(), &names)?;
        let loaded = std::mem::take(&mut state.optimizer);
        let loaded = loaded.iter().map(|(name, values)| (name.as_str(), values.as_slice()));
        let other = |reason: String| CheckpointError::OtherNetwork { path: path.to_path_buf(), reason };
        optimizer.load_state(state.step, loaded).map_err(|e| other(e.to_string()))?;
        if with_ema && state.ema.is_none() {
            return Err(other("it has no moving average, the recipe asks for one".to_owned()).into());
        }
        let ema = state.ema.take().filter(|_| with_ema);
        Ok((Self { settings, optimizer, ema, threads }, state))
    }

    fn update(
        &mut self,
        spec: &StepSpec,
        step: u64,
        result: StepResult,
        learner: &dyn Learner,
    ) -> Result<(Outcome, Flat), EngineError> {
        let StepResult { loss, moved, batch_stats, stats_places, parts, statistics, uniform, shape } = result;
        let Moved { mut gradient, scale, flat } = moved.expect("the first rank of a process gets gradient and weights");
        let Self { settings, optimizer, ema, threads } = self;
        if !loss.is_finite() {
            return Ok((Outcome::NotFinite { what: LOSS, value: loss }, flat));
        }
        optimizer.groups().cancel_frozen(step, &mut gradient);
        let squares = on_threads(*threads, gradient.iter_mut().map(Vec::as_mut_slice).collect(), |values| {
            for g in &mut *values {
                *g *= scale;
            }
            sum_of_squares(values)
        });
        let grad_norm = settings.clip.apply(&mut gradient, &squares);
        if !grad_norm.is_finite() {
            return Ok((Outcome::NotFinite { what: GRADIENT, value: grad_norm }, flat));
        }
        let (mut weights, mut buffers) = flat.into_host();

        let lr = settings.schedule.lr_at(step);
        let rates = Rates { lr, fixed_lr: settings.schedule.lr, weight_decay: settings.weight_decay.at(step) };
        optimizer.step(&mut weights, &gradient, &rates);
        drop(gradient);
        fold(&batch_stats, &stats_places, &mut buffers);
        learner.after_step(&statistics, &spec.progress(step), &mut weights, &mut buffers);
        // nothing that is not finite may reach a checkpoint, from which the run could never go on
        let pieces = weights.chunks_mut(PIECE).chain(buffers.chunks_mut(PIECE)).collect();
        if let Some(bad) = on_threads(*threads, pieces, |values| not_finite(values)).into_iter().flatten().next() {
            return Err(EngineError::WeightsNotFinite { step: step + 1, value: bad });
        }
        if let (Some(average), Some(config)) = (ema, &settings.ema) {
            ema::update(average, &weights, config.momentum);
        }
        let flat = Flat::upload(weights, buffers, &spec.device);
        let (skipped, precision) = (false, PrecisionState::default());
        let numbers = StepNumbers {
            step: step + 1,
            loss,
            lr,
            grad_norm,
            parts,
            uniform_loss: uniform,
            embeddings: shape,
            skipped,
            precision,
        };
        Ok((Outcome::Moved(Box::new(numbers)), flat))
    }
}

impl StepNumbers {
    /// What is known of a step that moved nothing.
    fn skipped(what: &str, value: f64, lr: f64) -> Self {
        let [loss, grad_norm] = if what == LOSS { [value, f64::NAN] } else { [f64::NAN, value] };
        Self {
            step: 0,
            loss,
            lr,
            grad_norm,
            parts: Vec::new(),
            uniform_loss: None,
            embeddings: None,
            skipped: true,
            precision: PrecisionState::default(),
        }
    }
}

const LOSS: &str = "loss";
const GRADIENT: &str = "norm of the gradient";

/// Lists the trained parameters for the optimizer.
pub fn specs(layout: &Layout) -> Vec<ParamSpec> {
    let trained = layout.entries().iter().filter(|entry| entry.kind == Kind::Trained);
    ParamSpec::layout(trained.map(|entry| (entry.path.clone(), entry.shape.clone())))
}

/// Values that a thread looks at together.
const PIECE: usize = 1 << 16;

/// Does `work` on each of some values, on so many threads; results in order.
fn on_threads<R: Send>(threads: usize, mut all: Vec<&mut [f32]>, work: impl Fn(&mut [f32]) -> R + Sync) -> Vec<R> {
    let lengths: Vec<usize> = all.iter().map(|values| values.len()).collect();
    let mut shares: Vec<Vec<&mut [f32]>> =
        share_tensors(&lengths, threads.max(1)).iter().rev().map(|share| all.split_off(share.start)).collect();
    let own = shares.pop().unwrap_or_default();
    let run = |share: Vec<&mut [f32]>| share.into_iter().map(&work).collect::<Vec<R>>();
    std::thread::scope(|scope| {
        let others: Vec<_> = shares.into_iter().rev().map(|share| scope.spawn(|| run(share))).collect();
        let mut results = run(own);
        for other in others {
            results.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        results
    })
}

/// Finds the first value that is NaN or infinite.
fn not_finite(values: &[f32]) -> Option<f32> {
    // without an early end within a chunk, so that it compiles to vector instructions
    let clean = |chunk: &[f32]| chunk.iter().fold(true, |clean, value| clean & value.is_finite());
    values.chunks(4096).find(|chunk| !clean(chunk))?.iter().copied().find(|value| !value.is_finite())
}

/// Folds the statistics of all micro-batches into the running ones, in micro-batch order.
fn fold(batch_stats: &[Vec<f32>], places: &[Range<usize>], buffers: &mut [f32]) {
    for micro in batch_stats {
        let mut rest = micro.as_slice();
        for place in places {
            let (batch, others) = rest.split_at(place.len());
            params::fold(&mut buffers[place.clone()], batch);
            rest = others;
        }
    }
}
