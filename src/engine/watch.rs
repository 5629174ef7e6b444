//! What rank 0 tells while training: `metrics.jsonl`, events for `TensorBoard`, progress.

use std::time::{Instant, SystemTime};

use super::alarms::Alarms;
use super::error::EngineError;
use super::pace::Stragglers;
use super::train::Job;
use super::trainer::StepNumbers;
use crate::eval::Warning;
use crate::plan::Plan;
use crate::report::{EventLog, MetricsLog, Progress, StepRecord, Style};

/// The run's logs, open.
pub(super) struct Watch {
    metrics: MetricsLog,
    events: EventLog,
    progress: Progress,
    alarms: Alarms,
    stragglers: Stragglers,
    warnings: Vec<Warning>,
    started: Instant,
    last: Instant,
}

impl Watch {
    /// Opens the logs of a run that has done `done` steps.
    pub(super) fn open(job: &Job<'_>, done: u64) -> Result<Self, EngineError> {
        let style = Style::detect(job.plan.recipe.log.every_steps);
        let now = Instant::now();
        let metrics = MetricsLog::open(job.folder, done + 1)?;
        let mut progress = Progress::new(style, job.plan.steps, done);
        if metrics.removed().damaged > 0 {
            progress.say(&format!("note: {} damaged lines of metrics.jsonl were removed", metrics.removed().damaged));
        }
        Ok(Self {
            metrics,
            events: EventLog::create(job.folder, done + 1, SystemTime::now())?,
            progress,
            alarms: Alarms::new(job.plan.warmup_steps),
            stragglers: Stragglers::new((0..job.plan.ranks).map(|rank| job.plan.owned_by(rank).len()).collect()),
            warnings: Vec::new(),
            started: now,
            last: now,
        })
    }

    /// Writes one step down.
    ///
    /// `times` are two a rank: seconds for its input, and for its forward and backward passes.
    pub(super) fn step(&mut self, plan: &Plan, numbers: &StepNumbers, times: &[[f64; 2]]) -> Result<(), EngineError> {
        let images = plan.recipe.batch.global as u64;
        let now = Instant::now();
        let (pace, note) = self.stragglers.observe(times);
        let record = StepRecord {
            step: numbers.step,
            epoch: numbers.step as f64 / plan.steps_per_epoch as f64,
            loss: numbers.loss as f32,
            lr: numbers.lr,
            grad_norm: numbers.grad_norm as f32,
            images: numbers.step * images,
            embedding_spread: numbers.embeddings.map(|shape| shape.spread as f32),
            embedding_rank: numbers.embeddings.and_then(|shape| Some(shape.rank? as f32)),
            loss_scale: numbers.precision.scale,
            overflows: numbers.precision.overflows,
            skipped: numbers.precision.skipped,
            parts: numbers.parts.iter().map(|(name, value)| ((*name).to_owned(), *value as f32)).collect(),
            time_s: (now - self.started).as_secs_f64(),
            images_per_s: images as f64 / (now - self.last).as_secs_f64().max(1e-9),
            pace: Some(pace),
        };
        self.last = now;
        self.metrics.append(&record)?;
        self.events.append(&record, SystemTime::now())?;
        self.progress.step(&record, images);
        if let Some(note) = note {
            self.progress.say(&note);
        }
        if numbers.skipped {
            return Ok(());
        }
        for warning in self.alarms.observe(numbers) {
            self.progress.say(&warning.to_string());
            self.warnings.push(warning);
        }
        Ok(())
    }

    /// Says a line between the steps.
    pub(super) fn say(&mut self, text: &str) {
        self.progress.say(text);
    }

    /// Puts what was logged on disk, before a checkpoint that goes on from here.
    pub(super) fn sync(&self) -> Result<(), EngineError> {
        Ok(self.metrics.sync()?)
    }

    /// Clears the progress bar and returns the alarms that were raised.
    pub(super) fn finish(self) -> Vec<Warning> {
        self.progress.finish();
        self.warnings
    }
}
