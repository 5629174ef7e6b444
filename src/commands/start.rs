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
use crate::interop::{self, Arch, Checkpoint, Fate, Found, Hints, LEAST_MATCHED};
use crate::model::params::{Flat, Layout};
use crate::model::{BackboneConfig, MlpKind, PositionEmbedding, Scope, Start, Tensors};
use crate::plan::{Plan, recorded_start};
use crate::recipe::{self, InitConfig, Loaded, Problem, plural};

/// The copy in a run folder.
const COPY: &str = "init.safetensors";
const WHAT: &str =
    "`init` is \"random\", a run folder, a checkpoint in one, or weights of another program: docs/checkpoints.md";

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
    if kind.is_dir() && !interop::is_folder_of_weights(path) {
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
    if !kind.is_file() && !kind.is_dir() {
        return Err(refuse(format!("`init` is \"{typed}\", which is neither a file nor a folder")));
    }
    let size = loaded.recipe.views.first().map_or(32, |view| view.size);
    // what does not fit together is said when the network is built, with its key
    let Ok(arch) = Arch::from_config(&loaded.recipe.backbone, size) else { return Ok(None) };
    let start = of_file(path, &typed, &arch, loaded.recipe.init_allow_partial);
    start
        .map(Some)
        .map_err(|(text, hint)| loaded.error(vec![Problem::at("init", format!("`init`: {text}")).hint(hint)]).into())
}

/// What is wrong, and what to do.
type Refused = (String, String);

/// Reads a file of weights, ours or of another program, for the backbone of a recipe.
fn of_file(path: &Path, typed: &str, arch: &Arch, allow_partial: bool) -> Result<Start, Refused> {
    let told = |error: interop::ImportError| {
        let text = error.to_string();
        let (text, hint) = text.split_once("\nhint: ").unwrap_or((&text, WHAT));
        (text.to_owned(), hint.to_owned())
    };
    let checkpoint = Checkpoint::open(path).map_err(told)?;
    if let Some(tensors) = own_names(&checkpoint, arch).map_err(told)? {
        return Ok(Start::new(tensors).from(typed));
    }
    let found = Found::find(&checkpoint, &Hints::default()).map_err(told)?;
    let fit = found.fit(arch);
    let inspect = format!("`autodidact checkpoint inspect {typed}` shows what is in it, and its `[backbone]` table");
    let wrong =
        |text: String| (format!("{} does not fit the recipe's backbone: {text}", path.display()), inspect.clone());
    if std::mem::discriminant(found.arch()) != std::mem::discriminant(arch) {
        return Err(wrong(format!("it is a {}; the recipe's is a {}", found.arch().describe(), arch.describe())));
    }
    if !allow_partial {
        if let Some(row) = fit.rows.iter().find(|row| row.fate == Fate::Differs) {
            let there = row.there.as_deref().unwrap_or_default();
            return Err(wrong(format!(
                "`{}` is {there:?} there and {:?} in the recipe's backbone",
                row.path, row.shape
            )));
        }
        if let Some(name) = fit.left_over.first() {
            let count = fit.left_over.len();
            return Err(wrong(format!(
                "it has {name:?}, the recipe's backbone has not ({} left over)",
                plural(count, "tensor")
            )));
        }
        if fit.matched() < LEAST_MATCHED {
            let missing = fit.rows.iter().find(|row| row.fate == Fate::Missing).map_or("", |row| row.path.as_str());
            return Err(wrong(format!(
                "it has no `{missing}` ({} of the {} tensors of the backbone are there)",
                fit.num_matched(),
                fit.rows.len()
            )));
        }
    }
    let mut notes = settings_that_differ(&found, arch).map_err(wrong)?;
    if fit.num_matched() == 0 {
        return Err(wrong("none of its tensors fits".to_owned()));
    }
    let tensors = found.load(arch).map_err(told)?;
    let unmatched: Vec<&str> =
        fit.rows.iter().filter(|row| !row.fate.is_matched()).map(|row| row.path.as_str()).collect();
    if let Some(first) = unmatched.first() {
        let rest = if unmatched.len() > 1 { ", ..." } else { "" };
        notes.push(format!(
            "{} of {} tensors of the backbone are not in {typed} and are drawn: `{first}`{rest}",
            unmatched.len(),
            fit.rows.len()
        ));
    }
    let mut adapted: Vec<&str> =
        fit.rows.iter().filter_map(|row| row.fate.change()).filter(|how| !how.starts_with("sides of 1")).collect();
    adapted.dedup();
    notes.extend(adapted.iter().map(|how| format!("`init`: {how}")));
    let origin = format!("{typed} ({})", found.layout());
    Ok(Start::new(tensors).described(typed, &origin).with_notes(notes).partial(!unmatched.is_empty()))
}

