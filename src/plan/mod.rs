//! The plan: what will happen. Everything a run needs to know is computed here, once, before the first image is decoded.

mod digest;
mod guard;
mod show;

pub use digest::{Difference, FolderError, recorded_data, recorded_start};
pub use guard::Warning;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use burn::tensor::Device;

use crate::method::{Labels, RunFacts};
use crate::model::{BackboneConfig, Scope, Start};
use crate::optim::{LrDecay, LrScaling, Ramp, RampConfig, RampShape, Schedule};
use crate::parallel::Reduction;
use crate::precision::{Bf16, Compute, PrecisionConfig};
use crate::recipe::{Numbers, Problem, Recipe, plural};

/// A recipe, resolved for a data set and a machine.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The recipe with its defaults resolved; running it again gives the same bits.
    pub recipe: Recipe,
    /// Name of the run and of its folder.
    pub name: String,
    /// The data set.
    pub data: DataFacts,
    /// Steps of one epoch; the images that do not fill a batch are left out, others each epoch.
    pub steps_per_epoch: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Steps of the warm-up.
    pub warmup_steps: u64,
    /// Learning rate after the warm-up.
    pub lr: f64,
    /// Learning rate at the end.
    pub min_lr: f64,
    /// Learning rate of the first step of a warm-up.
    pub warmup_lr: f64,
    /// The optimizer's weight decay over the run.
    pub weight_decay: Ramp,
    /// How `lr` follows from the recipe.
    pub lr_rule: String,
    /// Micro-batches of one step, over all ranks.
    pub micro_batches: usize,
    /// Ranks: rank threads of all processes.
    pub ranks: usize,
    /// Processes, each with as many rank threads.
    pub processes: usize,
    /// Loader threads.
    pub workers: usize,
    /// What it runs on, in words.
    pub device: String,
    /// What that makes of bf16.
    pub bf16: Bf16,
    /// Trainable parameters; filled in when the network has been built.
    pub parameters: Option<usize>,
    /// What the method's settings were made from, where the recipe leaves them open.
    pub notes: Vec<String>,
    /// What the user should know before it starts.
    pub warnings: Vec<Warning>,
    start: Option<Arc<Start>>,
    digest: String,
}

/// What is known about a data set before training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFacts {
    /// Images that the run may use.
    pub images: usize,
    /// Classes, if the images are labelled.
    pub classes: Option<usize>,
    /// Where they come from, in words.
    pub description: String,
    /// Digest of what the images are, the same wherever they lie.
    pub fingerprint: String,
    /// The labels, where the run learns from them.
    pub labels: Labels,
}

/// What the command line and the machine add to a recipe. None of it changes a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Name of the run, if the recipe has none.
    pub name: String,
    /// Number of rank threads of each process.
    pub ranks: Ranks,
    /// Number of processes.
    pub processes: usize,
    /// Cores of the machine.
    pub cores: usize,
    /// What the run will compute on, in words.
    pub device: String,
    /// What that makes of bf16.
    pub bf16: Bf16,
}

/// A number of ranks, as typed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ranks {
    /// As many as there are cores, at most one for each micro-batch.
    #[default]
    Auto,
    /// This many.
    Count(usize),
}

impl FromStr for Ranks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(count) if count >= 1 => Ok(Self::Count(count)),
            _ => Err("write a whole number from 1, or `auto`".to_owned()),
        }
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Count(count) => write!(f, "{count}"),
        }
    }
}

