//! A backbone to use: from a run, a checkpoint of ours, or weights of another program.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::Device;
use serde_json::Value as Json;

use super::eval;
use crate::augment::{IMAGENET_MEAN, IMAGENET_STD};
use crate::backend;
use crate::checkpoint;
use crate::cli::{EncoderArgs, PoolArg, Which};
use crate::engine::EngineError;
use crate::error::{Failure, Kind};
use crate::eval::EvalView;
use crate::interop::{self, Arch, Checkpoint, Fate, Found, Head, Hints};
use crate::model::params::{Entry, Flat};
use crate::model::{Backbone, ConfigError, Kind as Holds, Pool, Scope, Start, Tensors, merge};
use crate::ops;
use crate::recipe;

/// The run that trained a backbone.
#[derive(Clone, Debug)]
pub(super) struct Provenance {
    /// Run folder.
    pub(super) folder: PathBuf,
    /// Steps that it was trained for.
    pub(super) step: u64,
    /// It learnt from labels, by `finetune`.
    pub(super) supervised: bool,
}

/// A backbone with its weights.
#[derive(Debug)]
pub(super) struct Encoder {
    /// Its structure.
    pub(super) arch: Arch,
    /// Its weights, under its own names.
    pub(super) weights: Arc<Start>,
    /// Its classifier, if it was trained with one that is used with it.
    pub(super) head: Option<Head>,
    /// How images are prepared.
    pub(super) view: EvalView,
    /// What it is, in words.
    pub(super) origin: String,
    /// Where it was trained, if here.
    pub(super) run: Option<Provenance>,
    /// What the user should know, a sentence each.
    pub(super) notes: Vec<String>,
}

impl Encoder {
    /// Opens what the command line names.
    pub(super) fn open(args: &EncoderArgs) -> Result<Self, Failure> {
        let path = &args.checkpoint;
        let Ok(kind) = fs::metadata(path) else {
            let text = format!("{}: there is nothing of that name", path.display());
            return Err(Failure::message(Kind::Usage, text)
                .hint("give a run folder, a checkpoint in one, or weights of another program"));
        };
        let mut encoder =
            if kind.is_dir() && !interop::is_folder_of_weights(path) { of_run(args)? } else { of_file(args)? };
        if let Some(pool) = args.pool {
            encoder.set_pool(pool)?;
        }
        encoder.view.mean = args.mean.unwrap_or(encoder.view.mean);
        encoder.view.std = args.std.unwrap_or(encoder.view.std);
        if let Some(size) = args.size {
            encoder.view.size = size;
        }
        encoder.check_size()?;
        Ok(encoder)
    }

    fn set_pool(&mut self, pool: PoolArg) -> Result<(), Failure> {
        let Arch::Vit(vit) = &mut self.arch else {
            let text = "`--pool` is for vision transformers; this network averages over the image";
            return Err(Failure::message(Kind::Usage, text));
        };
        if pool == PoolArg::Class && !vit.class_token {
            let text = "`--pool class`: this network has no class token";
            return Err(Failure::message(Kind::Usage, text).hint("use `--pool mean`"));
        }
        vit.pool = match pool {
            PoolArg::Class => Pool::Class,
            PoolArg::Mean => Pool::Mean,
        };
        Ok(())
    }

    fn check_size(&self) -> Result<(), Failure> {
        let size = self.view.size as usize;
        let refuse = |text: String, hint: String| Err(Failure::message(Kind::Usage, text).hint(hint));
        match &self.arch {
            Arch::Vit(vit) if !size.is_multiple_of(vit.patch) => refuse(
                format!("images of {size} px are not a whole number of patches of {} px", vit.patch),
                format!("use `--size {}`", size.next_multiple_of(vit.patch)),
            ),
            Arch::ConvNext(net) if size < net.min_image() => refuse(
                format!("images of {size} px are too small: the network shrinks them {} times", net.min_image()),
                format!("use `--size {}` or more", net.min_image()),
            ),
            _ => Ok(()),
        }
    }

    /// Builds the network.
    pub(super) fn network(&self, device: &Device) -> Result<Backbone, ConfigError> {
        let scope = Scope::new(0, device).starting_from(Some(Arc::clone(&self.weights)));
        self.arch.build(&scope.enter("backbone"))
    }
}

