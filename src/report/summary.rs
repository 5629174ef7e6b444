//! The end of a run: what was reached, where it lies and what to do next.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::progress::{duration, short};
use crate::eval::{Classification, Classified, MultiLabel, Warning};
use crate::files::{FileError, write_json};

/// What a run reached. Shown as an aligned block of text, written as `summary.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Run folder.
    pub run: PathBuf,
    /// Optimizer steps done.
    pub steps: u64,
    /// Optimizer steps of the whole run.
    pub total_steps: u64,
    /// Images seen since the start of the run.
    pub images: u64,
    /// Seconds that this process trained.
    pub seconds: f64,
    /// Images per second of this process, over all its steps.
    pub images_per_s: f64,
    /// Loss of the first step.
    pub first_loss: Option<f32>,
    /// Loss of the last step.
    pub last_loss: Option<f32>,
    /// What products computed in, where that is not fp32.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute: Option<&'static str>,
    /// Scale of the loss at the end, in fp16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f32>,
    /// Attempts at a step that overflowed in fp16 and were made again.
    pub overflows: u64,
    /// Steps that were not finite and moved nothing.
    pub skipped_steps: u64,
    /// Steps in fp16 before the run fell back to bf16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fell_back_after: Option<u64>,
    /// Weights that the run started from, if it did not start from drawn ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<String>,
    /// Command of the run.
    #[serde(skip)]
    pub task: &'static str,
    /// Classification of images held out, by a supervised run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classification: Option<Classified>,
    /// Step of the weights that were evaluated, where a run may stop early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_step: Option<u64>,
    /// Nearest-neighbour classification; absent without labels or when skipped.
    pub knn: Option<KnnResult>,
    /// Linear classification; absent without labels or when skipped.
    pub linear: Option<LinearResult>,
    /// Embedding standard deviation.
    pub embedding_std: Option<f64>,
    /// `RankMe`.
    pub rankme: Option<f64>,
    /// Width of the features.
    pub dim: usize,
    /// Images that could not be read and were substituted.
    pub bad_images: u64,
    /// Processes of the run, each of which lists those that it met.
    #[serde(skip)]
    pub bad_image_lists: usize,
    /// What a user should look at.
    pub warnings: Vec<Warning>,
    /// Command that goes on with an unfinished run.
    pub resume_command: String,
}

/// Result of nearest-neighbour classification, as fractions.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KnnResult {
    /// Neighbours that voted.
    pub k: usize,
    /// Temperature of the votes.
    pub temperature: f64,
    /// Images of the bank.
    pub bank: usize,
    /// Images that were classified.
    pub queries: usize,
    /// Classes.
    pub classes: usize,
    /// Accuracy.
    pub top1: f64,
    /// Fraction with the label among the five classes with most votes.
    pub top5: f64,
    /// Accuracy of the same network before training.
    pub untrained_top1: Option<f64>,
    /// Accuracy of always answering the most frequent class.
    pub chance: f64,
}

/// Result of a linear classifier on the features, as fractions.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LinearResult {
    /// Weight of the data against the penalty.
    pub c: f64,
    /// Images it was trained on.
    pub train: usize,
    /// Images that were classified.
    pub queries: usize,
    /// Accuracy.
    pub top1: f64,
    /// Accuracy on the features of the same network before training.
    pub untrained_top1: Option<f64>,
}

/// What a network is called before it was trained.
fn before(init: Option<&str>) -> (&'static str, String) {
    match init {
        None => ("  untrained", "the same network before training".to_owned()),
        Some(from) => ("  before", format!("the same network as {from} gave it")),
    }
}

impl LinearResult {
    fn lines(&self, init: Option<&str>) -> Vec<(&'static str, String)> {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let of = format!("{} images, trained on {}, C {}", self.queries, self.train, self.c);
        let mut lines = vec![("linear top-1", format!("{} ({of})", percent(self.top1)))];
        if let Some(untrained) = self.untrained_top1 {
            let (label, what) = before(init);
            lines.push((label, format!("{} ({what})", percent(untrained))));
        }
        lines
    }
}

