//! The loop.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use burn::tensor::Device;
use image::RgbImage;

use super::error::EngineError;
use super::step::{self, StepResult, StepSpec};
use super::watch::{StepNumbers, Watch};
use crate::augment::{MultiView, Normalize};
use crate::checkpoint::{self, CheckpointError, Snapshot, State};
use crate::data::{BadImages, HostBatch, Loader, LoaderPlan, Source, ViewMaker};
use crate::method::{Inputs, Learner};
use crate::model::params::{self, Layout};
use crate::model::{Kind, Scope};
use crate::optim::{Optimizer, ParamSpec, Schedule, clip_global_norm, ema, norm};
use crate::parallel::{Collective, ThreadRank, run_ranks};
use crate::plan::Plan;

/// A run to be trained.
pub struct Job<'a> {
    /// What will happen.
    pub plan: &'a Plan,
    /// The images.
    pub source: Arc<dyn Source>,
    /// Unreadable images, shared by all ranks.
    pub bad_images: Arc<BadImages>,
    /// Where tensors live, without autodiff.
    pub device: Device,
    /// The run folder.
    pub folder: &'a Path,
    /// Checkpoint to go on from.
    pub resume: Option<PathBuf>,
    /// Set when the user asks to stop: the step is finished and a checkpoint written.
    pub stop: &'a AtomicBool,
}

/// What came out of a run.
#[derive(Debug)]
pub struct Trained {
    /// The state after the last step.
    pub state: State,
    /// True when the user stopped it before the end.
    pub interrupted: bool,
    /// Seconds spent on the steps run now.
    pub seconds: f64,
    /// Steps run now.
    pub steps: u64,
    /// Newest checkpoint.
    pub checkpoint: Option<PathBuf>,
}

/// Trains until the plan's last step or until asked to stop, on `plan.ranks` rank threads.
///
/// # Errors
/// When images, checkpoints or the run folder fail, or the loss is not finite.
pub fn train(job: &Job<'_>) -> Result<Trained, EngineError> {
    let panicked = |rank, text| EngineError::Panicked { rank, text };
    let mut results = run_ranks(job.plan.ranks, panicked, |rank| train_rank(job, &rank))?;
    Ok(results.swap_remove(0))
}

fn train_rank(job: &Job<'_>, ranks: &ThreadRank) -> Result<Trained, EngineError> {
    let plan = job.plan;
    let recipe = &plan.recipe;
    let device = job.device.clone().autodiff();
    let inputs = Inputs { backbone: &recipe.backbone, views: &recipe.views };
    let mut learner = recipe.method.build(&inputs, &Scope::new(recipe.seed, &device))?;
    let mut optimizer = Optimizer::new(&recipe.optimizer, &specs(learner.layout()));
    let mut state = start(job, learner.as_ref(), &mut optimizer)?;
    learner.set(&state.weights, &state.buffers);

    let mine = plan.owned_by(ranks.rank());
    let spec = StepSpec {
        seed: recipe.seed,
        micros: plan.micro_batches,
        mine: mine.clone(),
        memory: recipe.batch.memory,
        steps_per_epoch: plan.steps_per_epoch,
        device,
    };
    let mut loader = Loader::start(loader_plan(job, ranks, state.step..plan.steps, mine))?;
    let schedule = schedule(plan);
    // only rank 0 writes shared files; its failures reach the others through the collective
    let mut watch = (ranks.rank() == 0).then(|| Watch::open(job, state.step)).transpose()?;
    let checkpoints = job.folder.join("checkpoints");
    let mut saved = None;
    let mut interrupted = false;
    let first_step = state.step;
    let started = Instant::now();

    while state.step < plan.steps && !interrupted {
        let batches: Vec<HostBatch> = loader.by_ref().take(spec.mine.len()).collect::<Result<_, _>>()?;
        let StepResult { loss, mut gradient, batch_stats, stats_places } =
            step::run(&spec, state.step, batches, learner.as_ref(), ranks)?;
        finite(state.step, "loss", loss)?;
        let grad_norm = match recipe.schedule.clip_norm {
            Some(limit) => clip_global_norm(&mut gradient, limit),
            None => norm(&gradient),
        };
        finite(state.step, "norm of the gradient", grad_norm)?;

        let lr = schedule.lr_at(state.step);
        optimizer.step(&mut state.weights, &gradient, lr);
        fold(&batch_stats, &stats_places, &mut state.buffers);
        // nothing that is not finite may reach a checkpoint, from which the run could never go on
        if let Some(bad) = state.weights.iter().chain(&state.buffers).find(|value| !value.is_finite()) {
            finite(state.step, "updated weight", f64::from(*bad))?;
        }
        if let (Some(average), Some(config)) = (&mut state.ema, &recipe.ema) {
            ema::update(average, &state.weights, config.momentum);
        }
        learner.set(&state.weights, &state.buffers);
        state.step += 1;

        if let Some(watch) = &mut watch {
            watch.step(plan, &StepNumbers { step: state.step, loss, lr, grad_norm })?;
        }
        // all ranks must stop after the same step, so rank 0 decides
        let asked = job.stop.load(Ordering::Relaxed);
        interrupted = ranks.all_gather_f64(vec![f64::from(u8::from(asked))])?[0] != 0.0;
        let every = recipe.checkpoint.every_steps;
        let due = interrupted || state.step == plan.steps || (every > 0 && state.step.is_multiple_of(every));
        if let (true, Some(watch)) = (due, &watch) {
            watch.sync()?;
            let snapshot = Snapshot {
                step: state.step,
                weights: &state.weights,
                buffers: &state.buffers,
                optimizer: optimizer.state(),
                ema: state.ema.as_deref(),
            };
            let keep = recipe.checkpoint.keep;
            saved = Some(checkpoint::save(&checkpoints, learner.layout(), &snapshot, plan.digest(), keep)?);
        }
    }
    if let Some(watch) = watch {
        watch.finish();
    }
    let steps = state.step - first_step;
    Ok(Trained {
        interrupted: interrupted && state.step < plan.steps,
        seconds: started.elapsed().as_secs_f64(),
        steps,
        checkpoint: saved.or_else(|| job.resume.clone()),
        state,
    })
}

