//! The weights that a recipe's `init` names.

use std::path::Path;

use super::eval;
use crate::backend;
use crate::checkpoint::{self, Tensors};
use crate::engine::EngineError;
use crate::error::Failure;
use crate::model::params::{Flat, Layout};
use crate::model::{Scope, Start};
use crate::recipe::{self, InitConfig, Loaded, Problem};

const WHAT: &str = "`init` is \"random\", a run folder, a checkpoint in one, or a .safetensors file";

/// Reads the weights that a recipe starts from.
pub(super) fn open(loaded: &Loaded) -> Result<Option<Start>, Failure> {
    let InitConfig::From(path) = &loaded.recipe.init else { return Ok(None) };
    if !path.exists() {
        let text = format!("`init` is \"{}\", and there is nothing of that name", path.display());
        return Err(loaded.error(vec![Problem::at("init", text).hint(WHAT)]).into());
    }
    if path.is_dir() {
        return of_run(path).map(Some);
    }
    let tensors = checkpoint::read_tensors(path)
        .map_err(|error| loaded.error(vec![Problem::at("init", format!("`init`: {error}")).hint(WHAT)]))?;
    Ok(Some(below_backbone(tensors)))
}

/// Tells whether the weights are those of the network that was built.
pub(super) fn check(start: &Start, network: &Layout, loaded: &Loaded) -> Result<(), Failure> {
    start.fits(network).map_err(|reason| {
        let from = String::from(loaded.recipe.init.clone());
        let text = format!("`init`: {from} is not of this backbone: {reason}");
        let hint = "copy `[backbone]` and the size of the first view from the recipe that trained it (plan.toml in its run folder)";
        loaded.error(vec![Problem::at("init", text).hint(hint)]).into()
    })
}

/// Reads the network that `eval` would evaluate.
fn of_run(target: &Path) -> Result<Start, Failure> {
    let (folder, path) = eval::find(target)?;
    let recipe = recipe::load(&folder.join("plan.toml"), &[])?.recipe;
    let host = backend::host();
    let mut learner =
        recipe.method.build(&recipe.inputs(), &Scope::new(recipe.seed, &host)).map_err(EngineError::from)?;
    let (weights, buffers, _) = checkpoint::load_for_evaluation(&path, learner.layout()).map_err(EngineError::from)?;
    learner.set(&Flat::upload(weights, buffers, &host));
    Ok(learner.backbone())
}

/// Takes the tensors below `backbone.`, or all where none is.
fn below_backbone(tensors: Tensors) -> Start {
    let below = |name: &str| name.strip_prefix("backbone.").map(str::to_owned);
    if !tensors.keys().any(|name| below(name).is_some()) {
        return Start::new(tensors);
    }
    Start::new(tensors.into_iter().filter_map(|(name, tensor)| Some((below(&name)?, tensor))).collect())
}
