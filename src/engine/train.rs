//! The loop.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use burn::tensor::Device;
use image::RgbImage;

use super::audit;
use super::error::{EngineError, NotFinite};
use super::finding::Finding;
use super::held_out::{self, HeldOut};
use super::process_log::ProcessLog;
use super::trainer::{Settings, StepNumbers, Stepped, Trainer};
use super::watch::Watch;
use crate::augment::{MultiView, Normalize};
use crate::checkpoint::{self, State};
use crate::data::{BadImages, HostBatch, Loader, LoaderPlan, Source, ViewMaker};
use crate::eval::{Classified, Warning};
use crate::files::write_atomically;
use crate::ops;
use crate::parallel::{Collective, Fault, Link, ProcessRank, Reduction, Timed, run_ranks, value_from_leader};
use crate::plan::Plan;
use crate::precision::{Bf16, Compute, OnNonFinite};
use crate::report::{EvaluationLog, EvaluationRecord, quoted};

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
    /// The other processes of the run, if there are any.
    pub link: Option<&'a Arc<Link>>,
    /// The run folder.
    pub folder: &'a Path,
    /// Checkpoint to go on from.
    pub resume: Option<PathBuf>,
    /// Images to evaluate on while training.
    pub held_out: Option<&'a HeldOut>,
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
    /// Alarms raised while training.
    pub warnings: Vec<Warning>,
    /// Newest checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// On the first rank, where the run may stop early: the step whose weights are the best, and whether the run ended there.
    pub best: Option<(u64, bool)>,
}

/// Trains until the plan's last step or until asked to stop, on `plan.ranks` rank threads.
///
/// # Errors
/// When images, checkpoints or the run folder fail, or the loss is not finite.
pub fn train(job: &Job<'_>) -> Result<Trained, EngineError> {
    ops::configure(job.plan.recipe.ops);
    let threads = job.plan.threads();
    let first = job.link.map_or(0, |link| link.process() * threads);
    let panicked = |thread, text| EngineError::Panicked { rank: first + thread, text };
    let outcome = match job.link {
        None => run_ranks(threads, panicked, |rank| train_rank(job, &Timed::new(&rank), None)),
        Some(link) => train_among(job, link, first..first + threads, panicked),
    };
    let mut results = outcome?;
    match results.swap_remove(0) {
        Some(trained) => Ok(trained),
        None => unreachable!("the first rank leads its process and returns the state"),
    }
}

/// Trains this process's ranks of a run of several processes.
fn train_among(
    job: &Job<'_>,
    link: &Arc<Link>,
    own: Range<usize>,
    panicked: impl Fn(usize, String) -> EngineError + Sync,
) -> Result<Vec<Option<Trained>>, EngineError> {
    let reduction = job.plan.recipe.parallel.reduction;
    let outcome = ProcessLog::open(job.folder, link.process()).map_err(EngineError::from).and_then(|log| {
        let last = own.end - 1;
        log.line(&format!(
            "started, process id {}, ranks {} to {last} of {}",
            std::process::id(),
            own.start,
            job.plan.ranks
        ))?;
        let outcome = run_ranks(own.len(), panicked, |thread| {
            let rank = ProcessRank::new(thread, Arc::clone(link), reduction);
            train_rank(job, &Timed::new(&rank), Some(&log))
        });
        let beside = if reduction == Reduction::Fast { " beside MPI's all-reduce" } else { "" };
        let sent = format!("{} MiB sent{beside}", link.bytes_sent() >> 20);
        let ended = match &outcome {
            Ok(trained) => match trained.iter().flatten().next() {
                Some(Trained { interrupted: true, state, .. }) => {
                    log.line(&format!("stopped after step {} as asked, {sent}", state.step))
                }
                _ => log.line(&format!("done, {sent}")),
            },
            Err(error) => log.line(&format!("failed, {sent}: {error}")),
        };
        // what training came to counts for more than its log
        outcome.and_then(|trained| Ok(ended.map(|()| trained)?))
    });
    if let Err(error) = &outcome {
        link.abort(&error.to_string());
    }
    outcome
}

