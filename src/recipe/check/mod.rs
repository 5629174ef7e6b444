//! Values: limits that types cannot express, and what must fit together. All problems are found at once.

mod network;
mod optim;

use super::Recipe;
use super::schema::join;
use crate::augment::ViewConfig;
use crate::data::{DataConfig, SourceKind};
use crate::engine::{BatchConfig, Judged};
use crate::eval::EvalConfig;
use crate::method::Inputs;
use crate::optim::ParameterRule;
use crate::precision::{Compute, OnNonFinite, PrecisionConfig, ScaleConfig};
use crate::problem::{Numbers, Problem};

impl Recipe {
    /// Checks every value and what must fit together; empty when the recipe can be planned.
    pub fn check(&self) -> Vec<Problem> {
        let mut found = Numbers::default();
        self.check_top(&mut found);
        data(&self.data, "data", &mut found);
        for (index, view) in self.views.iter().enumerate() {
            let at = format!("views.{index}");
            let before = found.problems.len();
            check_view(view, &at, &mut found);
            // The augmentation's own checks have the last word, on whatever those above let pass.
            if found.problems.len() == before
                && let Err((key, message)) = view.check()
            {
                let (message, hint) = message.split_once("; ").unwrap_or((&message, ""));
                let problem = Problem::at(join(&at, key), message);
                found.push(if hint.is_empty() { problem } else { problem.hint(hint) });
            }
        }
        network::check(self, &mut found);
        batch(&self.batch, &mut found);
        optim::optimizer(&self.optimizer, &mut found);
        optim::schedule(&self.schedule, &self.optimizer, &mut found);
        optim::parameters(&self.parameters, &mut found);
        eval(&self.eval, &mut found);
        precision(&self.precision, &mut found);
        self.check_supervised(&mut found);
        found.problems
    }

    /// Returns what is different for some parameters: the method's rules, then the recipe's.
    pub fn parameter_rules(&self) -> Vec<ParameterRule> {
        let mut rules = self.method.rules();
        rules.extend_from_slice(&self.parameters);
        rules
    }

    /// Fills in what evaluations are compared by, once it is known whether an image may have several labels.
    ///
    /// # Errors
    /// When they cannot be compared by what is asked for.
    pub fn resolve_metric(&mut self) -> Result<(), Vec<Problem>> {
        let several = self.method.is_multi_label();
        let Some(early) = &mut self.early_stopping else { return Ok(()) };
        let by = *early.metric.get_or_insert(if several { Judged::Map } else { Judged::Top1 });
        let (name, why, other) = match (by, several) {
            (Judged::Top1, true) => ("top1", "an image may have several labels", "map"),
            (Judged::Map, false) => ("map", "each image has one label", "top1"),
            _ => return Ok(()),
        };
        let key = "early_stopping.metric";
        let hint = format!("use \"{other}\" or \"loss\"");
        Err(vec![Problem::at(key, format!("`{key}` is \"{name}\", but {why}")).hint(hint)])
    }

