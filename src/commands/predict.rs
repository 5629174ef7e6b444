//! `autodidact predict`: the classes of images in a file.

use std::path::Path;

use burn::tensor::Tensor;
use serde_json::{Value as Json, json};

use super::embed::{Work, check_output, open};
use super::{eval, print, say};
use crate::backend;
use crate::cli::PredictArgs;
use crate::data::Source;
use crate::engine::EngineError;
use crate::error::{Failure, Kind};
use crate::eval::{Classification, EvalView, MultiLabel, Part, Parts};
use crate::files::{FileError, write_atomically_with};
use crate::method::{Learner, MethodConfig};
use crate::model::params::Flat;
use crate::model::{Pass, Scope};
use crate::ops;
use crate::recipe::{self, Recipe, plural};
use crate::report::csv_field;

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Csv,
    Jsonl,
}

impl Format {
    fn of(path: &Path) -> Result<Self, Failure> {
        match path.extension().and_then(|end| end.to_str()).map(str::to_ascii_lowercase).as_deref() {
            Some("csv") => Ok(Self::Csv),
            Some("jsonl" | "ndjson") => Ok(Self::Jsonl),
            _ => {
                let text = format!("{}: predictions are written to .csv or .jsonl", path.display());
                Err(Failure::message(Kind::Usage, text).hint("both have a line for each image"))
            }
        }
    }
}

/// A trained classifier.
struct Classifier {
    recipe: Recipe,
    weights: Vec<f32>,
    buffers: Vec<f32>,
    classes: Vec<String>,
    /// An image may have several classes.
    several: bool,
    origin: String,
}

impl Classifier {
    fn open(target: &Path) -> Result<Self, Failure> {
        if !target.exists() {
            let text = format!("{}: there is nothing of that name", target.display());
            return Err(
                Failure::message(Kind::Usage, text).hint("give the run folder of a `finetune`, or a checkpoint in one")
            );
        }
        let (folder, path) = eval::find(target)?;
        let recipe = recipe::load(&folder.join("plan.toml"), &[])?.recipe;
        let MethodConfig::Classify(config) = &recipe.method else {
            let text = format!("{}: `{}` knows no classes", target.display(), recipe.method.name());
            return Err(Failure::message(Kind::Usage, text)
                .hint("teach it some with `autodidact finetune`; `autodidact embed` writes its features"));
        };
        let (classes, several) = (config.classes.clone(), recipe.method.is_multi_label());
        ops::configure(recipe.ops);
        let learner = recipe
            .method
            .build(&recipe.inputs(), &Scope::new(recipe.seed, &backend::host()))
            .map_err(EngineError::from)?;
        let found = eval::result(target, &folder, &path, &recipe, learner.as_ref())?;
        let origin = format!("{} ({}, step {})", target.display(), found.what, found.step);
        if found.weights.iter().chain(&found.buffers).any(|value| !value.is_finite()) {
            let text = format!("{}: its weights are not finite", target.display());
            return Err(Failure::message(Kind::Failure, text).hint("use an earlier checkpoint"));
        }
        Ok(Self { weights: found.weights, buffers: found.buffers, classes, several, origin, recipe })
    }

    /// Tells how probable each class is.
    fn probabilities(&self, logits: &[f32]) -> Vec<f64> {
        let logits = logits.iter().map(|&logit| f64::from(logit));
        if self.several {
            return logits.map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
        }
        let largest = logits.clone().fold(f64::NEG_INFINITY, f64::max);
        let shares: Vec<f64> = logits.map(|logit| (logit - largest).exp()).collect();
        let sum: f64 = shares.iter().sum();
        shares.into_iter().map(|share| share / sum).collect()
    }

    /// Returns the classes from the most probable on; of equal ones the smaller one first.
    fn ranked(probabilities: &[f64]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..probabilities.len()).collect();
        order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
        order
    }

    /// Returns the classes that the images of a source have, as this network numbers them; nothing where the source has no label, or one that the network lacks.
    fn labels(&self, source: &dyn Source, kept: &[usize]) -> Option<Vec<Vec<u32>>> {
        let number = |name: &String| self.classes.iter().position(|class| class == name).map(|at| at as u32);
        let numbers: Vec<u32> = source.classes().iter().map(number).collect::<Option<_>>()?;
        let of = |&index: &usize| -> Option<Vec<u32>> {
            source.labels(index)?.into_iter().map(|label| numbers.get(label as usize).copied()).collect()
        };
        let labels: Vec<Vec<u32>> = kept.iter().map(of).collect::<Option<_>>()?;
        (self.several || labels.iter().all(|labels| labels.len() == 1)).then_some(labels)
    }
}