/// Loads the checkpoint to go on from, or starts with the drawn weights.
fn start(job: &Job<'_>, learner: &dyn Learner, optimizer: &mut Optimizer) -> Result<State, EngineError> {
    let with_ema = job.plan.recipe.ema.is_some();
    let Some(path) = &job.resume else {
        let weights = learner.weights();
        let ema = with_ema.then(|| weights.clone());
        return Ok(State { step: 0, weights, buffers: learner.buffers(), optimizer: Vec::new(), ema });
    };
    let names: Vec<&str> = optimizer.state().iter().map(|(name, _)| *name).collect();
    let (mut state, _) = checkpoint::load(path, learner.layout(), &names)?;
    let loaded = std::mem::take(&mut state.optimizer);
    let loaded = loaded.iter().map(|(name, values)| (name.as_str(), values.as_slice()));
    let other = |reason: String| CheckpointError::OtherNetwork { path: path.clone(), reason };
    optimizer.load_state(state.step, loaded).map_err(|e| other(e.to_string()))?;
    if with_ema && state.ema.is_none() {
        return Err(other("it has no moving average, the recipe asks for one".to_owned()).into());
    }
    state.ema = state.ema.filter(|_| with_ema);
    Ok(state)
}

fn loader_plan(job: &Job<'_>, ranks: &ThreadRank, steps: Range<u64>, micros: Range<usize>) -> LoaderPlan {
    let recipe = &job.plan.recipe;
    LoaderPlan {
        source: Arc::clone(&job.source),
        views: Arc::new(Views { views: MultiView::new(&recipe.views), seed: recipe.seed }),
        bad: Arc::clone(&job.bad_images),
        seed: recipe.seed,
        global: recipe.batch.global,
        micro: recipe.batch.micro,
        first_step: steps.start,
        num_steps: steps.end - steps.start,
        micros,
        workers: job.plan.workers.div_ceil(ranks.world_size()),
        prefetch: recipe.data.prefetch,
        mean: recipe.data.mean,
        std: recipe.data.std,
        on_error: recipe.data.on_error,
    }
}

fn schedule(plan: &Plan) -> Schedule {
    Schedule {
        lr: plan.lr,
        min_lr: plan.min_lr,
        warmup_epochs: plan.recipe.schedule.warmup_epochs,
        epochs: plan.epochs(),
        steps_per_epoch: plan.steps_per_epoch,
    }
}

/// The recipe's views, as the loader makes them.
struct Views {
    views: MultiView,
    seed: u64,
}

impl ViewMaker for Views {
    fn num_views(&self) -> usize {
        self.views.num_views()
    }

    fn size(&self, view: usize) -> u32 {
        self.views.size_of(view)
    }

    fn make(&self, image: &RgbImage, epoch: u64, index: u64, view: usize, normalize: &Normalize, out: &mut [f32]) {
        normalize.write(&self.views.apply(image, self.seed, epoch, index, view), out);
    }
}

/// Lists the trained parameters for the optimizer.
pub fn specs(layout: &Layout) -> Vec<ParamSpec> {
    let trained = layout.entries().iter().filter(|entry| entry.kind == Kind::Trained);
    ParamSpec::layout(trained.map(|entry| (entry.path.clone(), entry.shape.clone())))
}

fn finite(step: u64, what: &'static str, value: f64) -> Result<(), EngineError> {
    if value.is_finite() { Ok(()) } else { Err(EngineError::NotFinite { step, what, value }) }
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
