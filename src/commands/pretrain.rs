//! `autodidact pretrain`, and with what is in `finetune.rs`, `autodidact finetune`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use super::finetune::{self, Images, Outcome, Task};
use super::processes::Processes;
use super::{print, say, start};
use crate::backend;
use crate::checkpoint;
use crate::cli::{Resume, TrainArgs};
use crate::data::BadImages;
use crate::engine::{self, EvalSet, Evaluation, Job, Trained, Weights};
use crate::error::{Failure, Kind};
use crate::files::{FileError, write_atomically};
use crate::model::Start;
use crate::optim::{Groups, ParameterRule};
use crate::parallel::Fault;
use crate::plan::{DataFacts, Plan, Request};
use crate::precision::Compute;
use crate::recipe::{self, Loaded, Problem, Recipe};
use crate::report::{Environment, Summary, quoted, read_metrics};

pub(super) fn run(args: &TrainArgs, task: Task) -> Result<(), Failure> {
    let fault = Fault::from_env().map_err(|text| {
        let text = format!("the environment variable AUTODIDACT_FAULT is \"{text}\", which is no fault");
        Failure::message(Kind::Usage, text)
            .hint("it breaks a run on purpose, for tests: unset it, or see src/parallel/fault.rs")
    })?;
    let processes = Processes::connect(Duration::from_secs(args.timeout), args.device)?;
    if let Some(fault) = fault {
        processes.say(&format!("note: AUTODIDACT_FAULT breaks this run on purpose: {fault}"));
    }
    let outcome = train(args, task, &processes);
    processes.end(outcome)
}

fn train(args: &TrainArgs, task: Task, processes: &Processes) -> Result<(), Failure> {
    let started = SystemTime::now();
    let loaded = recipe::load(&args.recipe.recipe, &args.recipe.overrides)?;
    task.check(&loaded)?;
    let chosen = backend::choose(processes.device()).map_err(|error| Failure::new(Kind::Usage, error))?;
    let device = chosen.device.clone();
    if let Some(note) = &chosen.note {
        processes.say(&format!("note: {note}"));
    }
    let images = Images::open(&loaded.recipe)?;
    let source = Arc::clone(&images.train);
    let mut plan = plan(args, processes, &loaded, &images, &chosen)?;
    let groups = groups(&mut plan, &loaded)?;
    processes.agree_on("plan", plan.digest(), &plan.recipe.to_toml().unwrap_or_default())?;
    processes.agree("number of rank threads (`--ranks`)", &plan.threads().to_string())?;
    // chosen before training, so that a mistake in `eval.test` is said before hours of work
    let held_out = images.held_out(&plan.recipe)?;
    let features = !plan.recipe.eval.skip && !plan.recipe.method.is_supervised();
    let eval_set = features.then(|| EvalSet::choose(&plan.recipe, &source)).transpose()?;
    plan.notes.extend(images.note());
    plan.notes.extend(held_out.as_ref().map(engine::HeldOut::note));
    if args.dry_run {
        for warning in &plan.warnings {
            processes.say(&warning.to_string());
        }
        return if processes.leads() {
            print(format_args!("{plan}\n{}", groups.table(&plan.weight_decay)))
        } else {
            Ok(())
        };
    }

    let folder = run_folder(args, &plan.recipe, &plan.name);
    // only the first process writes what all share; what it decides and how it fails reaches the others
    let prepared = if processes.leads() { Some(prepare(args, &loaded, &mut plan, &folder, started)?) } else { None };
    let resume = prepared.as_ref().and_then(|(_held, resume)| resume.clone());
    let resume = processes.share_path("checkpoint to go on from", resume.as_deref())?;
    for note in &plan.notes {
        processes.say(&format!("note: {note}"));
    }
    for warning in &plan.warnings {
        processes.say(&warning.to_string());
    }
    if let Some(note) = eval_set.as_ref().and_then(EvalSet::note) {
        processes.say(&format!("note: {note}"));
    }

    let stop = watch_signals(processes.leads())?;
    let bad_list = folder.join(processes.own_name("bad-images", "jsonl"));
    let max_bad = plan.recipe.data.max_bad;
    let bad_images = BadImages::open(Some(&bad_list), source.len(), max_bad).map_err(engine::EngineError::from)?;
    bad_images.judge().map_err(engine::EngineError::from)?;
    let bad_images = Arc::new(bad_images);
    let job = Job {
        plan: &plan,
        source: Arc::clone(&source),
        bad_images: Arc::clone(&bad_images),
        device: device.clone(),
        link: processes.link(),
        folder: &folder,
        resume,
        held_out: held_out.as_ref(),
        stop,
    };
    let trained = engine::train(&job)?;
    let bad = processes.union(bad_images.indices())?;
    if !processes.leads() {
        return Ok(());
    }

    let mut summary = describe(&plan, &folder, &trained, resume_command(args, task));
    summary.task = task.name();
    summary.bad_images = bad.len() as u64;
    summary.bad_image_lists = processes.count();
    summary.warnings.clone_from(&trained.warnings);
    // written before the evaluation too: what was trained is known, whatever happens to the measuring of it
    summary.write()?;
    if trained.interrupted {
        say(&format!("stopped after step {}; its checkpoint is written", trained.state.step));
    } else if task == Task::Finetune {
        TRAINED.store(true, Ordering::Relaxed);
        let outcome = Outcome::of(&plan, &folder, &trained)?;
        outcome.write_adapters(&plan, &folder)?;
        summary.best_step = trained.best.map(|(step, _)| step);
        if let Some(held_out) = &held_out {
            finetune::measure(&plan, held_out, &folder, &outcome, &device, stop, &mut summary)?;
        }
        summary.write()?;
    } else if let Some(set) = &eval_set {
        TRAINED.store(true, Ordering::Relaxed);
        let weights = trained.state.ema.as_ref().unwrap_or(&trained.state.weights);
        let weights = Weights::Given(weights, &trained.state.buffers);
        match measure(&plan, set, weights, &device, stop) {
            Err(engine::EngineError::Stopped) => {
                let run = quoted(&folder);
                say(&format!("trained; the evaluation was stopped (`autodidact eval knn {run}` does it again)"));
            }
            evaluation => fill(&mut summary, evaluation?),
        }
        summary.write()?;
    }
    print(summary)
}