impl Plan {
    /// Resolves a recipe. `start` are the weights that its `init` names.
    ///
    /// # Errors
    /// With everything that does not fit: the recipe's own problems ([`Recipe::check`]), or batch, duration and ranks that
    /// do not fit the data.
    pub fn new(
        mut recipe: Recipe,
        mut data: DataFacts,
        start: Option<Start>,
        request: &Request,
    ) -> Result<Self, Vec<Problem>> {
        let problems = recipe.check();
        if !problems.is_empty() {
            return Err(problems);
        }
        let name = recipe.name.get_or_insert_with(|| request.name.clone()).clone();
        recipe.backbone.spell_out();
        data.images = data.images.min(recipe.data.limit.unwrap_or(usize::MAX));

        let mut found = Numbers::default();
        recipe.method.suits(&data.labels, &mut found);
        if !found.problems.is_empty() {
            return Err(found.problems);
        }
        let (global, micro) = (recipe.batch.global, recipe.batch.micro);
        let micro_batches = global / micro;
        let mut problems = Vec::new();
        problems.extend(batch_problem(data.images, global, micro));
        let processes = request.processes.max(1);
        let ranks = processes
            * match request.ranks {
                Ranks::Auto => request.cores.clamp(1, (micro_batches / processes).max(1)),
                Ranks::Count(count) => count,
            };
        if request.ranks != Ranks::Auto || processes > 1 {
            problems.extend(ranks_problem(ranks, processes, global, micro));
        }
        if !problems.is_empty() {
            return Err(problems);
        }

        let steps_per_epoch = (data.images / global) as u64;
        let in_steps = |epochs: f64| (epochs * steps_per_epoch as f64).round() as u64;
        let schedule = &recipe.schedule;
        let steps = schedule.steps.unwrap_or_else(|| in_steps(schedule.epochs.unwrap_or_default()).max(1));
        let warmup_steps = in_steps(schedule.warmup_epochs);
        if warmup_steps > steps {
            return Err(vec![warmup_problem(schedule.warmup_epochs, warmup_steps, steps, steps_per_epoch)]);
        }
        let factor = schedule.lr_scaling.factor(global);
        let rule = match schedule.lr_scaling {
            LrScaling::None => "as given".to_owned(),
            LrScaling::Linear => format!("{} x {global} / 256, linear scaling", schedule.lr),
            LrScaling::Sqrt => format!("{} x sqrt({global}), square-root scaling", schedule.lr),
        };
        let (lr, min_lr, warmup_lr) = (schedule.lr * factor, schedule.min_lr * factor, schedule.warmup_lr * factor);
        let decay = recipe.optimizer.weight_decay();
        let weight_decay = match schedule.weight_decay_end {
            Some(end) => RampConfig { end, shape: RampShape::Cosine, ..RampConfig::constant(decay) },
            None => RampConfig::constant(decay),
        };
        let weight_decay = weight_decay.resolve(steps, steps_per_epoch);
        let workers = if recipe.data.workers == 0 { request.cores.clamp(1, 16) } else { recipe.data.workers };
        let facts = RunFacts { images: data.images, steps, steps_per_epoch, labels: data.labels.clone() };
        let mut notes = recipe.method.resolve(&facts);
        notes.extend(resolve_precision(&mut recipe.precision, request)?);
        recipe.resolve_metric()?;
        notes.extend(start.iter().flat_map(|start| start.notes().iter().cloned()));
        if start.is_some() && matches!(&recipe.backbone, BackboneConfig::Resnet(config) if config.zero_init_residual) {
            let text = "`backbone.resnet.zero_init_residual` has no effect: `init` brings the scales of all norms";
            notes.push(text.to_owned());
        }
        if recipe.parallel.reduction == Reduction::Fast {
            notes.push(match processes {
                1 => "`parallel.reduction` is \"fast\", which has no effect in one process".to_owned(),
                _ => format!(
                    "`parallel.reduction` is \"fast\": the result depends on the number of processes, now {processes}"
                ),
            });
        }
        if start.is_some() && !recipe.method.is_supervised() {
            notes.push(continued(lr, recipe.schedule.decay, warmup_steps, steps_per_epoch));
        }
        let digest = digest::of(&recipe, &data, start.as_ref().map(Start::digest))
            .map_err(|error| vec![Problem::at("", error.to_string())])?;
        let mut plan = Self {
            name,
            steps_per_epoch,
            steps,
            warmup_steps,
            lr,
            min_lr,
            warmup_lr,
            weight_decay,
            lr_rule: rule,
            micro_batches,
            ranks,
            processes,
            workers,
            device: request.device.clone(),
            bf16: request.bf16,
            parameters: None,
            notes,
            warnings: Vec::new(),
            start: start.map(Arc::new),
            digest,
            recipe,
            data,
        };
        plan.warnings = guard::warnings(&plan, request.cores);
        Ok(plan)
    }

    /// Returns the hash of everything that influences the result: recipe and images, but not name, place of the images,
    /// ranks, threads, checkpoints, evaluation and progress lines.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Opens the scope that the network is built in: its seed, and the weights it starts from.
    pub fn scope(&self, device: &Device) -> Scope {
        Scope::new(self.recipe.seed, device).starting_from(self.start.clone())
    }

    /// Returns the weights that the backbone starts from, unless they are drawn.
    pub fn start(&self) -> Option<&Start> {
        self.start.as_deref()
    }

    /// Returns the learning rate of each step.
    pub fn schedule(&self) -> Schedule {
        let schedule = &self.recipe.schedule;
        Schedule {
            lr: self.lr,
            min_lr: self.min_lr,
            warmup_lr: self.warmup_lr,
            warmup_epochs: schedule.warmup_epochs,
            epochs: self.epochs(),
            steps_per_epoch: self.steps_per_epoch,
            decay: schedule.decay,
            milestones: schedule.milestones.clone(),
            gamma: schedule.gamma,
            each: schedule.each,
        }
    }

    /// Returns the duration in epochs.
    pub fn epochs(&self) -> f64 {
        self.steps as f64 / self.steps_per_epoch as f64
    }

    /// Returns the steps between evaluations while training, if there are any.
    pub fn evaluated_every(&self) -> Option<u64> {
        let early = self.recipe.early_stopping.as_ref().map(|early| early.every_epochs);
        let epochs = early.or(self.recipe.eval.every_epochs).filter(|_| !self.recipe.eval.skip)?;
        Some(((epochs * self.steps_per_epoch as f64).round() as u64).max(1))
    }

    /// Returns the rank threads of each process.
    pub fn threads(&self) -> usize {
        self.ranks / self.processes
    }