pub(super) fn run(args: &PredictArgs) -> Result<(), Failure> {
    let format = Format::of(&args.output)?;
    check_output(&args.output, args.force)?;
    let classifier = Classifier::open(&args.run)?;
    if args.threshold.is_some() && !classifier.several {
        let text = "`--threshold` is for networks that tell several labels an image; this one tells one";
        return Err(Failure::message(Kind::Usage, text).hint("use `--top` for more than the most probable class"));
    }
    if args.top.is_some() && classifier.several {
        let text = "`--top` is for networks that tell one label an image; this one tells several";
        return Err(Failure::message(Kind::Usage, text).hint("the file has the probability of each class anyway"));
    }
    let chosen = backend::choose(args.images.device).map_err(|error| Failure::new(Kind::Usage, error))?;
    if let Some(note) = &chosen.note {
        say(&format!("note: {note}"));
    }
    let source = open(&args.images)?;
    let job = describe(&classifier, source.as_ref(), &chosen.description);
    let parts = Parts::open(&args.output, &job, source.len(), args.force)?;
    let recipe = &classifier.recipe;
    let size = recipe.views.first().map_or(0, |view| view.size);
    let view = EvalView { size, mean: recipe.data.mean, std: recipe.data.std };
    let build = || -> Result<Box<dyn FnMut(Tensor<4>) -> Tensor<2>>, EngineError> {
        let scope = Scope::new(recipe.seed, &chosen.device);
        let mut learner: Box<dyn Learner> = recipe.method.build(&recipe.inputs(), &scope)?;
        learner.set(&Flat::upload(classifier.weights.clone(), classifier.buffers.clone(), &chosen.device));
        Ok(Box::new(move |images| learner.scores(images, &mut Pass::eval()).expect("a classifier scores classes")))
    };
    let work = Work { what: "score", images: &args.images, view, device: &chosen.device };
    work.fill(&parts, source.as_ref(), build)?;
    finish(args, format, &classifier, source.as_ref(), parts)
}

/// What the scores are a function of; parts of another job are not gone on with.
fn describe(classifier: &Classifier, source: &dyn Source, device: &str) -> Json {
    let mut digest = blake3::Hasher::new();
    classifier.weights.iter().chain(&classifier.buffers).for_each(|value| {
        digest.update(&value.to_le_bytes());
    });
    let recipe = &classifier.recipe;
    json!({
        "autodidact": env!("CARGO_PKG_VERSION"),
        "checkpoint": classifier.origin,
        "weights": digest.finalize().to_hex().to_string(),
        "classes": classifier.classes,
        "images": source.fingerprint(),
        "num_images": source.len(),
        "size": recipe.views.first().map_or(0, |view| view.size),
        "mean": recipe.data.mean,
        "std": recipe.data.std,
        "device": device,
    })
}

/// Writes all lines; the file is there whole or not at all.
fn finish(
    args: &PredictArgs,
    format: Format,
    classifier: &Classifier,
    source: &dyn Source,
    parts: Parts,
) -> Result<(), Failure> {
    let read: Vec<Part> = (0..parts.len()).map(|part| parts.get(part)).collect::<Result<_, _>>()?;
    let kept: Vec<usize> = read.iter().flat_map(|part| part.kept.iter().copied()).collect();
    let logits: Vec<f32> = read.iter().flat_map(|part| part.values.iter().copied()).collect();
    let bad: Vec<(usize, &str)> =
        read.iter().flat_map(|part| part.unreadable.iter().map(|bad| (bad.index, bad.reason.as_str()))).collect();
    for (index, reason) in bad.iter().take(3) {
        say(&format!("warning: {}: {reason}", source.name(*index)));
    }
    if kept.is_empty() {
        let text = format!("none of {} can be read", plural(source.len(), "image"));
        return Err(Failure::message(Kind::Failure, text).hint("`autodidact data inspect` says why"));
    }
    let labels = classifier.labels(source, &kept);
    let lines = Lines {
        classifier,
        source,
        top: args.top.map_or(1, usize::from).min(classifier.classes.len()),
        threshold: args.threshold.unwrap_or(0.5),
        labels: labels.as_deref(),
    };
    let scores = logits.chunks_exact(classifier.classes.len());
    let (mut rows, mut unreadable) = (kept.iter().zip(scores).enumerate().peekable(), bad.iter().peekable());
    write_atomically_with(&args.output, |file| {
        if format == Format::Csv {
            writeln!(file, "{}", lines.columns().join(",")).map_err(FileError::at(&args.output, "write"))?;
        }
        // both are in the order of the source
        for index in 0..source.len() {
            let line = if let Some((row, (_, logits))) = rows.next_if(|(_, (kept, _))| **kept == index) {
                lines.of(format, index, row, &classifier.probabilities(logits))
            } else if let Some((_, reason)) = unreadable.next_if(|(bad, _)| *bad == index) {
                lines.unreadable(format, index, reason)
            } else {
                unreachable!("a part has each of its images: `Parts::get`")
            };
            writeln!(file, "{line}").map_err(FileError::at(&args.output, "write"))?;
        }
        Ok::<(), FileError>(())
    })?;
    parts.remove();
    print(format_args!("images      {}, {}", kept.len(), args.output.display()))?;
    print(format_args!("network     {}", classifier.origin))?;
    if !bad.is_empty() {
        print(format_args!("unreadable  {}, with their reasons in the file", plural(bad.len(), "image")))?;
    }
    if let Some(labels) = labels {
        print(judged(classifier, logits, &labels)?)?;
    }
    Ok(())
}

