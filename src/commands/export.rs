//! `autodidact export`: a backbone in a folder as other programs read it, with a model card.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::encoder::Encoder;
use super::{folder_of, print, say};
use crate::augment::eval_shorter;
use crate::checkpoint;
use crate::cli::{ExportArgs, FormatArg};
use crate::error::{Failure, Kind};
use crate::files::{FileError, sync_folder, write_atomically, write_json};
use crate::interop::{self, Arch, Exported, Input, Target, Weights};
use crate::model::PositionEmbedding;
use crate::plan;

pub(super) fn run(args: &ExportArgs) -> Result<(), Failure> {
    let target = match args.format {
        FormatArg::Timm => Target::Timm,
        FormatArg::Hf => Target::HuggingFace,
        FormatArg::Torchvision => Target::Torchvision,
        FormatArg::Safetensors => Target::Plain,
        FormatArg::Onnx => Target::Onnx,
    };
    check_output(&args.output, args.force)?;
    check_apart(&args.encoder.checkpoint, &args.output)?;
    let mut encoder = Encoder::open(&args.encoder)?;
    if args.backbone_only {
        encoder.head = None;
    }
    if args.encoder.pool.is_some() && encoder.head.is_some() {
        let text = "`--pool`: the classifier was trained on the features that it has";
        return Err(Failure::message(Kind::Usage, text).hint("leave it out, or export the features: `--backbone-only`"));
    }
    for note in &encoder.notes {
        say(&format!("note: {note}"));
    }
    let input = input_of(&encoder, args.encoder.size)?;
    let exported = interop::export(target, &encoder.arch, encoder.weights.tensors(), encoder.head.as_ref(), &input)
        .map_err(|error| Failure::new(Kind::Usage, error))?;
    write(args, &encoder, &input, &exported)?;
    print(format_args!("{}: {} ({})", args.output.display(), exported.architecture, encoder.origin))?;
    for note in &exported.notes {
        say(&format!("note: {note}"));
    }
    Ok(())
}

/// What an export consists of.
const FILES: [&str; 6] =
    ["README.md", "config.json", "model.onnx", "model.safetensors", "preprocessor_config.json", "recipe.toml"];

/// Tells whether a folder is an export and nothing else: another one may hold what nobody wants to lose.
fn is_export(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let ours = |entry: &fs::DirEntry| {
        FILES.iter().any(|name| entry.file_name() == *name) && entry.file_type().is_ok_and(|kind| kind.is_file())
    };
    let card = fs::read_to_string(folder.join("README.md")).unwrap_or_default();
    entries.into_iter().all(|entry| entry.is_ok_and(|entry| ours(&entry))) && card.contains("\nExported by autodidact ")
}

/// Refuses what is there, unless it may be replaced: an export, or an empty folder.
fn check_output(output: &Path, force: bool) -> Result<(), Failure> {
    let refuse =
        |what: &str, hint: &str| Err(Failure::message(Kind::Usage, format!("{}: {what}", output.display())).hint(hint));
    if output.file_name().is_none() {
        return refuse("it is no name for a folder", "name a folder that does not exist yet");
    }
    if !output.exists() {
        return Ok(());
    }
    if !output.is_dir() {
        return refuse("there is a file already", "choose another name");
    }
    if fs::read_dir(output).is_ok_and(|mut entries| entries.next().is_none()) {
        return Ok(());
    }
    if !force {
        return refuse("there is a folder already", "choose another name, or replace it with `--force`");
    }
    if is_export(output) {
        return Ok(());
    }
    refuse("`--force` replaces exported folders, and this is none", "remove it yourself, or choose another name")
}

/// Refuses to replace the weights that are exported.
fn check_apart(input: &Path, output: &Path) -> Result<(), Failure> {
    let (Ok(input), Ok(output_path)) = (input.canonicalize(), output.canonicalize()) else { return Ok(()) };
    if input.starts_with(&output_path) {
        let text = format!("{}: it holds the weights that are exported", output.display());
        return Err(Failure::message(Kind::Usage, text).hint("choose another name"));
    }
    Ok(())
}