/// Reads a network of a run.
fn of_run(args: &EncoderArgs) -> Result<Encoder, Failure> {
    let (folder, path) = eval::find(&args.checkpoint)?;
    let recipe = recipe::load(&folder.join("plan.toml"), &[])?.recipe;
    ops::configure(recipe.ops);
    let first = recipe.views.first().map_or(32, |view| view.size);
    let arch = Arch::from_config(&recipe.backbone, first).map_err(|error| Failure::new(Kind::Usage, error))?;
    let host = backend::host();
    let mut learner =
        recipe.method.build(&recipe.inputs(), &Scope::new(recipe.seed, &host)).map_err(EngineError::from)?;
    let evaluated = learner.evaluated();
    let mut head = None;
    let (tensors, step, what) = if args.which == Which::Eval {
        let found = eval::result(&args.checkpoint, &folder, &path, &recipe, learner.as_ref())?;
        let part = |entry: &Entry| {
            let values = if entry.kind == Holds::Trained { &found.weights } else { &found.buffers };
            (entry.path.clone(), (entry.shape.clone(), values[entry.range()].to_vec()))
        };
        let parts = learner.layout().entries().iter().filter(|entry| entry.path.starts_with("head")).map(part);
        head = Head::of(&parts.collect(), recipe.method.classes());
        learner.set(&Flat::upload(found.weights, found.buffers, &host));
        (learner.backbone().tensors().clone(), found.step, format!("{evaluated}, {}", found.what))
    } else {
        let prefix = if args.which == Which::Student { "backbone." } else { "teacher.backbone." };
        let manifest = checkpoint::verify(&path).map_err(EngineError::from)?;
        let all = checkpoint::read_tensors(&path.join("model.safetensors")).map_err(EngineError::from)?;
        if args.which == Which::Student {
            head = Head::of(&all, recipe.method.classes());
        }
        let own = all.into_iter().filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?.to_owned(), tensor)));
        let mut own: Tensors = own.collect();
        merge(&mut own);
        if own.is_empty() {
            let text = format!("{}: `{}` has no teacher", args.checkpoint.display(), recipe.method.name());
            return Err(Failure::message(Kind::Usage, text).hint("leave `--which` out, or use `--which student`"));
        }
        let name = if args.which == Which::Student { "student" } else { "teacher" };
        (own, manifest.step, name.to_owned())
    };
    let head = head.map(|head| head.several(recipe.method.is_multi_label()));
    let size = recipe.views.iter().map(|view| view.size).max().unwrap_or(first);
    let typed = args.checkpoint.display().to_string();
    let origin = format!("{typed} ({}, {what}, step {step})", recipe.method.name());
    checked(&arch, &tensors, &typed)?;
    checked_head(head.as_ref(), recipe.method.classes(), &typed)?;
    let weights = Arc::new(Start::new(tensors).described(&typed, &origin));
    let view = EvalView { size, mean: recipe.data.mean, std: recipe.data.std };
    let run = Some(Provenance { folder, step, supervised: recipe.method.is_supervised() });
    Ok(Encoder { arch, weights, head, view, origin, run, notes: Vec::new() })
}

/// Checks that tensors are those of a structure, and can be used.
fn checked(arch: &Arch, tensors: &Tensors, typed: &str) -> Result<(), Failure> {
    let wanted = arch.tensors();
    let wrong = wanted.iter().find(|(name, shape)| tensors.get(*name).is_none_or(|(there, _)| there != *shape));
    let fail = |text: String| Err(Failure::message(Kind::Failure, format!("{typed}: {text}")));
    if let Some((name, shape)) = wrong {
        return fail(format!("it has no `{name}` of shape {shape:?}, which the plan's backbone has"));
    }
    if let Some((name, _)) = tensors.iter().find(|(_, (_, values))| values.iter().any(|value| !value.is_finite())) {
        return fail(format!("`{name}` holds numbers that are not finite; use an earlier checkpoint"));
    }
    Ok(())
}

/// Checks that a method that scores classes has a head that can be used.
fn checked_head(head: Option<&Head>, classes: &[String], typed: &str) -> Result<(), Failure> {
    let fail = |text: String| Err(Failure::message(Kind::Failure, format!("{typed}: {text}")));
    match head {
        None if classes.is_empty() => Ok(()),
        None => fail(format!("it has no `head` for the {} classes of its plan", classes.len())),
        Some(head) if head.is_finite() => Ok(()),
        Some(_) => fail("its head holds numbers that are not finite; use an earlier checkpoint".to_owned()),
    }
}

