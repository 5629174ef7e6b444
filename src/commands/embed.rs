//! `autodidact embed`: features of images in a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use burn::tensor::{Device, Tensor};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value as Json, json};

use super::encoder::Encoder;
use super::{data as data_command, pretrain, print, say};
use crate::backend;
use crate::cli::{EmbedArgs, ImagesArgs, SplitArg};
use crate::data::{self, DataConfig, Source, SourceKind, Split};
use crate::error::{Failure, Kind};
use crate::eval::{Container, EvalView, NoFeatures, PART, Parts, StoreError, extract, join, write_npy};
use crate::files::{FileError, write_atomically_with, write_json};
use crate::interop::Arch;
use crate::model::{ConfigError, Pass, Pool};
use crate::recipe::plural;

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::new(Kind::Failure, error)
    }
}

pub(super) fn run(args: &EmbedArgs) -> Result<(), Failure> {
    let container = Container::of(&args.output).ok_or_else(|| {
        Failure::message(
            Kind::Usage,
            format!("{}: features are written to .npy or .safetensors", args.output.display()),
        )
        .hint("NumPy's `numpy.load` and Python's `safetensors` read them; pandas makes Parquet of either")
    })?;
    check_output(&args.output, args.force)?;
    // what lies beside unfinished features was written by the command that is gone on with
    let begun = Parts::folder(&args.output).is_dir();
    for end in [".images.jsonl", ".labels.npy", ".json"] {
        check_output(&beside(&args.output, end), args.force || begun)?;
    }
    let encoder = Encoder::open(&args.encoder)?;
    for note in &encoder.notes {
        say(&format!("note: {note}"));
    }
    let chosen = backend::choose(args.images.device).map_err(|error| Failure::new(Kind::Usage, error))?;
    if let Some(note) = &chosen.note {
        say(&format!("note: {note}"));
    }
    let source = open(&args.images)?;
    let job = describe(&encoder, source.as_ref(), &chosen.description);
    let parts = Parts::open(&args.output, &job, source.len(), args.force)?;
    let build = || -> Result<Box<dyn FnMut(Tensor<4>) -> Tensor<2>>, ConfigError> {
        let network = encoder.network(&chosen.device)?;
        Ok(Box::new(move |images| network.forward(images, &mut Pass::eval()).pooled))
    };
    let work = Work { what: "feature", images: &args.images, view: encoder.view, device: &chosen.device };
    work.fill(&parts, source.as_ref(), build)?;
    finish(args, container, source.as_ref(), parts, job)
}

/// Refuses what is there, unless it may be replaced: a file.
pub(super) fn check_output(path: &Path, force: bool) -> Result<(), Failure> {
    let refuse =
        |what: &str, hint: &str| Err(Failure::message(Kind::Usage, format!("{}: {what}", path.display())).hint(hint));
    if path.is_dir() {
        return refuse("it is a folder", "name a file");
    }
    if path.exists() && !force {
        return refuse("there is a file already", "choose another name, or replace it with `--force`");
    }
    Ok(())
}

/// How the rows of images are computed, part by part.
pub(super) struct Work<'a> {
    /// What a value of a row is.
    pub(super) what: &'a str,
    /// Which images.
    pub(super) images: &'a ImagesArgs,
    /// How they are prepared.
    pub(super) view: EvalView,
    /// What computes.
    pub(super) device: &'a Device,
}

impl Work<'_> {
    /// Computes the parts that are missing.
    pub(super) fn fill<E: std::error::Error + Send + Sync + 'static>(
        &self,
        parts: &Parts,
        source: &dyn Source,
        build: impl Fn() -> Result<Box<dyn FnMut(Tensor<4>) -> Tensor<2>>, E> + Sync,
    ) -> Result<(), Failure> {
        // an image that could not be read may have been mended since; what is damaged is told when all is put together
        let mended = |part: usize| {
            let unreadable = parts.get(part).map(|part| part.unreadable).unwrap_or_default();
            unreadable.iter().any(|bad| source.load(bad.index).is_ok())
        };
        let missing: Vec<usize> = (0..parts.len()).filter(|&part| !parts.has(part) || mended(part)).collect();
        if missing.len() < parts.len() {
            say(&format!("going on: {} of {} parts are there", parts.len() - missing.len(), parts.len()));
        }
        let bar = ProgressBar::new((missing.len() * PART).min(source.len()) as u64).with_style(
            ProgressStyle::with_template("computing {bar:40} {human_pos}/{human_len} images, {eta} left")
                .unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        let threads = self.images.threads.map_or_else(pretrain::cores, usize::from);
        let never = AtomicBool::new(false);
        for part in missing {
            let images = parts.images(part);
            let extracted = extract(source, &images, self.view, self.device, threads, &never, &build);
            let extracted = extracted.map_err(|error| Failure::new(Kind::Usage, error))?.unwrap_or_default();
            if let Some(at) = extracted.values.iter().position(|value| !value.is_finite()) {
                let name = source.name(extracted.kept[at / extracted.dim]);
                let text = format!("{} {} of {name} is {}", self.what, at % extracted.dim, extracted.values[at]);
                return Err(Failure::message(Kind::Failure, text).hint("the weights overflow; use another checkpoint"));
            }
            parts.put(part, &extracted)?;
            bar.inc(images.len() as u64);
        }
        bar.finish_and_clear();
        Ok(())
    }
}