/// Lists settings that no tensor tells and that are not those of the recipe; an error where the file does tell.
fn settings_that_differ(found: &Found<'_>, arch: &Arch) -> Result<Vec<String>, String> {
    let (Arch::Vit(there), Arch::Vit(here)) = (found.arch(), arch) else { return Ok(Vec::new()) };
    let mut notes: Vec<String> = found
        .notes()
        .iter()
        .filter(|note| !note.contains("attention heads"))
        .map(|note| format!("`init`: {note}"))
        .collect();
    if there.heads != here.heads {
        let text = format!("{} attention heads there and {} in the recipe's backbone", there.heads, here.heads);
        if found.heads_known() {
            return Err(text);
        }
        notes.push(format!(
            "`init`: the file does not tell its number of attention heads: the recipe's {} are used, where {} would be assumed",
            here.heads, there.heads
        ));
    }
    if there.eps != here.eps {
        notes.push(format!(
            "`init`: layer norms have an epsilon of {:e} there and {:e} here; `backbone.vit.norm_eps={:e}` gives the same features",
            there.eps, here.eps, there.eps
        ));
    }
    if there.mlp.is_gated() && here.mlp.is_gated() && there.mlp != here.mlp {
        let name = |kind| if kind == MlpKind::Swiglu { "swiglu" } else { "geglu" };
        notes.push(format!(
            "`init`: the MLP is gated as \"{}\" there and \"{}\" here",
            name(there.mlp),
            name(here.mlp)
        ));
    }
    if there.position == PositionEmbedding::Learned && here.position == PositionEmbedding::Sincos {
        let text = "`init`: positions are learned there and fixed here: they are taken and not trained (`backbone.vit.position=learned` trains them)";
        notes.push(text.to_owned());
    }
    if there.rope_base != here.rope_base && there.position == here.position {
        notes.push(format!(
            "`init`: rotary positions have the base {} there and {} here",
            there.rope_base, here.rope_base
        ));
    }
    Ok(notes)
}

/// Reads a file of our own: exactly the tensors of the backbone, alone or below `backbone.`.
fn own_names(checkpoint: &Checkpoint, arch: &Arch) -> Result<Option<Tensors>, interop::ImportError> {
    let wanted = arch.tensors();
    let below = checkpoint.tensors().keys().any(|name| name.starts_with("backbone."));
    let prefix = if below { "backbone." } else { "" };
    let own = checkpoint.tensors().iter().filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?, tensor)));
    let same = own.clone().count() == wanted.len()
        && own.clone().all(|(name, tensor)| wanted.get(name).is_some_and(|shape| shape == tensor.shape()));
    if !same {
        return Ok(None);
    }
    let read = |(name, shape): (String, Vec<usize>)| -> Result<_, interop::ImportError> {
        let values = checkpoint.read_f32(&format!("{prefix}{name}"))?;
        Ok((name, (shape, values)))
    };
    wanted.into_iter().map(read).collect::<Result<Tensors, _>>().map(Some)
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
    // what is missing was drawn when the run began, and is drawn again
    let start = Start::new(checkpoint::read_tensors(&copy).map_err(EngineError::from)?).from(from).partial(true);
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
    let found = eval::result(target, &folder, &path, &recipe, learner.as_ref())?;
    learner.set(&Flat::upload(found.weights, found.buffers, &host));
    recipe.backbone.spell_out();
    let part = learner.evaluated();
    let origin = format!("{} ({part}, {}, step {})", target.display(), found.what, found.step);
    Ok((learner.backbone().described(&target.display().to_string(), &origin), recipe.backbone))
}