/// Returns what came out on the first rank.
fn train_rank(job: &Job<'_>, ranks: &Timed<'_>, log: Option<&ProcessLog>) -> Result<Option<Trained>, EngineError> {
    let plan = job.plan;
    let recipe = &plan.recipe;
    let device = job.device.clone().autodiff();
    let learner = recipe.method.build(&recipe.inputs(), &plan.scope(&device))?;
    let mine = plan.owned_by(ranks.rank());
    let mut trainer = Trainer::start(settings(plan), device, mine.clone(), learner, ranks, job.resume.as_deref())?;
    let first_step = trainer.steps_done();
    let mut loader = Loader::start(loader_plan(job, ranks, first_step..plan.steps, mine.clone()))?;
    // only rank 0 writes shared files; its failures reach the others through the collective
    let fault = Fault::from_env().unwrap_or_default();
    let mut watch = (ranks.rank() == 0).then(|| Watch::open(job, first_step)).transpose()?;
    let checkpoints = job.folder.join("checkpoints");
    let mut saved = None;
    let mut interrupted = false;
    let mut examiner = (ranks.rank() == 0).then(|| Examiner::open(job, first_step)).transpose()?;
    // what was found before a restart counts, too
    let mut ended = match &recipe.early_stopping {
        Some(_) => said_by_first(ranks, examiner.as_ref().is_some_and(|examiner| examiner.verdict.ended))?,
        None => false,
    };
    let started = Instant::now();

    while trainer.steps_done() < plan.steps && !interrupted && !ended {
        let step = trainer.steps_done();
        if ranks.world_size() > 1 && (step == first_step || step.is_multiple_of(audit::EVERY)) {
            let weights = trainer.with_snapshot(|_, now| audit::hash_of(now.weights, now.buffers));
            audit::compare(ranks, step, &audit::facts(plan, &job.source, step, weights))?;
        }
        let start = Instant::now();
        let batches: Vec<HostBatch> = loader.by_ref().take(mine.len()).collect::<Result<_, _>>()?;
        let (loaded, waited) = (Instant::now(), ranks.waited());
        let numbers = take_step(job, ranks, &mut trainer, batches, fault, watch.as_mut())?;
        let times = [loaded - start, ranks.worked(loaded, waited)].map(|time| time.as_secs_f64());
        // all ranks stop after the same step, whichever was asked to; when a checkpoint is due is rank 0's word
        let (done, every) = (trainer.steps_done(), recipe.checkpoint.every_steps);
        let asked = job.stop.load(Ordering::Relaxed);
        let due = done == plan.steps || (every > 0 && done.is_multiple_of(every));
        let flags = [asked, due].map(|flag| f64::from(u8::from(flag)));
        let said = ranks.all_gather_f64([flags, times].concat())?;
        let (said, _) = said.as_chunks::<4>();
        interrupted = said.iter().any(|&[asked, ..]| asked != 0.0);
        let due = interrupted || said[0][1] != 0.0;
        let times: Vec<[f64; 2]> = said.iter().map(|&[_, _, input, work]| [input, work]).collect();
        if let (Some(watch), Some(numbers)) = (&mut watch, &numbers) {
            watch.step(plan, numbers, &times)?;
        }
        if plan.evaluated_every().is_some_and(|every| {
            // a run that may stop early is judged by its last step, too
            done.is_multiple_of(every) || (done == plan.steps && recipe.early_stopping.is_some())
        }) {
            if let (Some(examiner), Some(watch)) = (&mut examiner, &mut watch) {
                let text = examiner.examine(job, &trainer, ranks.threads())?;
                watch.say(&text);
            }
            ranks.wait_for_processes("evaluated")?;
            if recipe.early_stopping.is_some() {
                ended = said_by_first(ranks, examiner.as_ref().is_some_and(|examiner| examiner.verdict.ended))?;
            }
        }
        let due = due || ended;
        if let (true, Some(log)) = (ranks.leads() && (due || done.is_multiple_of(recipe.log.every_steps)), log) {
            let first = ranks.rank();
            let own = times[first..first + ranks.threads()].iter().enumerate();
            let own: Vec<String> = own
                .map(|(rank, [input, work])| format!("rank {} {input:.3} s input, {work:.3} s work", first + rank))
                .collect();
            log.line(&format!("step {done}: {}", own.join("; ")))?;
        }
        if let (true, Some(watch)) = (due, &watch) {
            watch.sync()?;
            let keep = recipe.checkpoint.keep;
            saved = trainer
                .with_snapshot(|layout, snapshot| checkpoint::save(&checkpoints, layout, snapshot, plan.digest(), keep))
                .transpose()?;
        }
        if due {
            ranks.wait_for_processes("checkpoint written")?;
        }
    }
    let warnings = watch.map_or_else(Vec::new, Watch::finish);
    let done = trainer.steps_done();
    Ok(trainer.finish().map(|state| Trained {
        interrupted: interrupted && done < plan.steps && !ended,
        best: examiner
            .and_then(|examiner| Some((examiner.verdict.best?, ended)))
            .filter(|_| recipe.early_stopping.is_some()),
        seconds: started.elapsed().as_secs_f64(),
        steps: done - first_step,
        warnings,
        checkpoint: saved.or_else(|| job.resume.clone()),
        state,
    }))
}

