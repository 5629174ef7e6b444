//! `autodidact checkpoint inspect`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value as Json, json};

use super::print;
use crate::cli::{CheckpointArgs, CheckpointCommand};
use crate::error::{Failure, Kind};
use crate::interop::{Arch, Checkpoint, Fate, Fit, Found, Hints, LEAST_MATCHED};
use crate::recipe::{self, plural};

/// Most names in a list that is not asked for whole.
const FEW: usize = 8;

pub(super) fn run(command: &CheckpointCommand) -> Result<(), Failure> {
    let CheckpointCommand::Inspect(args) = command;
    let usage = |error| Failure::new(Kind::Usage, error);
    let checkpoint = Checkpoint::open(&args.file).map_err(usage)?;
    let found = Found::find(&checkpoint, &Hints::default()).map_err(usage)?;
    let arch = match &args.recipe {
        Some(recipe) => of_recipe(recipe, &args.overrides)?,
        None => found.arch().clone(),
    };
    let fit = found.fit(&arch);
    // reads every number, so that one that is not finite is said here and not by a run
    found.load(&arch).map_err(usage)?;
    if args.json {
        print(format_args!("{:#}", in_json(&found, &checkpoint, &fit)))?;
    } else {
        print(in_words(args, &found, &checkpoint, &fit).trim_end())?;
    }
    if fit.matched() >= LEAST_MATCHED || args.allow_partial {
        return Ok(());
    }
    let text = format!(
        "{}: {} of the {} tensors of the backbone are there, fewer than {} %",
        args.file.display(),
        fit.num_matched(),
        fit.rows.len(),
        LEAST_MATCHED * 100.0
    );
    Err(Failure::message(Kind::Failure, text).hint(
        "a run would start from weights that are partly random; where that is meant, `--allow-partial` here and `init_allow_partial = true` in the recipe",
    ))
}

/// The backbone of a recipe.
fn of_recipe(path: &std::path::Path, overrides: &[String]) -> Result<Arch, Failure> {
    let recipe = recipe::load(path, overrides)?.recipe;
    let size = recipe.views.first().map_or(32, |view| view.size);
    Arch::from_config(&recipe.backbone, size).map_err(|error| Failure::new(Kind::Usage, error))
}

fn in_words(args: &CheckpointArgs, found: &Found<'_>, checkpoint: &Checkpoint, fit: &Fit) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<13} {value}");
    };
    let files = if checkpoint.num_files() > 1 { format!(", {} files", checkpoint.num_files()) } else { String::new() };
    row(
        "file",
        format!(
            "{} ({}{files}), {}",
            args.file.display(),
            checkpoint.format().describe(),
            plural(checkpoint.tensors().len(), "tensor")
        ),
    );
    row("layout", found.layout());
    let place = if found.prefix().is_empty() { "the whole file".to_owned() } else { format!("`{}`", found.prefix()) };
    let others = found.others().iter().take(FEW).map(|other| format!("`{other}`")).collect::<Vec<_>>().join(", ");
    row("place", if others.is_empty() { place } else { format!("{place}; not used: {others}") });
    row("architecture", found.arch().describe());
    row("parameters", found.num_values().to_string());
    let against = match &args.recipe {
        Some(recipe) => format!(" of {}", recipe.display()),
        None => String::new(),
    };
    let adapted = fit.rows.iter().filter(|row| row.fate.change().is_some()).count();
    row(
        "loads",
        format!(
            "{} of {} tensors of the backbone{against} ({:.1} %), {adapted} of them adapted",
            fit.num_matched(),
            fit.rows.len(),
            100.0 * fit.matched()
        ),
    );
    for note in found.notes() {
        row("note", note.clone());
    }
    changes(&mut text, fit);
    let list = |text: &mut String, title: &str, lines: Vec<String>| {
        let shown = if args.tensors { lines.len() } else { FEW };
        if !lines.is_empty() {
            let _ = writeln!(text, "\n{title} ({}):", lines.len());
        }
        lines.iter().take(shown).for_each(|line| {
            let _ = writeln!(text, "  {line}");
        });
        if lines.len() > shown {
            let _ = writeln!(text, "  and {} more (`--tensors` lists all)", lines.len() - shown);
        }
    };
    let differs = fit.rows.iter().filter(|row| row.fate == Fate::Differs);
    let differs = differs.map(|row| {
        format!("{}: {:?} there, {:?} wanted", row.path, row.there.as_deref().unwrap_or_default(), row.shape)
    });
    list(&mut text, "other shapes", differs.collect());
    let nearest: BTreeMap<&str, &str> = fit.nearest().into_iter().collect();
    let missing =
        fit.rows.iter().filter(|row| row.fate == Fate::Missing).map(|row| match nearest.get(row.path.as_str()) {
            Some(near) => format!("{} {:?} (most like it in the file: {near})", row.path, row.shape),
            None => format!("{} {:?}", row.path, row.shape),
        });
    list(&mut text, "missing", missing.collect());
    list(&mut text, "left over in the file's backbone", fit.left_over.clone());
    list(&mut text, "no part of the backbone", groups(found.outside(), args.tensors));
    if args.tensors {
        let loaded = fit.rows.iter().filter(|row| row.fate.is_matched());
        list(
            &mut text,
            "loaded",
            loaded.map(|row| format!("{} {:?} <- {}", row.path, row.shape, row.from.join(" + "))).collect(),
        );
    }
    match found.arch().config().map(|config| table(&config)) {
        Ok(Some(table)) => {
            let _ = writeln!(text, "\nin a recipe, with `init = \"{}\"`:\n\n{table}", args.file.display());
        }
        Ok(None) => {}
        Err(why) => {
            let _ = writeln!(text, "\nno `[backbone]` table builds it: {why}");
        }
    }
    text
}