    /// Returns the micro-batches of a step that a rank runs: contiguous, and equally many up to one.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn owned_by(&self, rank: usize) -> Range<usize> {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        rank * self.micro_batches / self.ranks..(rank + 1) * self.micro_batches / self.ranks
    }
}

/// Settles what products compute in; returns what to say about it.
fn resolve_precision(precision: &mut PrecisionConfig, request: &Request) -> Result<Option<String>, Vec<Problem>> {
    let device = &request.device;
    match (precision.compute, request.bf16) {
        (Compute::Auto, Bf16::Native) => {
            precision.compute = Compute::Bf16;
            Ok(Some(format!("`precision.compute` is \"auto\": bf16, which {device} has")))
        }
        (Compute::Auto, bf16) => {
            precision.compute = Compute::Fp32;
            let why = if bf16 == Bf16::No { "has no bf16" } else { "gains nothing from bf16" };
            Ok(Some(format!("`precision.compute` is \"auto\": fp32, for {device} {why}")))
        }
        (Compute::Bf16, Bf16::No) => {
            let key = "precision.compute";
            let message = format!("`{key}` is \"bf16\", which {device} does not have");
            Err(vec![Problem::at(key, message).hint("use \"fp16\", \"fp32\" or \"auto\"")])
        }
        (Compute::Bf16 | Compute::Fp16, Bf16::Emulated) => Ok(Some(format!(
            "`precision.compute` is \"{0}\": {device} rounds to {0} and computes in fp32, which gives its numbers but is slower than fp32",
            precision.compute.name()
        ))),
        _ => Ok(None),
    }
}

/// Advice on rate and schedule where the backbone starts from trained weights.
///
/// A new head and a full rate undo what the weights knew before the head can use it. Warming up again and decaying to the end is what keeps old and new
/// knowledge (Gupta et al., 2023, <https://arxiv.org/abs/2308.04014>); a fraction of the steps from scratch is enough (Reed et al., 2021,
/// <https://arxiv.org/abs/2103.12718>, section 4).
fn continued(lr: f64, decay: LrDecay, warmup_steps: u64, steps_per_epoch: u64) -> String {
    let rounded = |value: f64| format!("{value:.1e}").parse().unwrap_or(value);
    let (low, high): (f64, f64) = (rounded(lr / 10.0), rounded(lr / 3.0));
    let mut text = format!(
        "`init` starts from trained weights, and the peak rate is {lr}: if that is the rate from scratch, try {low} to {high} and a tenth to a third of the epochs"
    );
    if warmup_steps < steps_per_epoch {
        text += "; warm up for an epoch or more (`schedule.warmup_epochs`), since heads and optimizer start anew";
    }
    if decay == LrDecay::Constant {
        text += "; let the rate decay (`schedule.decay=cosine`)";
    }
    text
}

fn batch_problem(images: usize, global: usize, micro: usize) -> Option<Problem> {
    let data = format!("the {} of `data`", plural(images, "image"));
    if images == 0 {
        return Some(Problem::at("data", "`data` has no images"));
    }
    if micro > images {
        return Some(
            Problem::at("batch.micro", format!("`batch.micro` is {micro}, more than {data}"))
                .hint(format!("set `batch.micro` and `batch.global` to at most {images}, or add images")),
        );
    }
    if global > images {
        let most = images / micro * micro;
        return Some(
            Problem::at("batch.global", format!("`batch.global` is {global}, more than {data}"))
                .hint(format!("set `batch.global` to {most} or a smaller multiple of {micro}, or add images")),
        );
    }
    None
}

fn ranks_problem(count: usize, processes: usize, global: usize, micro: usize) -> Option<Problem> {
    let micro_batches = global / micro;
    if (1..=micro_batches).contains(&count) {
        return None;
    }
    let finer = global / count.max(1);
    let finer = (1..=finer).rev().find(|&size| global.is_multiple_of(size)).filter(|_| count >= 1);
    let other = finer
        .map_or(String::new(), |size| format!("; {count} would work with `batch.micro={size}`, which is another run"));
    Some(
        Problem::argument(
            match processes {
                1 => format!("--ranks {count}"),
                _ => format!("{processes} processes of {} rank threads", count / processes),
            },
            format!("a step has {micro_batches} micro-batches of {micro} images to share, fewer than {count} ranks"),
        )
        .hint(format!("any number from 1 to {micro_batches} gives the same result{other}")),
    )
}

fn warmup_problem(epochs: f64, warmup: u64, steps: u64, steps_per_epoch: u64) -> Problem {
    let most = steps as f64 / steps_per_epoch as f64;
    Problem::at(
        "schedule.warmup_epochs",
        format!("`schedule.warmup_epochs` is {epochs}, which is {warmup} steps, longer than the run's {steps}"),
    )
    .hint(format!("at {steps_per_epoch} steps an epoch use at most {:.3}", (most * 1000.0).floor() / 1000.0))
}

#[cfg(test)]
mod tests;