    /// Returns what a network is built for.
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs { backbone: &self.backbone, views: &self.views, global: self.batch.global, micro: self.batch.micro }
    }

    /// Keys that only a supervised run knows what to do with.
    fn check_supervised(&self, found: &mut Numbers) {
        let keys = [
            ("data.label_fraction", self.data.label_fraction.is_some()),
            ("data.validation", self.data.validation.is_some()),
            ("eval.every_epochs", self.eval.every_epochs.is_some()),
            ("early_stopping", self.early_stopping.is_some()),
        ];
        if !self.method.is_supervised() {
            for (key, _) in keys.into_iter().filter(|(_, given)| *given) {
                let message =
                    format!("`{key}` is for runs that learn from labels, and `method.{}` does not", self.method.name());
                found
                    .push(Problem::at(key, message).hint("remove it, or write `[method.classify]` and run `finetune`"));
            }
        }
        if let Some(fraction) = self.data.label_fraction.filter(|fraction| !(*fraction > 0.0 && *fraction <= 1.0)) {
            found.limit("data.label_fraction", fraction, "greater than 0 and at most 1");
        }
        if let Some(share) = self.data.validation.filter(|share| !(*share > 0.0 && *share < 1.0)) {
            found.limit("data.validation", share, "greater than 0 and less than 1");
        }
        if let Some(epochs) = self.eval.every_epochs {
            found.positive("eval.every_epochs", epochs);
        }
        if let Some(early) = &self.early_stopping {
            found.count("early_stopping.patience", early.patience);
            found.positive("early_stopping.every_epochs", early.every_epochs);
            if self.data.validation.is_none() {
                let message = "`early_stopping` needs images that are neither trained nor tested on, and `data.validation` sets none aside";
                found.push(
                    Problem::at("early_stopping", message)
                        .against("data.validation")
                        .hint("set `data.validation = 0.1`"),
                );
            }
            if self.eval.skip {
                let message = "`early_stopping` evaluates, and `eval.skip` is true";
                found.push(Problem::at("early_stopping", message).against("eval.skip").hint("remove one of them"));
            }
        }
        for (key, given) in self.eval.test.iter().flat_map(|test| {
            [("label_fraction", test.label_fraction.is_some()), ("validation", test.validation.is_some())]
        }) {
            if given {
                let key = format!("eval.test.{key}");
                found.push(
                    Problem::at(&key, format!("`{key}` has no effect: all test images are used")).hint("remove it"),
                );
            }
        }
    }

    fn check_top(&self, found: &mut Numbers) {
        if let Some(name) = &self.name {
            let is_folder_name = !["", ".", ".."].contains(&name.as_str());
            if !is_folder_name || name.contains(|c: char| c.is_control() || c == '/' || c == '\\') {
                found.push(
                    Problem::at("name", format!("`name` is {name:?}, which is not a folder name"))
                        .hint("the run is written to `runs/<name>/`; use `--run-dir` to write elsewhere"),
                );
            }
        }
        if i64::try_from(self.seed).is_err() {
            found.push(Problem::at("seed", format!("`seed` is {}, but must be at most {}", self.seed, i64::MAX)));
        }
        if self.views.is_empty() {
            found.push(Problem::at("views", "`views` is empty").hint("write at least one `[[views]]` table"));
        }
        if let Some(ema) = &self.ema {
            found.momentum("ema.momentum", ema.momentum);
        }
        found.count("checkpoint.keep", self.checkpoint.keep);
        found.count("log.every_steps", self.log.every_steps as usize);
    }
}

fn data(data: &DataConfig, at: &str, found: &mut Numbers) {
    if data.source != SourceKind::Sample && data.path.as_ref().is_none_or(|path| path.as_os_str().is_empty()) {
        let source = data.source;
        let what = match source {
            SourceKind::List => "a text file with one image path a line",
            SourceKind::Cifar10 => "the folder with `data_batch_1.bin`",
            SourceKind::Cifar100 => "the folder with `train.bin`",
            SourceKind::Folder | SourceKind::Sample => "a folder of images",
        };
        found.push(
            Problem::at(format!("{at}.source"), format!("`{at}.source = \"{source}\"` needs `{at}.path`, {what}"))
                .hint(format!("add `path = \"...\"` under `[{at}]`, or pass `{at}.path=...`")),
        );
    }
    if let (SourceKind::Sample, Some(path)) = (data.source, &data.path) {
        let message = format!(
            "`{at}.path` is \"{}\", but `{at}.source = \"sample\"` reads the images inside the program",
            path.display()
        );
        found.push(
            Problem::at(join(at, "path"), message)
                .against("data.source")
                .hint(format!("add `{at}.source=folder` (or list, cifar10, cifar100), or remove the path")),
        );
    }
    found.probability(&join(at, "max_bad"), data.max_bad);
    if let Some(limit) = data.limit {
        found.count(&join(at, "limit"), limit);
    }
    found.count(&join(at, "prefetch"), data.prefetch);
    found.count(&join(at, "max_pixels"), data.max_pixels as usize);
    for (channel, (&mean, &std)) in data.mean.iter().zip(&data.std).enumerate() {
        if !mean.is_finite() {
            found.limit(&format!("{at}.mean.{channel}"), mean, "finite");
        }
        found.positive(&format!("{at}.std.{channel}"), f64::from(std));
    }
}