/// Runs one step, spoilt by a fault if there is one, and tells of what was not finite.
fn take_step(
    job: &Job<'_>,
    ranks: &dyn Collective,
    trainer: &mut Trainer<'_>,
    mut batches: Vec<HostBatch>,
    fault: Option<Fault>,
    watch: Option<&mut Watch>,
) -> Result<Option<StepNumbers>, EngineError> {
    let step = trainer.steps_done() + 1;
    let mut spoilt = false;
    if let Some(fault) = fault {
        std::thread::sleep(fault.delay(ranks.rank()));
        if fault.spoils(ranks.rank(), step) {
            batches[0].views[0].pixels[0] = f32::NAN;
        }
        spoilt = fault.overflows(ranks.rank(), step);
    }
    let Stepped { numbers, finding, stops } = trainer.step(batches, spoilt)?;
    if let Some(finding) = finding {
        let told = tell(job, ranks, trainer, &finding, stops)?;
        if let (Some(watch), Some(told)) = (watch, told) {
            watch.say(&told);
        }
    }
    Ok(numbers)
}

/// Writes down why a step was not finite, with the state before it where the run stops; returns a line about it on the first rank.
fn tell(
    job: &Job<'_>,
    ranks: &dyn Collective,
    trainer: &Trainer<'_>,
    finding: &Finding,
    stops: bool,
) -> Result<Option<String>, EngineError> {
    let plan = job.plan;
    let bundle = job.folder.join(format!("nonfinite-step-{}.json", finding.step));
    let mut saved = "the first process has written why, and the state before the step".to_owned();
    if ranks.rank() == 0 {
        let text = serde_json::to_vec_pretty(finding).expect("numbers and text are JSON");
        let written = write_atomically(&bundle, &text).map_err(EngineError::from);
        let written = written.and_then(|()| if stops { keep_state(job, trainer) } else { Ok(PathBuf::new()) });
        saved = match written {
            Ok(checkpoint) => format!(
                "the state before the step is saved: {}; `autodidact replay {}` shows every layer",
                checkpoint.display(),
                quoted(&bundle)
            ),
            // what is wrong with the numbers counts for more than what is wrong with the disk
            Err(error) if stops => {
                let error = error.to_string();
                format!("the state before the step could not be saved ({})", error.lines().next().unwrap_or_default())
            }
            Err(error) => return Err(error),
        };
    }
    ranks.wait_for_processes("bundle written")?;
    // no rank ends the run before the first one has written, and all say what it says
    let saved = value_from_leader(ranks, ranks.leads().then_some(saved))?;
    let Finding { step, what, value, compute, precision, .. } = finding;
    let computed = match precision.scale {
        Some(scale) => format!("{} at loss scale {scale}", compute.name()),
        None => compute.name().to_owned(),
    };
    let place = match precision.skipped_in_a_row {
        0 => finding.place(),
        skipped => format!("{}; the {skipped} steps in front of it moved nothing either", finding.place()),
    };
    if stops {
        return Err(EngineError::NotFinite(Box::new(NotFinite {
            step: *step,
            what: what.clone(),
            value: value.clone(),
            precision: computed,
            place,
            advice: advice(finding, plan.bf16),
            saved: saved.to_string(),
        })));
    }
    let then = match plan.recipe.precision.on_nonfinite {
        OnNonFinite::FallbackBf16 => "the run goes on in bf16 from this step on",
        _ => "the step moves nothing",
    };
    let text = format!(
        "warning[W007]: step {step}: the {what} is {value} in {computed}; {place}; {then} ({})",
        bundle.display()
    );
    Ok((ranks.rank() == 0).then_some(text))
}

/// Writes the state in front of a step that was not finite as a checkpoint.
fn keep_state(job: &Job<'_>, trainer: &Trainer<'_>) -> Result<PathBuf, EngineError> {
    let (plan, checkpoints) = (job.plan, job.folder.join("checkpoints"));
    let keep = plan.recipe.checkpoint.keep;
    let saved = trainer.with_snapshot(|layout, now| checkpoint::save(&checkpoints, layout, now, plan.digest(), keep));
    Ok(saved.transpose()?.unwrap_or(checkpoints))
}