/// What is done to tensors, each kind once.
fn changes(text: &mut String, fit: &Fit) {
    let mut kinds: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for row in &fit.rows {
        if let Some(how) = row.fate.change() {
            kinds.entry(how).or_default().push(&row.path);
        }
    }
    for (how, paths) in kinds {
        let rest = if paths.len() > 1 { format!(" and {} more", paths.len() - 1) } else { String::new() };
        let _ = writeln!(text, "{:<13} `{}`{rest}: {how}", "adapted", paths[0]);
    }
}

/// Names by what they begin with, unless all are wanted.
fn groups(names: &[String], all: bool) -> Vec<String> {
    if all {
        return names.to_vec();
    }
    let mut groups: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for name in names {
        let ends = name.match_indices(['.', '/']).nth(1).map_or(name.len(), |(at, _)| at + 1);
        groups.entry(&name[..ends]).or_default().push(name);
    }
    let shown = groups.into_iter().map(|(name, all)| match all[..] {
        [only] => only.to_owned(),
        _ => format!("{name}* ({})", all.len()),
    });
    shown.collect()
}

fn table(config: &crate::model::BackboneConfig) -> Option<String> {
    #[derive(serde::Serialize)]
    struct Holder<'a> {
        backbone: &'a crate::model::BackboneConfig,
    }
    toml::to_string(&Holder { backbone: config }).ok()
}

fn in_json(found: &Found<'_>, checkpoint: &Checkpoint, fit: &Fit) -> Json {
    let tensors = fit.rows.iter().map(|row| {
        let (fate, change) = match &row.fate {
            Fate::Loaded => ("loaded", None),
            Fate::Adapted(how) => ("adapted", Some(how)),
            Fate::Missing => ("missing", None),
            Fate::Differs => ("differs", None),
        };
        json!({ "path": row.path, "shape": row.shape, "from": row.from, "there": row.there, "fate": fate, "change": change })
    });
    let config = found.arch().config();
    json!({
        "file": checkpoint.path(),
        "format": checkpoint.format(),
        "files": checkpoint.num_files(),
        "layout": found.layout(),
        "prefix": found.prefix(),
        "other_places": found.others(),
        "architecture": found.arch().describe(),
        "backbone": config.as_ref().ok(),
        "why_no_backbone": config.as_ref().err(),
        "parameters": found.num_values(),
        "matched": fit.num_matched(),
        "wanted": fit.rows.len(),
        "notes": found.notes(),
        "tensors": tensors.collect::<Vec<_>>(),
        "left_over": fit.left_over,
        "nearest": fit.nearest(),
        "outside": found.outside(),
    })
}