/// Opens the images that a command line names.
pub(super) fn open(args: &ImagesArgs) -> Result<std::sync::Arc<dyn Source>, Failure> {
    let kind = match args.kind {
        Some(kind) => kind.into(),
        None => data_command::guess(&args.source)?,
    };
    let split = match args.split {
        SplitArg::Train => Split::Train,
        SplitArg::Test => Split::Test,
    };
    let table = DataConfig::new(kind, (kind != SourceKind::Sample).then(|| args.source.clone()));
    data::open(&table, split).map_err(|error| Failure::new(Kind::Usage, error))
}

/// What the features are a function of; parts of another job are not gone on with.
fn describe(encoder: &Encoder, source: &dyn Source, device: &str) -> Json {
    let pool = match &encoder.arch {
        Arch::Vit(vit) if vit.pool == Pool::Class => "class",
        _ => "mean",
    };
    json!({
        "autodidact": env!("CARGO_PKG_VERSION"),
        "checkpoint": encoder.origin,
        "architecture": encoder.arch.describe(),
        "weights": encoder.weights.digest(),
        "images": source.fingerprint(),
        "num_images": source.len(),
        "size": encoder.view.size,
        "mean": encoder.view.mean,
        "std": encoder.view.std,
        "pool": pool,
        "device": device,
    })
}

/// Joins the parts; the features come last, so that where they are, everything is.
fn finish(args: &EmbedArgs, container: Container, source: &dyn Source, parts: Parts, job: Json) -> Result<(), Failure> {
    let (mut kept, mut dim, mut unreadable): (Vec<usize>, usize, Vec<NoFeatures>) = (Vec::new(), 0, Vec::new());
    for part in 0..parts.len() {
        let part = parts.get(part)?;
        dim = dim.max(part.dim);
        kept.extend(part.kept);
        unreadable.extend(part.unreadable);
    }
    for bad in unreadable.iter().take(3) {
        say(&format!("warning: {}: {}", source.name(bad.index), bad.reason));
    }
    if kept.is_empty() {
        let text = format!("none of {} can be read", plural(source.len(), "image"));
        return Err(Failure::message(Kind::Failure, text).hint("`autodidact data inspect` says why"));
    }
    let labels: Vec<i64> = kept.iter().map(|&index| source.label(index).map_or(-1, i64::from)).collect();
    let labelled = labels.iter().any(|&label| label >= 0);
    let beside = |end: &str| beside(&args.output, end);
    let images = beside(".images.jsonl");
    write_atomically_with(&images, |file| {
        for (row, (&index, &label)) in kept.iter().zip(&labels).enumerate() {
            let class = usize::try_from(label).ok().and_then(|label| source.classes().get(label));
            let mut line = json!({"row": row, "index": index, "path": source.name(index)});
            if label >= 0 {
                line["label"] = label.into();
                line["class"] = class.map_or(Json::Null, |class| class.as_str().into());
            }
            if let Some(labels) = source.labels(index).filter(|_| source.is_multi_label()) {
                let names = labels.iter().map(|&label| source.classes()[label as usize].as_str());
                line["classes"] = names.collect::<Vec<_>>().into();
            }
            writeln!(file, "{line}").map_err(FileError::at(&images, "write"))?;
        }
        Ok::<(), FileError>(())
    })?;
    let label_file = beside(".labels.npy");
    if labelled && container == Container::Npy {
        write_npy(&label_file, &labels)?;
    } else {
        // of an earlier file of this name, if any
        let _ = fs::remove_file(&label_file);
    }
    let mut about = job;
    about["rows"] = kept.len().into();
    about["dim"] = dim.into();
    about["classes"] = json!(source.classes());
    let named = |bad: &NoFeatures| json!({"index": bad.index, "path": source.name(bad.index), "reason": bad.reason});
    about["unreadable"] = unreadable.iter().map(named).collect();
    write_json(&beside(".json"), &about)?;
    let of_rows: &[i64] = if labelled { &labels } else { &[] };
    join(&parts, &args.output, container, kept.len(), dim, of_rows)?;
    parts.remove();
    print(format_args!("features    {} x {dim}, {}", kept.len(), args.output.display()))?;
    if !unreadable.is_empty() {
        let listed = beside(".json");
        print(format_args!("unreadable  {}, listed in {}", plural(unreadable.len(), "image"), listed.display()))?;
    }
    Ok(())
}

/// `features.npy` to `features.images.jsonl`.
fn beside(output: &Path, end: &str) -> PathBuf {
    let mut name = output.file_stem().unwrap_or_default().to_owned();
    name.push(end);
    output.with_file_name(name)
}