/// What may help a run whose numbers are not finite.
fn advice(finding: &Finding, bf16: Bf16) -> String {
    let is_input = finding.first.as_ref().is_some_and(|first| first.path.starts_with("view "));
    match finding.compute {
        _ if is_input => {
            "look at these images, and at `data.mean` and `data.std`: `precision.on_nonfinite=skip` passes such steps over".to_owned()
        }
        Compute::Fp16 if bf16 != Bf16::No => {
            "this device supports bf16, whose range is that of fp32: use `precision.compute=bf16` (or `precision.on_nonfinite=fallback-bf16`)".to_owned()
        }
        Compute::Fp16 => {
            "this device has no bf16: use `precision.compute=fp32`, or keep the heads in fp32 (`precision.keep_fp32=[\"heads\"]`)".to_owned()
        }
        _ => "lower `schedule.lr`, lengthen `schedule.warmup_epochs` or set `schedule.clip_norm=1.0`, and start anew or from an older checkpoint".to_owned(),
    }
}

/// Returns what the first rank says.
fn said_by_first(ranks: &dyn Collective, word: bool) -> Result<bool, EngineError> {
    Ok(ranks.all_gather_f64(vec![f64::from(u8::from(word))])?[0] != 0.0)
}

/// Evaluates on a schedule, on the first rank.
struct Examiner {
    log: EvaluationLog,
    verdict: held_out::Verdict,
}

impl Examiner {
    fn open(job: &Job<'_>, done: u64) -> Result<Self, EngineError> {
        let log = EvaluationLog::open(job.folder, done)?;
        let early = job.plan.recipe.early_stopping.as_ref();
        let verdict = early.map_or_else(Default::default, |early| held_out::judge(early, log.records()));
        Ok(Self { log, verdict })
    }

    /// Classifies what is held out with the weights as they are, notes it, and judges the run; returns a line about it.
    fn examine(&mut self, job: &Job<'_>, trainer: &Trainer<'_>, threads: usize) -> Result<String, EngineError> {
        let (plan, step) = (job.plan, trainer.steps_done());
        let held_out = job.held_out.ok_or(EngineError::NothingHeldOut)?;
        let examined = trainer.with_snapshot(|layout, now| -> Result<String, EngineError> {
            let weights = now.ema.unwrap_or(now.weights);
            let result = held_out.watch(plan, (weights, now.buffers), &job.device, threads)?;
            let text = match &result {
                Classified::One(result) => format!(
                    "step {step}: {} top-1 {:.2} %, loss {:.4} ({} images)",
                    result.on,
                    100.0 * result.top1,
                    result.loss,
                    result.images
                ),
                Classified::Several(result) => format!(
                    "step {step}: {} mean average precision {:.2} %, loss {:.4} ({} images)",
                    result.on,
                    100.0 * result.mean_average_precision,
                    result.loss,
                    result.images
                ),
            };
            self.log.push(EvaluationRecord::new(step, step as f64 / plan.steps_per_epoch as f64, &result))?;
            if let Some(early) = &plan.recipe.early_stopping {
                self.verdict = held_out::judge(early, self.log.records());
                if self.verdict.improved {
                    held_out::keep_best(job.folder, layout, weights, now.buffers)?;
                }
            }
            Ok(text)
        });
        examined.unwrap_or_else(|| Ok(String::new()))
    }
}

pub(super) fn settings(plan: &Plan) -> Settings {
    let recipe = &plan.recipe;
    Settings {
        seed: recipe.seed,
        micro_batches: plan.micro_batches,
        memory: recipe.batch.memory,
        activation_checkpointing: recipe.batch.activation_checkpointing,
        steps: plan.steps,
        steps_per_epoch: plan.steps_per_epoch,
        optimizer: recipe.optimizer.clone(),
        parameters: recipe.parameter_rules(),
        schedule: plan.schedule(),
        weight_decay: plan.weight_decay,
        clip: recipe.schedule.clip(),
        ema: recipe.ema.clone(),
        precision: recipe.precision.clone(),
        images: recipe.batch.global,
        plan: plan.digest().to_owned(),
    }
}

pub(super) fn loader_plan(
    job: &Job<'_>,
    ranks: &dyn Collective,
    steps: Range<u64>,
    micros: Range<usize>,
) -> LoaderPlan {
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
        workers: job.plan.workers.div_ceil(ranks.threads()),
        prefetch: recipe.data.prefetch,
        mean: recipe.data.mean,
        std: recipe.data.std,
        on_error: recipe.data.on_error,
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
        self.views.erase(out, self.seed, epoch, index, view);
    }
}