/// Makes the run folder, with what the run is; returns its lock and the checkpoint to go on from.
fn prepare(
    args: &TrainArgs,
    loaded: &Loaded,
    plan: &mut Plan,
    folder: &Path,
    started: SystemTime,
) -> Result<(File, Option<PathBuf>), Failure> {
    // taken before looking at what is there, and moved along with a run that is set aside
    let mut held = if folder.is_dir() { Some(lock(folder)?) } else { None };
    let resume = match &args.resume {
        Resume::Never => {
            if set_aside(folder)? {
                held = None;
            }
            None
        }
        Resume::Auto => newest(plan, folder)?,
        Resume::From(path) => Some(given(plan, folder, path)?),
    };
    fs::create_dir_all(folder).map_err(FileError::at(folder, "create the run folder"))?;
    let held = match held {
        Some(held) => held,
        None => lock(folder)?,
    };
    start::keep(plan, folder)?;
    write_description(folder, loaded, plan, started)?;
    Ok((held, resume))
}

/// Evaluates trained weights beside the same network untrained.
pub(super) fn measure(
    plan: &Plan,
    set: &EvalSet,
    weights: Weights<'_>,
    device: &burn::tensor::Device,
    stop: &AtomicBool,
) -> Result<Evaluation, engine::EngineError> {
    let threads = cores();
    let mut evaluation = engine::evaluate(plan, set, weights, device, threads, stop)?;
    if let Some(knn) = &mut evaluation.knn {
        let untrained = engine::evaluate(plan, set, Weights::Untrained, device, threads, stop)?;
        knn.untrained_top1 = untrained.knn.map(|knn| knn.top1);
        if let (Some(linear), Some(untrained)) = (&mut evaluation.linear, untrained.linear) {
            linear.untrained_top1 = Some(untrained.top1);
        }
    }
    Ok(evaluation)
}

