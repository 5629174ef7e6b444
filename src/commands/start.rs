//! The weights that a recipe's `init` names.
//!
//! A run keeps a copy of them in its folder, `init.safetensors`: where they came from may go on training, move or go, and the run must still be resumed, repeated and
//! compared with its beginning. `plan.toml` names the copy, and remembers what was typed.

use std::fs;
use std::path::Path;

use super::eval;
use crate::backend;
use crate::checkpoint;
use crate::engine::EngineError;
use crate::error::{Failure, Kind};
use crate::files::write_atomically;
use crate::model::params::{Flat, Layout};
use crate::model::{BackboneConfig, Scope, Start, Tensors};
use crate::plan::{Plan, recorded_start};
use crate::recipe::{self, InitConfig, Loaded, Problem};

/// The copy in a run folder.
const COPY: &str = "init.safetensors";
const WHAT: &str = "`init` is \"random\", a run folder, a checkpoint in one, or a .safetensors file";

/// Reads the weights that a recipe starts from, for the run in `folder` if that goes on.
pub(super) fn open(loaded: &Loaded, folder: Option<&Path>) -> Result<Option<Start>, Failure> {
    let InitConfig::From(path) = &loaded.recipe.init else { return Ok(None) };
    let refuse = |text: String| Failure::from(loaded.error(vec![Problem::at("init", text).hint(WHAT)]));
    let typed = path.display().to_string();
    if let Some(folder) = folder
        && let Some((from, digest)) = recorded_start(folder)
        && (typed == from || *path == folder.join(COPY))
    {
        return kept(folder, &from, &digest).map(Some);
    }
    let Ok(kind) = fs::metadata(path) else {
        return Err(refuse(format!("`init` is \"{typed}\", and there is nothing of that name")));
    };
    if kind.is_dir() {
        let (start, backbone) = of_run(path).map_err(|failure| {
            let text = failure.render(false);
            let text = text.strip_prefix("error: ").unwrap_or(&text);
            let (text, hint) = text.split_once("\nhint: ").unwrap_or((text, WHAT));
            Failure::from(loaded.error(vec![Problem::at("init", format!("`init`: {text}")).hint(hint)]))
        })?;
        let differences = backbone.differences(&loaded.recipe.backbone);
        if !differences.is_empty() {
            let text = format!("`init`: {typed} has another backbone: {}", differences.join("; "));
            let hint = "copy `[backbone]` from plan.toml in its run folder";
            return Err(loaded.error(vec![Problem::at("init", text).hint(hint)]).into());
        }
        return Ok(Some(start));
    }
    if !kind.is_file() {
        return Err(refuse(format!("`init` is \"{typed}\", which is neither a file nor a folder")));
    }
    let tensors = checkpoint::read_tensors(path).map_err(|error| refuse(format!("`init`: {error}")))?;
    Ok(Some(below_backbone(tensors).from(&typed)))
}

/// Tells whether the weights are those of the network that was built.
pub(super) fn check(start: &Start, network: &Layout, loaded: &Loaded) -> Result<(), Failure> {
    start.fits(network).map_err(|reason| {
        let text = format!("`init`: {} does not fit the recipe's backbone: {reason}", start.origin());
        let hint = "copy `[backbone]` and the size of the first view from the recipe that trained it (plan.toml in its run folder)";
        loaded.error(vec![Problem::at("init", text).hint(hint)]).into()
    })
}

/// Keeps the weights with the run, and makes the plan name them there.
pub(super) fn keep(plan: &mut Plan, folder: &Path) -> Result<(), Failure> {
    let Some(start) = plan.start() else { return Ok(()) };
    let copy = folder.join(COPY);
    let digest = start.digest();
    if recorded_start(folder).is_none_or(|(_, recorded)| recorded != digest) || !copy.exists() {
        write_atomically(&copy, &checkpoint::encode_tensors(start.tensors())?)?;
    }
    plan.recipe.init = InitConfig::From(copy);
    Ok(())
}

/// Reads the copy that a run keeps.
pub(super) fn kept(folder: &Path, from: &str, digest: &str) -> Result<Start, Failure> {
    let copy = folder.join(COPY);
    let start = Start::new(checkpoint::read_tensors(&copy).map_err(EngineError::from)?).from(from);
    if start.digest() != digest {
        let text = format!("{}: these are not the weights that this run started from", copy.display());
        let hint = "put back the file that the run wrote, or start over (`--resume never`)";
        return Err(Failure::message(Kind::Failure, text).hint(hint));
    }
    Ok(start)
}

/// Reads the network that `eval` would evaluate, and what it is.
fn of_run(target: &Path) -> Result<(Start, BackboneConfig), Failure> {
    let (folder, path) = eval::find(target)?;
    let mut recipe = recipe::load(&folder.join("plan.toml"), &[])?.recipe;
    let host = backend::host();
    let mut learner =
        recipe.method.build(&recipe.inputs(), &Scope::new(recipe.seed, &host)).map_err(EngineError::from)?;
    let (weights, buffers, manifest) =
        checkpoint::load_for_evaluation(&path, learner.layout()).map_err(EngineError::from)?;
    learner.set(&Flat::upload(weights, buffers, &host));
    recipe.backbone.spell_out();
    let part = learner.evaluated();
    let average = if recipe.ema.is_some() { ", moving average" } else { "" };
    let origin = format!("{} ({part}{average}, step {})", target.display(), manifest.step);
    Ok((learner.backbone().described(&target.display().to_string(), &origin), recipe.backbone))
}

/// Takes the tensors below `backbone.`, or all where none is.
fn below_backbone(tensors: Tensors) -> Start {
    let below = |name: &str| name.strip_prefix("backbone.").map(str::to_owned);
    if !tensors.keys().any(|name| below(name).is_some()) {
        return Start::new(tensors);
    }
    Start::new(tensors.into_iter().filter_map(|(name, tensor)| Some((below(&name)?, tensor))).collect())
}