/// How the network sees images: a position embedding is exported for the images that it is made for.
fn input_of(encoder: &Encoder, asked: Option<u32>) -> Result<Input, Failure> {
    let mut size = encoder.view.size;
    if let Arch::Vit(vit) = &encoder.arch
        && vit.position != PositionEmbedding::Rope
    {
        let [height, width] = vit.image;
        if height != width {
            let text =
                format!("its positions are for images of {height} x {width} px, and exported networks are for squares");
            return Err(Failure::message(Kind::Usage, text).hint("`embed` computes its features"));
        }
        if asked.is_some_and(|asked| asked as usize != height) {
            let text = format!("`--size`: its positions are for images of {height} px, and are exported as they are");
            return Err(Failure::message(Kind::Usage, text)
                .hint("leave it out: the program that loads them resamples them (timm: `img_size`)"));
        }
        size = u32::try_from(height).unwrap_or(size);
    }
    Ok(Input { size, shorter: eval_shorter(size), mean: encoder.view.mean, std: encoder.view.std })
}

/// Writes the folder under another name, then renames it.
fn write(args: &ExportArgs, encoder: &Encoder, input: &Input, exported: &Exported) -> Result<(), Failure> {
    let output = &args.output;
    let parent = folder_of(output);
    let temporary = tempfile::Builder::new()
        .prefix(".tmp-export-")
        .tempdir_in(parent)
        .map_err(FileError::at(output, "create a temporary folder beside it"))?;
    let place = |name: &str| temporary.path().join(name);
    // errors name the folder that was asked for
    let named = |error: FileError| FileError { path: output.join(error.path.file_name().unwrap_or_default()), ..error };
    match &exported.weights {
        Weights::Tensors(tensors) => {
            write_atomically(&place("model.safetensors"), &checkpoint::encode_tensors(tensors)?).map_err(named)?;
        }
        Weights::Onnx(bytes) => write_atomically(&place("model.onnx"), bytes).map_err(named)?,
    }
    write_json(&place("config.json"), &exported.config).map_err(named)?;
    if let Some(preprocessor) = &exported.preprocessor {
        write_json(&place("preprocessor_config.json"), preprocessor).map_err(named)?;
    }
    write_atomically(&place("README.md"), card(args, encoder, input, exported).as_bytes()).map_err(named)?;
    if let Some(run) = &encoder.run {
        // the plan is the recipe with every value
        let plan = run.folder.join("plan.toml");
        let text = fs::read(&plan).map_err(FileError::at(&plan, "read"))?;
        write_atomically(&place("recipe.toml"), &text).map_err(named)?;
    }
    open_to_others(temporary.path());
    let temporary = temporary.keep();
    let moved = replace(&temporary, output);
    if moved.is_err() {
        let _ = fs::remove_dir_all(&temporary);
    }
    moved?;
    Ok(sync_folder(parent)?)
}

/// A temporary folder is its owner's alone; this gives it the permissions of an ordinary one.
fn open_to_others(folder: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let _ = fs::set_permissions(folder, fs::Permissions::from_mode(0o755));
    }
    #[cfg(not(unix))]
    let _ = folder;
}

/// Puts a folder in the place of another, which steps aside until it is there.
fn replace(from: &Path, to: &Path) -> Result<(), FileError> {
    if !to.exists() {
        return fs::rename(from, to).map_err(FileError::at(to, "create"));
    }
    let mut aside: PathBuf = from.to_owned();
    aside.as_mut_os_string().push("-old");
    fs::rename(to, &aside).map_err(FileError::at(to, "move it aside"))?;
    if let Err(error) = fs::rename(from, to) {
        // back to where it was
        let _ = fs::rename(&aside, to);
        return Err(FileError::at(to, "create")(error));
    }
    // what cannot be removed costs space, not correctness
    let _ = fs::remove_dir_all(&aside);
    Ok(())
}