/// Copies a measurement into the summary.
pub(super) fn fill(summary: &mut Summary, evaluation: Evaluation) {
    summary.knn = evaluation.knn;
    summary.linear = evaluation.linear;
    summary.embedding_std = Some(evaluation.embedding_std);
    summary.rankme = Some(evaluation.rankme);
    summary.dim = evaluation.dim;
    summary.warnings.extend(evaluation.warnings);
}

/// Number of cores this process may use.
pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Resolves a recipe for a data set.
pub(super) fn resolve(
    loaded: &Loaded,
    images: &Images,
    start: Option<Start>,
    request: &Request,
) -> Result<Plan, Failure> {
    let source = &images.train;
    let classes = source.classes().len();
    let facts = DataFacts {
        images: source.len(),
        fingerprint: source.fingerprint(),
        classes: (classes > 0).then_some(classes),
        labels: images.labels.clone(),
        description: match &loaded.recipe.data.path {
            Some(path) => path.display().to_string(),
            None => "the sample images inside this program".to_owned(),
        },
    };
    Ok(Plan::new(loaded.recipe.clone(), facts, start, request).map_err(|problems| loaded.error(problems))?)
}

fn plan(
    args: &TrainArgs,
    processes: &Processes,
    loaded: &Loaded,
    images: &Images,
    chosen: &backend::Chosen,
) -> Result<Plan, Failure> {
    let name = args.recipe.recipe.file_stem().map_or_else(|| "run".into(), |stem| stem.to_string_lossy());
    let request = Request {
        name: name.into_owned(),
        ranks: args.ranks,
        processes: processes.count(),
        cores: processes.cores(),
        device: chosen.description.clone(),
        bf16: chosen.bf16,
    };
    let goes_on = args.resume != Resume::Never;
    let folder = goes_on.then(|| run_folder(args, &loaded.recipe, &request.name));
    resolve(loaded, images, start::open(loaded, folder.as_deref())?, &request)
}

fn run_folder(args: &TrainArgs, recipe: &Recipe, name: &str) -> PathBuf {
    let name = recipe.name.as_deref().unwrap_or(name);
    args.run_dir.clone().unwrap_or_else(|| Path::new("runs").join(name))
}

/// Builds the network once, so that what does not fit together is said before anything is written.
pub(super) fn groups(plan: &mut Plan, loaded: &Loaded) -> Result<Groups, Failure> {
    let recipe = &plan.recipe;
    let inputs = recipe.inputs();
    let learner = recipe.method.build(&inputs, &plan.scope(&backend::host())).map_err(|error| {
        let problem = Problem::at(error.key, error.problem).hint(error.hint);
        Failure::from(loaded.error(vec![problem]))
    })?;
    if let Some(weights) = plan.start() {
        start::check(weights, learner.layout(), loaded)?;
    }
    let specs = engine::specs(learner.layout());
    let without_effect = |(index, rule): (usize, &ParameterRule)| {
        let error = rule.check(&specs).err()?;
        let key = format!("parameters.{index}.{}", error.key);
        Some(Problem::at(&key, format!("`{key}` {}", error.problem)).hint(error.hint))
    };
    let problems: Vec<Problem> = recipe.parameters.iter().enumerate().filter_map(without_effect).collect();
    if !problems.is_empty() {
        return Err(loaded.error(problems).into());
    }
    let groups = Groups::new(&recipe.optimizer, &specs, &recipe.parameter_rules(), plan.steps_per_epoch);
    plan.parameters = Some(learner.layout().num_weights());
    Ok(groups)
}

