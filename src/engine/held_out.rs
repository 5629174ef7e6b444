//! Classification of images that nothing was learnt from: at the end, on a schedule, and to stop early.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn::tensor::Device;

use super::config::{EarlyStoppingConfig, Judged};
use super::error::EngineError;
use super::evaluate::{same_classes, shuffle};
use crate::checkpoint;
use crate::data::{Error as DataError, Source, Split};
use crate::eval::{Classification, Classified, EvalView, Extracted, MultiLabel, extract};
use crate::method::Learner;
use crate::model::params::Flat;
use crate::model::{Kind, Pass};
use crate::ops;
use crate::plan::Plan;
use crate::recipe::Recipe;
use crate::report::{EvaluationLog, EvaluationRecord};

/// The weights with the best evaluation, where a run may stop early.
const BEST: &str = "best.safetensors";

/// Images of a source, by index.
type Images = (Arc<dyn Source>, Vec<usize>);

/// Labelled images that a run does not learn from.
pub struct HeldOut {
    test: Option<Images>,
    validation: Option<Images>,
    max_scheduled: usize,
}

impl HeldOut {
    /// Chooses the images: `eval.test`, else the source's own test split; and what was set aside for validation.
    ///
    /// `whole` is the training split as it was opened, before a part of it was chosen.
    ///
    /// # Errors
    /// When there is neither, they are the training images, have other classes, or cannot be opened.
    pub fn choose(
        recipe: &Recipe,
        whole: &Arc<dyn Source>,
        validation: Option<&Arc<dyn Source>>,
    ) -> Result<Self, EngineError> {
        let labelled = |source: Arc<dyn Source>| -> Images {
            let indices = (0..source.len()).filter(|&index| source.labels(index).is_some()).collect();
            (source, indices)
        };
        let test = match &recipe.eval.test {
            Some(config) => Some(crate::data::open_test(config)?),
            None => match crate::data::open(&recipe.data, Split::Test) {
                Ok(test) => Some(test).filter(|test| test.fingerprint() != whole.fingerprint()),
                Err(DataError::NoTestSplit { .. }) => None,
                Err(error) => return Err(error.into()),
            },
        };
        if let Some(test) = &test {
            if test.fingerprint() == whole.fingerprint() {
                return Err(EngineError::TestIsTraining);
            }
            same_classes(test.classes(), whole.classes())?;
            let several = recipe.method.is_multi_label() || whole.is_multi_label();
            if test.is_multi_label() && !several {
                return Err(EngineError::TestIsMultiLabel);
            }
        }
        let test = test.map(labelled).filter(|(_, indices)| !indices.is_empty());
        let validation = validation.cloned().map(labelled).filter(|(_, indices)| !indices.is_empty());
        if test.is_none() && validation.is_none() {
            return Err(EngineError::NothingHeldOut);
        }
        Ok(Self { test, validation, max_scheduled: recipe.eval.max_test })
    }

    /// Says what is evaluated on, in words.
    #[must_use]
    pub fn note(&self) -> String {
        match (&self.test, &self.validation) {
            (Some(_), Some((_, aside))) => {
                format!("{} training images are set aside: evaluated on while training", aside.len())
            }
            (Some((_, test)), None) if test.len() > self.max_scheduled => {
                let most = self.max_scheduled;
                format!(
                    "while training at most {most} test images are classified (`eval.max_test`), all {} at the end",
                    test.len()
                )
            }
            (Some((_, test)), None) => format!("{} test images are classified", test.len()),
            (None, Some((_, aside))) => {
                format!(
                    "there are no test images: the {} training images set aside are classified at the end, too",
                    aside.len()
                )
            }
            (None, None) => String::new(),
        }
    }

    /// Classifies what training is watched by: the validation images, else at most `eval.max_test` test images.
    pub(super) fn watch(
        &self,
        plan: &Plan,
        weights: (&[f32], &[f32]),
        device: &Device,
        threads: usize,
    ) -> Result<Classified, EngineError> {
        // never interrupted: the run would go on behind it without
        let never = AtomicBool::new(false);
        match (&self.validation, &self.test) {
            (Some(images), _) => classify(plan, "validation", images, weights, device, threads, &never),
            (None, Some((source, indices))) => {
                let mut some = indices.clone();
                shuffle(1, &mut some);
                some.truncate(self.max_scheduled);
                some.sort_unstable();
                classify(plan, "test", &(Arc::clone(source), some), weights, device, threads, &never)
            }
            (None, None) => Err(EngineError::NothingHeldOut),
        }
    }

    /// Classifies all test images, or those set aside where there are none.
    ///
    /// # Errors
    /// When the network cannot be built, its scores are not finite, or `stop` was set meanwhile.
    pub fn finish(
        &self,
        plan: &Plan,
        weights: (&[f32], &[f32]),
        device: &Device,
        threads: usize,
        stop: &AtomicBool,
    ) -> Result<Classified, EngineError> {
        match (&self.test, &self.validation) {
            (Some(images), _) => classify(plan, "test", images, weights, device, threads, stop),
            (None, Some(images)) => classify(plan, "validation", images, weights, device, threads, stop),
            (None, None) => Err(EngineError::NothingHeldOut),
        }
    }
}