impl Summary {
    /// Writes `summary.json` into the run folder.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn write(&self) -> Result<(), FileError> {
        #[derive(Serialize)]
        struct Event<'a> {
            event: &'static str,
            #[serde(flatten)]
            summary: &'a Summary,
        }
        let event = Event { event: "summary", summary: self };
        write_json(&self.run.join("summary.json"), &event)
    }

    /// Returns what was measured, without the story of the run around it.
    #[must_use]
    pub fn measurements(&self) -> String {
        let mut lines =
            vec![("checkpoint", format!("{} (step {} of {})", self.run.display(), self.steps, self.total_steps))];
        lines.extend(self.measured());
        let lines = lines.iter().map(|(label, text)| format!("{label:<14} {text}"));
        lines.chain(self.warnings.iter().map(ToString::to_string)).collect::<Vec<_>>().join("\n")
    }

    fn measured(&self) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        if let Some(result) = &self.classification {
            lines.extend(match result {
                Classified::One(result) => classified(result),
                Classified::Several(result) => told(result),
            });
        }
        if let Some(step) = self.best_step {
            lines.push(("  weights of", format!("step {step}, the best on the validation images")));
        }
        if let Some(knn) = &self.knn {
            lines.extend(knn.lines(self.init.as_deref()));
        }
        if let Some(linear) = &self.linear {
            lines.extend(linear.lines(self.init.as_deref()));
        }
        if let Some(std) = self.embedding_std {
            let healthy = 1.0 / (self.dim as f64).sqrt();
            lines.push(("embedding std", format!("{std:.4} (healthy about {healthy:.4}, collapsed 0)")));
        }
        if let Some(rankme) = self.rankme {
            lines.push(("RankMe", format!("{rankme:.1} of {}", self.dim)));
        }
        lines
    }

    /// Says what was computed in, and what that took; nothing for a run in fp32 without incidents.
    fn precision(&self) -> Option<String> {
        let compute = self.compute.or((self.skipped_steps > 0).then_some("fp32"))?;
        let fell_back = self.fell_back_after.map(|step| format!("up to step {step}, then bf16"));
        let scale = self.loss_scale.map(|scale| format!("loss scale {scale}"));
        let again = (self.overflows > 0).then(|| format!("{} overflowed", counted(self.overflows, "attempt")));
        let skipped =
            (self.skipped_steps > 0).then(|| format!("{} moved nothing", counted(self.skipped_steps, "step")));
        let all = [Some(compute.to_owned()), fell_back, scale, again, skipped];
        Some(all.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }

    /// Returns the block as pairs of label and text.
    fn lines(&self) -> Vec<(&'static str, String)> {
        let finished = self.steps >= self.total_steps || self.classification.is_some();
        let mut lines = Vec::new();
        let state =
            if finished { String::new() } else { format!(", stopped at step {} of {}", self.steps, self.total_steps) };
        lines.push(("run", format!("{}{state}", self.run.display())));
        let (time, rate) = (duration(self.seconds), short(self.images_per_s));
        lines.push(("training", format!("{} steps, {} images; {time} at {rate} images/s", self.steps, self.images)));
        if let (Some(first), Some(last)) = (self.first_loss, self.last_loss) {
            lines.push(("loss", format!("{last:.4} (first step {first:.4})")));
        }
        lines.extend(self.precision().map(|text| ("precision", text)));
        lines.extend(self.measured());
        if self.bad_images > 0 {
            let lists = if self.bad_image_lists > 1 { "bad-images*.jsonl" } else { "bad-images.jsonl" };
            lines.push(("bad images", format!("{} replaced, see {lists}", self.bad_images)));
        }
        let tables = match self.classification {
            Some(Classified::One(_)) => ", classes.csv, confusion.csv",
            Some(Classified::Several(_)) => ", classes.csv",
            None => "",
        };
        lines.push(("files", format!("metrics.jsonl, summary.json{tables}, plan.toml, checkpoints/latest")));
        let run = quoted(&self.run);
        let next = match self.classification {
            Some(_) => format!("autodidact predict {run} IMAGES --output predictions.csv"),
            None => format!("autodidact eval knn {run}"),
        };
        lines.push(("next", if finished { next } else { self.resume_command.clone() }));
        lines
    }
}