/// Finds the newest good checkpoint of a run that goes on.
fn newest(plan: &Plan, folder: &Path) -> Result<Option<PathBuf>, Failure> {
    if !plan.continues(folder)? {
        if holds_a_run(folder) {
            let text = format!(
                "{}: holds a run without its plan.toml, so it cannot be told which recipe it is of",
                folder.display()
            );
            let hint = "use another folder (`--run-dir DIR`), or start over in this one (`--resume never` keeps the old run beside it)";
            return Err(Failure::message(Kind::Usage, text).hint(hint));
        }
        return Ok(None);
    }
    let (good, damaged) = checkpoint::newest(&folder.join("checkpoints"));
    for error in &damaged {
        let next = match &good {
            Some((manifest, _)) => format!("going back to step {}", manifest.step),
            None => "there is no older one".to_owned(),
        };
        say(&format!("warning[W005]: {error}; {next}"));
    }
    match good {
        Some((manifest, path)) if manifest.plan != plan.digest() => Err(other_recipe(&path)),
        Some((manifest, path)) => {
            checkpoint::tidy(&folder.join("checkpoints"), manifest.step)?;
            let run = folder.display();
            say(&if manifest.step < plan.steps {
                format!("resuming {run} after step {} of {}", manifest.step, plan.steps)
            } else {
                format!("{run} is complete; evaluating it again (`--resume never` trains anew)")
            });
            Ok(Some(path))
        }
        None if damaged.is_empty() => Ok(None),
        None => {
            let text = format!("{}: every checkpoint of this run is damaged", folder.display());
            Err(Failure::message(Kind::Failure, text)
                .hint("train anew with `--resume never`; the old run is kept beside it"))
        }
    }
}

/// Checks a checkpoint that was named on the command line.
fn given(plan: &Plan, folder: &Path, path: &Path) -> Result<PathBuf, Failure> {
    plan.continues(folder)?;
    if !path.join("manifest.json").exists() {
        let text = format!("--resume {}: this is no checkpoint", path.display());
        let hint = "give a folder below `<run>/checkpoints/`, such as `runs/simclr/checkpoints/step-00000100`, or use `--resume auto`";
        return Err(Failure::message(Kind::Usage, text).hint(hint));
    }
    let manifest = checkpoint::verify(path).map_err(engine::EngineError::from)?;
    if manifest.plan != plan.digest() {
        return Err(other_recipe(path));
    }
    let later = checkpoint::list(&folder.join("checkpoints")).iter().filter(|(step, _)| *step > manifest.step).count();
    if later > 0 {
        say(&format!("the next checkpoint replaces the {later} in {} that are of later steps", folder.display()));
    }
    say(&format!("resuming from {} after step {} of {}", path.display(), manifest.step, plan.steps));
    Ok(path.to_owned())
}

fn other_recipe(path: &Path) -> Failure {
    let text = format!("{}: written by another recipe or for other data", path.display());
    let hint = "resume with the recipe that wrote it: `plan.toml` in its run folder has every value";
    Failure::message(Kind::Usage, text).hint(hint)
}

fn holds_a_run(folder: &Path) -> bool {
    ["plan.toml", "metrics.jsonl", "checkpoints"].iter().any(|name| folder.join(name).exists())
}

/// Moves an existing run out of the way, so that starting over loses nothing; tells whether there was one.
fn set_aside(folder: &Path) -> Result<bool, Failure> {
    if !holds_a_run(folder) {
        return Ok(false);
    }
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut number = 1;
    let mut aside = folder.with_file_name(format!("{name}.{number}"));
    while aside.exists() {
        number += 1;
        aside = folder.with_file_name(format!("{name}.{number}"));
    }
    fs::rename(folder, &aside).map_err(FileError::at(folder, "move the old run aside"))?;
    say(&format!("the run in {} is now {}", folder.display(), aside.display()));
    Ok(true)
}

/// Holds the run folder for this process; the lock goes with the process, however it ends.
fn lock(folder: &Path) -> Result<File, Failure> {
    let path = folder.join(".lock");
    let file = File::create(&path).map_err(FileError::at(&path, "create"))?;
    match file.try_lock() {
        Err(fs::TryLockError::WouldBlock) => {
            let text = format!("{}: another process is training in this folder", folder.display());
            Err(Failure::message(Kind::Failure, text).hint("wait for it, or choose another folder with `--run-dir`"))
        }
        // file systems without locks (some network mounts) are used without
        Ok(()) | Err(fs::TryLockError::Error(_)) => Ok(file),
    }
}