fn classify(
    plan: &Plan,
    on: &'static str,
    (source, indices): &Images,
    (weights, buffers): (&[f32], &[f32]),
    device: &Device,
    threads: usize,
    stop: &AtomicBool,
) -> Result<Classified, EngineError> {
    let recipe = &plan.recipe;
    ops::configure(recipe.ops);
    let size = recipe.views.first().map_or(0, |view| view.size);
    let view = EvalView { size, mean: recipe.data.mean, std: recipe.data.std };
    let build = || -> Result<Box<dyn FnMut(_) -> _>, EngineError> {
        let mut learner = recipe.method.build(&recipe.inputs(), &plan.scope(device))?;
        learner.set(&Flat::upload(weights.to_vec(), buffers.to_vec(), device));
        Ok(Box::new(move |images| {
            learner.scores(images, &mut Pass::eval()).expect("a supervised method scores classes: `Recipe::check`")
        }))
    };
    let Extracted { values, dim, kept, .. } =
        extract(source.as_ref(), indices, view, device, threads, stop, build)?.ok_or(EngineError::Stopped)?;
    let labels: Vec<Vec<u32>> = kept.iter().map(|&index| source.labels(index).unwrap_or_default()).collect();
    if recipe.method.is_multi_label() {
        return Ok(Classified::Several(MultiLabel::of(on, values, dim, &labels)?));
    }
    let labels: Vec<u32> = labels.iter().map(|labels| labels.first().copied().unwrap_or(0)).collect();
    Ok(Classified::One(Classification::of(on, values, dim, &labels)?))
}

/// Whether a run has gone on for long enough without becoming better.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Verdict {
    /// The last evaluation is the best one.
    pub(super) improved: bool,
    /// There is no use in going on.
    pub(super) ended: bool,
    /// Step of the best one.
    pub(super) best: Option<u64>,
}

/// Judges all evaluations so far; of equal ones the first is the best.
pub(super) fn judge(config: &EarlyStoppingConfig, records: &[EvaluationRecord]) -> Verdict {
    let value = |record: &EvaluationRecord| match config.metric {
        Some(Judged::Map) => record.mean_average_precision.unwrap_or(0.0),
        Some(Judged::Loss) => -record.loss,
        Some(Judged::Top1) | None => record.top1.unwrap_or(0.0),
    };
    let mut best = None;
    for (index, record) in records.iter().enumerate() {
        if best.is_none_or(|best: usize| value(record) > value(&records[best])) {
            best = Some(index);
        }
    }
    let Some(at) = best else { return Verdict::default() };
    let since = records.len() - 1 - at;
    Verdict { improved: since == 0, ended: since >= config.patience, best: Some(records[at].step) }
}

/// Writes the weights of the best evaluation beside the checkpoints.
pub(super) fn keep_best(
    folder: &Path,
    learner: &crate::model::params::Layout,
    weights: &[f32],
    buffers: &[f32],
) -> Result<(), EngineError> {
    let tensors = learner.entries().iter().map(|entry| {
        let values = if entry.kind == Kind::Trained { weights } else { buffers };
        (entry.path.clone(), (entry.shape.clone(), values[entry.range()].to_vec()))
    });
    let path = folder.join(BEST);
    let bytes = checkpoint::encode_tensors(&tensors.collect()).map_err(crate::files::FileError::at(&path, "encode"))?;
    Ok(crate::files::write_atomically(&path, &bytes)?)
}

/// Returns the step of the best evaluation of a run that may stop early, if its weights are there.
///
/// # Errors
/// When its evaluations cannot be read.
pub fn best_step(folder: &Path, config: &EarlyStoppingConfig) -> Result<Option<u64>, EngineError> {
    if !folder.join(BEST).is_file() {
        return Ok(None);
    }
    Ok(judge(config, EvaluationLog::open(folder, u64::MAX)?.records()).best)
}

/// Reads the weights of the best evaluation of a run: trained and untrained values in flat order.
///
/// # Errors
/// When the file is missing, or of another network.
pub fn best_weights(folder: &Path, learner: &dyn Learner) -> Result<(Vec<f32>, Vec<f32>), EngineError> {
    let path = folder.join(BEST);
    let tensors = checkpoint::read_tensors(&path)?;
    let tensors = tensors.into_iter().map(|(name, (_, values))| (name, values)).collect();
    learner.layout().collect(&tensors).map_err(|error| {
        checkpoint::CheckpointError::OtherNetwork { path: path.clone(), reason: error.to_string() }.into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(tops: &[f64]) -> Vec<EvaluationRecord> {
        let record = |(index, &top1): (usize, &f64)| EvaluationRecord {
            step: 10 * (index as u64 + 1),
            epoch: 0.0,
            on: String::new(),
            images: 1,
            top1: Some(top1),
            top5: None,
            mean_average_precision: Some(top1),
            loss: 1.0 - top1,
            macro_f1: 0.0,
            micro_f1: None,
            calibration_error: None,
        };
        tops.iter().enumerate().map(record).collect()
    }

    #[test]
    fn patience_counts_evaluations_without_a_better_one() {
        for metric in [None, Some(Judged::Top1), Some(Judged::Loss), Some(Judged::Map)] {
            let config = EarlyStoppingConfig { patience: 2, every_epochs: 1.0, metric };
            let verdict = |tops: &[f64]| judge(&config, &records(tops));
            assert_eq!(verdict(&[]), Verdict::default());
            assert_eq!(verdict(&[0.5]), Verdict { improved: true, ended: false, best: Some(10) });
            assert_eq!(verdict(&[0.5, 0.5]), Verdict { improved: false, ended: false, best: Some(10) });
            assert_eq!(verdict(&[0.5, 0.5, 0.4]), Verdict { improved: false, ended: true, best: Some(10) });
            assert_eq!(verdict(&[0.5, 0.4, 0.6, 0.6]), Verdict { improved: false, ended: false, best: Some(30) });
        }
    }
}
