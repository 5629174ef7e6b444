//! `autodidact replay`: a step that was not finite, once more and layer by layer.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::finetune::Images;
use super::{pretrain, print, say, start};
use crate::backend;
use crate::checkpoint;
use crate::cli::ReplayArgs;
use crate::data::BadImages;
use crate::engine::{self, BUNDLE_FORMAT, EngineError, Finding, Job, Layer};
use crate::error::{Failure, Kind};
use crate::plan::{Request, recorded_start};
use crate::recipe;

pub(super) fn run(args: &ReplayArgs) -> Result<(), Failure> {
    let bundle = read(&args.bundle)?;
    let folder = match &args.run_dir {
        Some(folder) => folder.clone(),
        None => args.bundle.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")).into(),
    };
    let plan_file = folder.join("plan.toml");
    if !plan_file.exists() {
        let text = format!("{}: there is no plan.toml of a run", folder.display());
        return Err(Failure::message(Kind::Usage, text).hint("name the folder of the bundle's run with --run-dir"));
    }
    let loaded = recipe::load(&plan_file, &[])?;
    let chosen = backend::choose(args.device).map_err(|error| Failure::new(Kind::Usage, error))?;
    let images = Images::open(&loaded.recipe)?;
    let request = Request {
        name: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        ranks: args.ranks,
        processes: 1,
        cores: pretrain::cores(),
        device: chosen.description,
        bf16: chosen.bf16,
    };
    let start = recorded_start(&folder).map(|(from, digest)| start::kept(&folder, &from, &digest)).transpose()?;
    let plan = pretrain::resolve(&loaded, &images, start, &request)?;
    if plan.digest() != bundle.plan {
        let text = format!("{}: written by another run than that in {}", args.bundle.display(), folder.display());
        let hint = "name the folder of the bundle's run with --run-dir; its images must be the same, too";
        return Err(Failure::message(Kind::Usage, text).hint(hint));
    }
    if bundle.step == 0 || bundle.step > plan.steps {
        let text = format!("{}: step {} is none of this run's {}", args.bundle.display(), bundle.step, plan.steps);
        return Err(Failure::message(Kind::Usage, text));
    }
    let resume = before(&folder, &bundle, plan.digest());
    let from = resume.as_ref().map_or(0, |(step, _)| *step);
    say(&format!(
        "replaying step {} from {}",
        bundle.step,
        match from {
            0 => "the start of the run".to_owned(),
            step if step + 1 == bundle.step => "the checkpoint in front of it".to_owned(),
            step => format!("the checkpoint after step {step}"),
        }
    ));
    let never = AtomicBool::new(false);
    let bad_images = BadImages::open(None, images.train.len(), 1.0).map_err(EngineError::from)?;
    let job = Job {
        plan: &plan,
        source: Arc::clone(&images.train),
        bad_images: Arc::new(bad_images),
        device: chosen.device,
        link: None,
        folder: &folder,
        resume: resume.map(|(_, path)| path),
        held_out: None,
        stop: &never,
    };
    let found = engine::replay(&job, &bundle)?;
    if args.json {
        let text = serde_json::to_string_pretty(&found).expect("numbers and text are JSON");
        return print(text);
    }
    print(table(&bundle, &found))
}

fn read(path: &Path) -> Result<Finding, Failure> {
    let bad = |reason: String| {
        Failure::message(Kind::Usage, format!("{}: {reason}", path.display()))
            .hint("give a `nonfinite-step-N.json` of a run folder")
    };
    let text = std::fs::read(path).map_err(|error| bad(format!("cannot read the bundle: {error}")))?;
    let bundle: Finding =
        serde_json::from_slice(&text).map_err(|error| bad(format!("this is no bundle of a step: {error}")))?;
    if bundle.format != BUNDLE_FORMAT {
        return Err(bad(format!("format {}, this program reads format {BUNDLE_FORMAT}", bundle.format)));
    }
    Ok(bundle)
}

/// Finds the newest good checkpoint in front of the bundle's step.
fn before(folder: &Path, bundle: &Finding, plan: &str) -> Option<(u64, PathBuf)> {
    let all = checkpoint::list(&folder.join("checkpoints"));
    let good = |path: &Path| checkpoint::verify(path).is_ok_and(|manifest| manifest.plan == plan);
    all.into_iter().rev().find(|(step, path)| *step < bundle.step && good(path))
}

fn table(bundle: &Finding, found: &Finding) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    let scale = found.precision.scale.map_or(String::new(), |scale| format!(", loss scale {scale}"));
    line(format!(
        "step {}, {}{scale}, seed {}; the bundle says: the {} is {}",
        found.step,
        found.compute.name(),
        found.seed,
        bundle.what,
        bundle.value
    ));
    line(format!(
        "weights {}",
        if found.weights == bundle.weights { "as in the bundle" } else { "OTHER than in the bundle" }
    ));
    let parts = [(&bundle.layers, &found.layers), (&bundle.gradients, &found.gradients)];
    let (all, differ) = parts.iter().fold((0, 0), |(all, differ), (then, now)| {
        let differing =
            then.iter().zip(*now).filter(|(then, now)| then != now).count() + then.len().abs_diff(now.len());
        (all + now.len(), differ + differing)
    });
    line(match differ {
        0 => format!("all {all} layers and gradients have the bundle's numbers"),
        _ => format!("{differ} of {all} layers and gradients have OTHER numbers than the bundle"),
    });
    line(found.place());
    let images = found.images.get(found.micro_batch).map_or(0, Vec::len);
    line(format!("\nmicro-batch {}, {images} images", found.micro_batch + 1));
    let width = parts.iter().flat_map(|(_, now)| now.iter()).map(|layer| layer.path.chars().count()).max().unwrap_or(0);
    for (title, layers) in [("output of", &found.layers), ("gradient of", &found.gradients)] {
        line(format!("\n{title:width$}  {:>11}  {:>11}  {:>11}  {:>10}", "min", "max", "rms", "not finite"));
        for Layer { path, count, not_finite, min, max, rms } in layers {
            let share = if *not_finite == 0 { "-".to_owned() } else { format!("{not_finite}/{count}") };
            let number = |value: &f64| if not_finite == count { "-".to_owned() } else { format!("{value:.4e}") };
            let [min, max, rms] = [min, max, rms].map(number);
            line(format!("{path:width$}  {min:>11}  {max:>11}  {rms:>11}  {share:>10}"));
        }
    }
    text.trim_end().to_owned()
}