/// Writes what the run is, before it starts.
fn write_description(folder: &Path, loaded: &Loaded, plan: &Plan, started: SystemTime) -> Result<(), Failure> {
    let mut recipe = vec![loaded.text().trim_end().to_owned()];
    recipe.extend(loaded.overrides().iter().map(|change| format!("# changed on the command line: {change}")));
    let recipe = recipe.join("\n") + "\n";
    let resolved = plan.to_toml().map_err(|error| Failure::new(Kind::Failure, error))?;
    write_atomically(&folder.join("recipe.toml"), recipe.as_bytes())?;
    write_atomically(&folder.join("plan.toml"), resolved.as_bytes())?;
    let command = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    Environment::collect(command, started, [plan.processes, plan.ranks]).write(folder)?;
    Ok(())
}

/// Training is over, only the evaluation is left.
static TRAINED: AtomicBool = AtomicBool::new(false);

/// First signal: finish the step and write a checkpoint. Second: exit at once.
fn watch_signals(leads: bool) -> Result<&'static AtomicBool, Failure> {
    static STOP: AtomicBool = AtomicBool::new(false);
    let handler = move || {
        let trained = TRAINED.load(Ordering::Relaxed);
        if STOP.swap(true, Ordering::Relaxed) {
            // once trained, a checkpoint is there
            std::process::exit(if trained { 0 } else { i32::from(Kind::Interrupted.exit_code()) });
        }
        if leads {
            say(if trained {
                "stopping the evaluation (once more: stop now)"
            } else {
                "stopping after this step, then writing a checkpoint (once more: stop now)"
            });
        }
    };
    ctrlc::set_handler(handler).map_err(|error| Failure::new(Kind::Failure, error))?;
    Ok(&STOP)
}

fn describe(plan: &Plan, folder: &Path, trained: &Trained, resume_command: String) -> Summary {
    let records = read_metrics(&folder.join("metrics.jsonl")).unwrap_or_default();
    let batch = plan.recipe.batch.global as u64;
    let (compute, numbers) = (plan.recipe.precision.compute, &trained.state.precision);
    let (seconds, steps) = if trained.steps > 0 { (trained.seconds, trained.steps) } else { earlier(folder) };
    Summary {
        init: plan.start().map(|start| start.typed().to_owned()),
        run: folder.to_owned(),
        steps: trained.state.step,
        total_steps: plan.steps,
        images: trained.state.step * batch,
        seconds,
        images_per_s: if seconds > 0.0 { (steps * batch) as f64 / seconds } else { 0.0 },
        first_loss: records.first().map(|record| record.loss),
        last_loss: records.last().map(|record| record.loss),
        compute: (compute != Compute::Fp32).then(|| compute.name()),
        loss_scale: numbers.scale,
        overflows: numbers.overflows,
        skipped_steps: numbers.skipped,
        fell_back_after: numbers.fell_back_after,
        resume_command,
        ..Summary::default()
    }
}

/// Time and steps of the run that finished before, when nothing was left to train.
fn earlier(folder: &Path) -> (f64, u64) {
    let records = read_metrics(&folder.join("metrics.jsonl")).unwrap_or_default();
    // the clock starts anew with each process: its own steps are those since it last went back
    let restart = records.windows(2).rposition(|pair| pair[1].time_s < pair[0].time_s).map_or(0, |index| index + 1);
    (records.last().map_or(0.0, |record| record.time_s), (records.len() - restart) as u64)
}

fn resume_command(args: &TrainArgs, task: Task) -> String {
    let mut words = vec![format!("autodidact {}", task.name()), quoted(&args.recipe.recipe)];
    words.extend(args.recipe.overrides.iter().map(|change| quoted(Path::new(change))));
    if let Some(folder) = &args.run_dir {
        words.push(format!("--run-dir {}", quoted(folder)));
    }
    words.join(" ")
}