fn counted(count: u64, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

fn classified(result: &Classification) -> Vec<(&'static str, String)> {
    let percent = |fraction: f64| format!("{:5.1} %", 100.0 * fraction);
    let classes = result.classes.len();
    let mut lines = vec![(
        "top-1",
        format!("{} ({} {} images, {classes} classes)", percent(result.top1), result.images, result.on),
    )];
    if classes > 5 {
        lines.push(("top-5", percent(result.top5)));
    }
    lines.push(("  chance", percent(result.chance)));
    lines.push(("macro F1", percent(result.macro_f1)));
    lines.push((
        "calibration",
        format!("{} expected calibration error, mean loss {:.4}", percent(result.calibration_error), result.loss),
    ));
    lines
}

fn told(result: &MultiLabel) -> Vec<(&'static str, String)> {
    let percent = |fraction: f64| format!("{:5.1} %", 100.0 * fraction);
    let classes = result.classes.len();
    let mut lines = vec![(
        "mean AP",
        format!(
            "{} ({} {} images, {classes} classes, several an image)",
            percent(result.mean_average_precision),
            result.images,
            result.on
        ),
    )];
    lines.push(("  chance", percent(result.chance)));
    lines.extend(result.mean_auroc.map(|auroc| ("mean AUROC", percent(auroc))));
    lines.push(("micro F1", percent(result.micro_f1)));
    lines.push(("macro F1", percent(result.macro_f1)));
    lines.push(("exact match", format!("{}, mean loss {:.4}", percent(result.exact_match), result.loss)));
    lines
}

impl KnnResult {
    fn lines(&self, init: Option<&str>) -> Vec<(&'static str, String)> {
        let percent = |fraction: f64| format!("{:5.1} %", 100.0 * fraction);
        let Self { k, temperature, bank, queries, classes, .. } = self;
        let how = format!("(k {k}, T {temperature}, {queries} images against {bank}, {classes} classes)");
        let mut lines = vec![("kNN top-1", format!("{} {how}", percent(self.top1)))];
        if let Some(untrained) = self.untrained_top1 {
            let gain = 100.0 * (self.top1 - untrained);
            lines.push((before(init).0, format!("{} ({gain:+.1} points by training)", percent(untrained))));
        }
        lines.push(("  chance", percent(self.chance)));
        if *classes > 5 {
            lines.push(("kNN top-5", percent(self.top5)));
        }
        lines
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (label, text) in self.lines() {
            writeln!(f, "{label:<14} {text}")?;
        }
        self.warnings.iter().try_for_each(|warning| writeln!(f, "{warning}"))
    }
}

/// Quotes a path for a shell when it needs it.
#[must_use]
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@,".contains(c);
    if !text.is_empty() && text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::health;

    fn summary() -> Summary {
        Summary {
            run: PathBuf::from("runs/simclr"),
            steps: 1200,
            total_steps: 1200,
            images: 76_800,
            seconds: 192.4,
            images_per_s: 399.2,
            first_loss: Some(6.2383),
            last_loss: Some(4.81234),
            knn: Some(KnnResult {
                k: 20,
                temperature: 0.07,
                bank: 2000,
                queries: 500,
                classes: 10,
                top1: 0.523,
                top5: 0.91,
                untrained_top1: Some(0.31),
                chance: 0.1,
            }),
            embedding_std: Some(0.0391),
            rankme: Some(214.33),
            dim: 512,
            resume_command: "autodidact pretrain recipes/simclr.toml".to_owned(),
            ..Summary::default()
        }
    }

    #[test]
    fn a_finished_run() {
        let expected = "\
run            runs/simclr
training       1200 steps, 76800 images; 3m12s at 399 images/s
loss           4.8123 (first step 6.2383)
kNN top-1       52.3 % (k 20, T 0.07, 500 images against 2000, 10 classes)
  untrained     31.0 % (+21.3 points by training)
  chance        10.0 %
kNN top-5       91.0 %
embedding std  0.0391 (healthy about 0.0442, collapsed 0)
RankMe         214.3 of 512
files          metrics.jsonl, summary.json, plan.toml, checkpoints/latest
next           autodidact eval knn runs/simclr
";
        assert_eq!(summary().to_string(), expected);
    }

    #[test]
    fn an_interrupted_and_collapsed_run_without_labels() {
        let stopped = Summary {
            steps: 500,
            knn: None,
            bad_images: 3,
            bad_image_lists: 1,
            embedding_std: Some(0.0001),
            rankme: Some(1.0),
            warnings: health(0.0001, 1.0, 512),
            ..summary()
        };
        let text = stopped.to_string();
        assert!(text.starts_with("run            runs/simclr, stopped at step 500 of 1200\n"), "{text}");
        assert!(text.contains("next           autodidact pretrain recipes/simclr.toml\n"), "{text}");
        assert!(text.contains("bad images     3 replaced") && text.contains("warning[collapse]: "), "{text}");
        assert!(!text.contains("kNN"), "{text}");
    }

    #[test]
    fn written_as_one_object_and_paths_are_quoted() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("it's a run");
        std::fs::create_dir(&run).unwrap();
        let summary = Summary { run: run.clone(), last_loss: Some(f32::NAN), ..summary() };
        summary.write().unwrap();
        let text = std::fs::read_to_string(run.join("summary.json")).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&value["event"], &value["knn"]["top1"]), (&"summary".into(), &0.523.into()));
        assert!(value["last_loss"].is_null());
        assert!(summary.to_string().contains(r"it'\''s a run'"), "{summary}");
    }
}
