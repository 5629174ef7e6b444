//! `autodidact eval`.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use super::finetune::Images;
use super::{pretrain, print, start};
use crate::backend;
use crate::checkpoint;
use crate::cli::EvalCommand;
use crate::engine::{self, EngineError, EvalSet, Weights};
use crate::error::{Failure, Kind};
use crate::method::Learner;
use crate::parallel::Launch;
use crate::plan::{Ranks, Request, recorded_start};
use crate::recipe::{self, Recipe};
use crate::report::Summary;

pub(super) fn run(command: &EvalCommand) -> Result<(), Failure> {
    let launch = Launch::detect().map_err(|error| Failure::new(Kind::Usage, error))?;
    if launch.processes > 1 {
        let text = format!("`eval` is one process, and {} were started", launch.processes);
        return Err(
            Failure::message(Kind::Usage, text).hint("start it without the launcher; it uses the cores of one machine")
        );
    }
    let (args, linear) = match command {
        EvalCommand::Knn(args) => (args, false),
        EvalCommand::Linear(args) => (args, true),
    };
    let (folder, path) = find(&args.target)?;
    let mut loaded = recipe::load(&folder.join("plan.toml"), &args.overrides)?;
    loaded.recipe.eval.linear = linear;
    let chosen = backend::choose(args.device).map_err(|error| Failure::new(Kind::Usage, error))?;
    if let Some(note) = chosen.note {
        super::say(&format!("note: {note}"));
    }
    let images = Images::open(&loaded.recipe)?;
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let request = Request {
        name,
        ranks: Ranks::Auto,
        processes: 1,
        cores: pretrain::cores(),
        device: chosen.description,
        bf16: chosen.bf16,
    };
    if args.overrides.iter().any(|change| change.split('=').next().is_some_and(|key| key.trim() == "init")) {
        let text = "`init` cannot be changed here: a run is compared with the weights that it started from";
        return Err(Failure::message(Kind::Usage, text));
    }
    let start = recorded_start(&folder).map(|(from, digest)| start::kept(&folder, &from, &digest)).transpose()?;
    let plan = pretrain::resolve(&loaded, &images, start, &request)?;

    let inputs = plan.recipe.inputs();
    let learner = plan.recipe.method.build(&inputs, &plan.scope(&chosen.device)).map_err(EngineError::from)?;
    let Found { weights, buffers, step, .. } = result(&args.target, &folder, &path, &plan.recipe, learner.as_ref())?;
    let set = EvalSet::choose(&plan.recipe, &images.train)?;
    if let Some(note) = set.note() {
        super::say(&format!("note: {note}"));
    }
    let never = AtomicBool::new(false);
    let evaluation = pretrain::measure(&plan, &set, Weights::Given(&weights, &buffers), &chosen.device, &never)?;
    if evaluation.knn.is_none() {
        let text = format!("{}: its images have no labels to classify by", folder.display());
        let hint =
            "name labelled images with `eval.test.source=folder eval.test.path=...` and use labelled training images";
        return Err(Failure::message(Kind::Failure, text).hint(hint));
    }
    let init = plan.start().map(|start| start.typed().to_owned());
    let mut summary = Summary { run: path, init, ..Summary::default() };
    summary.steps = step;
    summary.total_steps = plan.steps;
    pretrain::fill(&mut summary, evaluation);
    print(summary.measurements())
}

/// Finds run folder and checkpoint from either.
pub(super) fn find(target: &Path) -> Result<(PathBuf, PathBuf), Failure> {
    if target.join("manifest.json").exists() {
        let folder = target.canonicalize()?.parent().and_then(Path::parent).map(Path::to_owned);
        let folder = folder.filter(|folder| folder.join("plan.toml").exists()).ok_or_else(|| {
            Failure::message(
                Kind::Usage,
                format!("{}: no run folder with a plan.toml around this checkpoint", target.display()),
            )
            .hint("a checkpoint is evaluated with the plan of its run: keep it in `<run>/checkpoints/`")
        })?;
        return Ok((folder, target.to_owned()));
    }
    let (newest, damaged) = checkpoint::newest(&target.join("checkpoints"));
    match (newest, damaged.first()) {
        (Some((_, path)), error) => {
            if let Some(error) = error {
                super::say(&format!("warning[W005]: {error}; evaluating {} instead", path.display()));
            }
            Ok((target.to_owned(), path))
        }
        (None, Some(error)) => Err(Failure::message(Kind::Failure, error)),
        (None, None) => {
            Err(Failure::message(Kind::Usage, format!("{}: neither a run folder nor a checkpoint", target.display()))
                .hint("give the folder that `pretrain` named, such as `runs/simclr`, or one below its `checkpoints/`"))
        }
    }
}

/// Weights of a run to use.
pub(super) struct Found {
    /// Trained values in flat order.
    pub(super) weights: Vec<f32>,
    /// Untrained values in flat order.
    pub(super) buffers: Vec<f32>,
    /// Steps that they were trained for.
    pub(super) step: u64,
    /// What they are, in words.
    pub(super) what: &'static str,
}

/// Reads the weights that are the result: of a run that may stop early those of its best evaluation, else those of its newest checkpoint, their moving average if
/// there is one. Of a checkpoint that is named as such, its own.
pub(super) fn result(
    target: &Path,
    folder: &Path,
    path: &Path,
    recipe: &Recipe,
    learner: &dyn Learner,
) -> Result<Found, Failure> {
    let named = target.join("manifest.json").exists();
    if let (Some(early), false) = (&recipe.early_stopping, named)
        && let Some(step) = engine::best_step(folder, early)?
    {
        let (weights, buffers) = engine::best_weights(folder, learner)?;
        return Ok(Found { weights, buffers, step, what: "best evaluation" });
    }
    let (weights, buffers, manifest) =
        checkpoint::load_for_evaluation(path, learner.layout()).map_err(EngineError::from)?;
    let what = if recipe.ema.is_some() { "moving average" } else { "last weights" };
    Ok(Found { weights, buffers, step: manifest.step, what })
}