fn check_view(view: &ViewConfig, at: &str, found: &mut Numbers) {
    found.count(&join(at, "count"), view.count);
    found.count(&join(at, "size"), view.size as usize);
    found.probability(&join(at, "flip"), view.flip);
    found.probability(&join(at, "grayscale"), view.grayscale);
    if let Some(crop) = &view.crop {
        let scale = join(at, "crop.scale");
        if found.range(&scale, crop.scale) && crop.scale[1] > 1.0 {
            found.limit(&scale, crop.scale[1], "at most 1, the whole image");
        }
        found.range(&join(at, "crop.ratio"), crop.ratio);
    }
    if let Some(jitter) = &view.jitter {
        found.probability(&join(at, "jitter.prob"), jitter.prob);
        for (name, value) in
            [("brightness", jitter.brightness), ("contrast", jitter.contrast), ("saturation", jitter.saturation)]
        {
            found.not_negative(&join(at, format!("jitter.{name}")), value);
        }
        if !(0.0..=0.5).contains(&jitter.hue) {
            found.limit(&join(at, "jitter.hue"), jitter.hue, "from 0 to 0.5 (half a turn)");
        }
    }
    if let Some(blur) = &view.blur {
        found.probability(&join(at, "blur.prob"), blur.prob);
        found.range(&join(at, "blur.sigma"), blur.sigma);
        if let Some(kernel) = blur.kernel.filter(|kernel| kernel.is_multiple_of(2)) {
            let key = join(at, "blur.kernel");
            let near = if kernel == 0 { "3".to_owned() } else { format!("{} or {}", kernel - 1, kernel + 1) };
            found.push(Problem::at(&key, format!("`{key}` is {kernel}, but must be odd")).hint(format!("use {near}")));
        }
    }
    if let Some(solarize) = &view.solarize {
        found.probability(&join(at, "solarize.prob"), solarize.prob);
    }
    if let Some(erase) = &view.erase {
        found.probability(&join(at, "erase.prob"), erase.prob);
        found.range(&join(at, "erase.area"), erase.area);
    }
}

fn batch(batch: &BatchConfig, found: &mut Numbers) {
    let BatchConfig { global, micro, .. } = *batch;
    let counts = [found.count("batch.global", global), found.count("batch.micro", micro)];
    if counts == [true, true] && !global.is_multiple_of(micro) {
        let problem = Problem::at(
            "batch.micro",
            format!("`batch.micro` is {micro}, which does not divide `batch.global`, {global}"),
        );
        found.push(problem.against("batch.global").hint(batch_hint(global, micro)));
    }
}

fn precision(precision: &PrecisionConfig, found: &mut Numbers) {
    let ScaleConfig { initial, growth, backoff, interval, min } = precision.scale;
    found.positive("precision.scale.min", f64::from(min));
    if !(initial.is_finite() && initial >= min) {
        found.limit("precision.scale.initial", initial, &format!("finite and at least `precision.scale.min`, {min}"));
    }
    if !(growth.is_finite() && growth > 1.0) {
        found.limit("precision.scale.growth", growth, "greater than 1");
    }
    if !(backoff > 0.0 && backoff < 1.0) {
        found.limit("precision.scale.backoff", backoff, "greater than 0 and less than 1");
    }
    if interval == 0 {
        found.limit("precision.scale.interval", interval, "at least 1");
    }
    let key = "precision.on_nonfinite";
    if precision.on_nonfinite == OnNonFinite::FallbackBf16 && precision.compute != Compute::Fp16 {
        let message = format!("`{key}` is \"fallback-bf16\", but only a run in fp16 can fall back to it");
        found.push(Problem::at(key, message).against("precision.compute").hint("use \"stop\" or \"skip\""));
    }
}

/// Names the nearest sizes that fit: of the global batch for this micro-batch, and the other way round.
fn batch_hint(global: usize, micro: usize) -> String {
    let below = global / micro * micro;
    let globals = if below == 0 { micro.to_string() } else { format!("{below} or {}", below.saturating_add(micro)) };
    let smaller = (1..=micro.min(global)).rev().find(|&size| global.is_multiple_of(size));
    let larger = (micro..=global).find(|&size| global.is_multiple_of(size));
    let mut micros: Vec<String> = smaller.into_iter().chain(larger).map(|size| size.to_string()).collect();
    micros.dedup();
    format!("set `batch.global` to {globals}, or `batch.micro` to {}", micros.join(" or "))
}

fn eval(eval: &EvalConfig, found: &mut Numbers) {
    let counted = found.count("eval.k", eval.k);
    found.positive("eval.temperature", eval.temperature);
    found.positive("eval.linear_c", eval.linear_c);
    found.count("eval.max_test", eval.max_test);
    if found.count("eval.max_train", eval.max_train) && counted && eval.k > eval.max_train {
        found.limit("eval.k", eval.k, &format!("at most `eval.max_train`, {}", eval.max_train));
    }
    if let Some(test) = &eval.test {
        data(test, "eval.test", found);
    }
}