/// The model card, with the head that Hugging Face reads.
fn card(args: &ExportArgs, encoder: &Encoder, input: &Input, exported: &Exported) -> String {
    let mut text = String::from("---\n");
    let library = match args.format {
        FormatArg::Timm => "timm",
        FormatArg::Hf => "transformers",
        FormatArg::Torchvision | FormatArg::Safetensors => "pytorch",
        FormatArg::Onnx => "onnx",
    };
    let name = args.output.file_name().unwrap_or_default().to_string_lossy();
    // quoted as JSON, which YAML reads
    let license = Json::from(args.license.as_str());
    let (task, tag) = match encoder.head {
        Some(_) => ("image-classification", ""),
        None => ("image-feature-extraction", "- self-supervised\n"),
    };
    let _ = writeln!(text, "license: {license}\nlibrary_name: {library}\npipeline_tag: {task}");
    let _ = writeln!(text, "tags:\n{tag}- autodidact\n---\n\n# {name}\n");
    let _ = writeln!(text, "A {}.", encoder.arch.describe());
    if let Some(head) = &encoder.head {
        let _ = writeln!(text, "Its {} classes: {}.", head.classes().len(), named_classes(head.classes()));
        let _ = writeln!(
            text,
            "{}",
            if head.tells_several() {
                "An image may have several of them, or none: the probability of each is the sigmoid of its score."
            } else {
                "An image has one of them: the probabilities are the softmax of the scores."
            }
        );
    }
    let _ = writeln!(text, "Exported by autodidact {} for {}.\n", env!("CARGO_PKG_VERSION"), exported.architecture);
    let _ = writeln!(text, "## Use\n\nIn this folder:\n\n```python\n{}\n```\n", exported.python);
    let _ = writeln!(
        text,
        "Images are resized (bicubic) so that the shorter side has {} px, cut to {} x {} px at the centre, divided by 255, and normalised with mean {:?} and deviation {:?}.",
        input.shorter, input.size, input.size, input.mean, input.std
    );
    for note in &exported.notes {
        let _ = writeln!(text, "Note: {note}.");
    }
    let _ = writeln!(text, "\n## Training\n");
    match &encoder.run {
        None => {
            let _ = writeln!(text, "The weights come from `{}`; how they were trained is said there.", encoder.origin);
        }
        Some(run) => {
            let _ = writeln!(text, "| | |\n|---|---|\n| weights | {} |\n| steps | {} |", encoder.origin, run.step);
            let plan = fs::read_to_string(run.folder.join("plan.toml")).unwrap_or_default();
            if let Some(data) = plan::recorded_data(&plan) {
                let _ = writeln!(text, "| images | {data} |");
            }
            let _ = writeln!(text, "| digest of the weights (BLAKE3) | {} |", encoder.weights.digest());
            if let Some((from, digest)) = plan::recorded_start(&run.folder) {
                let _ = writeln!(
                    text,
                    "\nThe run began with the weights of `{from}` (digest {digest}), which are not in this folder; for another run `init` in `recipe.toml` has to name them."
                );
            }
            let _ = writeln!(
                text,
                "\n`recipe.toml` beside this file is the whole recipe; `autodidact {} recipe.toml` trains it again, to the same bits on the same kind of machine.",
                if run.supervised { "finetune" } else { "pretrain" }
            );
            text += &metrics(&run.folder);
        }
    }
    let _ = writeln!(
        text,
        "\n## Licence\n\n{}",
        if args.license == "unknown" {
            "Not stated. `autodidact export --license ID` names one."
        } else {
            &args.license
        }
    );
    text
}

/// The names of classes, in the order of the outputs; of many the first.
fn named_classes(classes: &[String]) -> String {
    const MOST: usize = 20;
    let names: Vec<&str> = classes.iter().take(MOST).map(String::as_str).collect();
    let more = classes.len().saturating_sub(MOST);
    let end = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{end}", names.join(", "))
}

/// What the end of the run measured, from its `summary.json`.
fn metrics(folder: &Path) -> String {
    let summary: Option<Json> =
        fs::read(folder.join("summary.json")).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let Some(summary) = summary else { return String::new() };
    let percent = |value: &Json| value.as_f64().map(|value| format!("{:.2} %", 100.0 * value));
    let number = |value: &Json| value.as_f64().map(|value| format!("{value:.4}"));
    let rows = [
        ("nearest neighbours, top 1", percent(&summary["knn"]["top1"])),
        ("the same, untrained network", percent(&summary["knn"]["untrained_top1"])),
        ("linear classifier, top 1", percent(&summary["linear"]["top1"])),
        ("classification, top 1", percent(&summary["classification"]["top1"])),
        ("balanced accuracy", percent(&summary["classification"]["balanced_accuracy"])),
        ("mean average precision", percent(&summary["classification"]["mean_average_precision"])),
        ("RankMe", number(&summary["rankme"])),
        ("loss of the last step", number(&summary["last_loss"])),
    ];
    let rows: Vec<String> =
        rows.into_iter().filter_map(|(name, value)| Some(format!("| {name} | {} |\n", value?))).collect();
    if rows.is_empty() {
        return String::new();
    }
    let steps = summary["steps"].as_u64().unwrap_or(0);
    format!(
        "\n## Metrics\n\nMeasured at the end of the run, after {steps} steps, on the images of its recipe:\n\n| | |\n|---|---|\n{}",
        rows.concat()
    )
}