/// Reads weights of another program.
fn of_file(args: &EncoderArgs) -> Result<Encoder, Failure> {
    let path = &args.checkpoint;
    let usage = |error: interop::ImportError| Failure::new(Kind::Usage, error);
    if args.which != Which::Eval {
        let text = "`--which` is for runs of this program; a file has one backbone that is used";
        return Err(Failure::message(Kind::Usage, text).hint("`autodidact checkpoint inspect` says which that is"));
    }
    if path.is_file() && path.with_file_name("manifest.json").exists() {
        let folder = path.parent().unwrap_or(Path::new(".")).display();
        let text = format!("{}: a file of a checkpoint, which does not tell the network", path.display());
        return Err(Failure::message(Kind::Usage, text).hint(format!("give the checkpoint: {folder}")));
    }
    let checkpoint = Checkpoint::open(path).map_err(usage)?;
    let hints = Hints { heads: args.heads.map(usize::from), image: None };
    let found = Found::find(&checkpoint, &hints).map_err(usage)?;
    let mut notes: Vec<String> = found.notes().to_vec();
    let arch = three_channels(found.arch(), &mut notes);
    let fit = found.fit(&arch);
    if let Some(row) = fit.rows.iter().find(|row| !row.fate.is_matched()) {
        let what = if row.fate == Fate::Missing { "has no tensor for" } else { "has another shape for" };
        let text = format!("{}: it {what} `{}` of the backbone", path.display(), row.path);
        return Err(Failure::message(Kind::Usage, text).hint("`autodidact checkpoint inspect` lists what is there"));
    }
    if let Some(name) = fit.left_over.first() {
        let text = format!("{}: {name:?} is a part of the backbone that is not supported", path.display());
        return Err(Failure::message(Kind::Usage, text).hint("its features would differ from those of its authors"));
    }
    let tensors = found.load(&arch).map_err(usage)?;
    let view = view_of(&checkpoint, &arch, args, &mut notes);
    let typed = path.display().to_string();
    let origin = format!("{typed} ({})", found.layout());
    let weights = Arc::new(Start::new(tensors).described(&typed, &origin));
    Ok(Encoder { arch, weights, head: None, view, origin, run: None, notes })
}

/// The structure for images of three channels, which all are made into.
fn three_channels(arch: &Arch, notes: &mut Vec<String>) -> Arch {
    let mut arch = arch.clone();
    let channels = match &mut arch {
        Arch::Vit(arch) => &mut arch.channels,
        Arch::ResNet(arch) => &mut arch.channels,
        Arch::ConvNext(arch) => &mut arch.channels,
    };
    if *channels != 3 {
        notes.push(format!("its {channels} input channels are made 3"));
        *channels = 3;
    }
    arch
}

/// Size, mean and deviation as the files beside the weights say: timm's `pretrained_cfg`, or Hugging Face's preprocessor.
fn view_of(checkpoint: &Checkpoint, arch: &Arch, args: &EncoderArgs, notes: &mut Vec<String>) -> EvalView {
    let folder = if args.checkpoint.is_dir() { args.checkpoint.as_path() } else { super::folder_of(&args.checkpoint) };
    let preprocessor: Option<Json> = fs::read(folder.join("preprocessor_config.json"))
        .ok()
        .filter(|text| text.len() < 1 << 20)
        .and_then(|text| serde_json::from_slice(&text).ok());
    let timm = checkpoint.config().map(|config| &config["pretrained_cfg"]);
    let three = |value: Option<&Json>| -> Option<[f32; 3]> {
        let numbers: Option<Vec<f32>> = value?.as_array()?.iter().map(|n| n.as_f64().map(|n| n as f32)).collect();
        numbers?.try_into().ok()
    };
    let told = |ours: &str, theirs: &str| {
        three(timm.map(|config| &config[ours])).or_else(|| three(preprocessor.as_ref().map(|config| &config[theirs])))
    };
    let (mean, std) = (told("mean", "image_mean"), told("std", "image_std"));
    let std = std.filter(|std| std.iter().all(|&value| value > 0.0));
    if (mean.is_none() && args.mean.is_none()) || (std.is_none() && args.std.is_none()) {
        notes.push("nothing says how its images are normalised, so ImageNet's mean and deviation are used; `--mean` and `--std` set others".to_owned());
    }
    let pixels = |value: &Json| value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=4096).contains(n));
    let size = match arch {
        Arch::Vit(vit) => u32::try_from(vit.image[0]).ok(),
        _ => timm
            .and_then(|config| pixels(&config["input_size"][1]))
            .or_else(|| preprocessor.as_ref().and_then(|config| pixels(&config["crop_size"]["height"]))),
    };
    if size.is_none() && args.size.is_none() {
        notes.push("nothing says what images it is for, so they are made 224 px; `--size` sets another".to_owned());
    }
    EvalView { size: size.unwrap_or(224), mean: mean.unwrap_or(IMAGENET_MEAN), std: std.unwrap_or(IMAGENET_STD) }
}