/// Says how right the predictions are, where the images have labels that the network knows.
fn judged(classifier: &Classifier, logits: Vec<f32>, labels: &[Vec<u32>]) -> Result<String, Failure> {
    let classes = classifier.classes.len();
    let failed = |error| Failure::new(Kind::Failure, EngineError::from(error));
    if classifier.several {
        let result = MultiLabel::of("given", logits, classes, labels).map_err(failed)?;
        return Ok(format!("mean AP     {:.1} % of their labels", 100.0 * result.mean_average_precision));
    }
    let labels: Vec<u32> = labels.iter().map(|labels| labels[0]).collect();
    let result = Classification::of("given", logits, classes, &labels).map_err(failed)?;
    Ok(format!("top-1       {:.1} % of their labels", 100.0 * result.top1))
}

/// The lines of the file.
struct Lines<'a> {
    classifier: &'a Classifier,
    source: &'a dyn Source,
    /// Classes of a line.
    top: usize,
    /// Probability from which a class is told, where an image may have several.
    threshold: f64,
    /// Classes of each readable image, if they are known.
    labels: Option<&'a [Vec<u32>]>,
}

impl Lines<'_> {
    fn columns(&self) -> Vec<String> {
        let mut columns = vec!["path".to_owned()];
        if self.classifier.several {
            columns.push("classes".to_owned());
            // marked, so that no class is taken for another column
            columns.extend(self.classifier.classes.iter().map(|class| csv_field(&format!("p:{class}"))));
        } else {
            columns.extend(["class", "probability"].map(str::to_owned));
            for place in 2..=self.top {
                columns.extend([format!("class_{place}"), format!("probability_{place}")]);
            }
        }
        columns.extend(self.labels.map(|_| "label".to_owned()));
        columns.push("error".to_owned());
        columns
    }

    fn told(&self, probabilities: &[f64]) -> Vec<usize> {
        (0..probabilities.len()).filter(|&class| probabilities[class] >= self.threshold).collect()
    }

    fn names(&self, classes: impl IntoIterator<Item = usize>) -> Vec<&str> {
        classes.into_iter().map(|class| self.classifier.classes[class].as_str()).collect()
    }

    fn of(&self, format: Format, index: usize, row: usize, probabilities: &[f64]) -> String {
        let name = self.source.name(index);
        let ranked = Classifier::ranked(probabilities);
        let label = self.labels.map(|labels| self.names(labels[row].iter().map(|&label| label as usize)));
        if format == Format::Jsonl {
            let mut line = json!({"path": name, "index": index});
            if self.classifier.several {
                line["classes"] = json!(self.names(self.told(probabilities)));
                let each = self.classifier.classes.iter().zip(probabilities);
                line["probabilities"] = each.map(|(class, &p)| (class.clone(), json!(p))).collect();
                line["labels"] = json!(label);
            } else {
                let of = |&class: &usize| json!({"class": self.classifier.classes[class], "probability": probabilities[class]});
                line["class"] = self.classifier.classes[ranked[0]].as_str().into();
                line["probability"] = probabilities[ranked[0]].into();
                if self.top > 1 {
                    line["top"] = ranked[..self.top].iter().map(of).collect();
                }
                line["label"] = json!(label.map(|label| label[0]));
            }
            for unknown in ["label", "labels"] {
                if line.get(unknown).is_some_and(Json::is_null)
                    && let Some(line) = line.as_object_mut()
                {
                    line.remove(unknown);
                }
            }
            return line.to_string();
        }
        let mut fields = vec![csv_field(&name)];
        if self.classifier.several {
            fields.push(csv_field(&self.names(self.told(probabilities)).join("|")));
            fields.extend(probabilities.iter().map(ToString::to_string));
        } else {
            for &class in &ranked[..self.top] {
                fields.extend([csv_field(&self.classifier.classes[class]), probabilities[class].to_string()]);
            }
        }
        fields.extend(label.map(|label| csv_field(&label.join("|"))));
        fields.push(String::new());
        fields.join(",")
    }

    fn unreadable(&self, format: Format, index: usize, reason: &str) -> String {
        let name = self.source.name(index);
        if format == Format::Jsonl {
            return json!({"path": name, "index": index, "error": reason}).to_string();
        }
        let empty = self.columns().len() - 2; // all but path and error
        format!("{}{},{}", csv_field(&name), ",".repeat(empty), csv_field(reason))
    }
}
