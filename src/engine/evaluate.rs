//! What the backbone learnt: nearest neighbours, spread and rank of its features.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn::tensor::Device;

use super::error::EngineError;
use crate::data::{Error as DataError, Source, Split};
use crate::eval::{
    EvalConfig, EvalView, Extracted, Features, Knn, LogisticRegression, Warning, chance, embedding_std, extract,
    health, rankme, top_k_accuracy,
};
use crate::model::Pass;
use crate::model::params::Flat;
use crate::ops;
use crate::plan::Plan;
use crate::recipe::Recipe;
use crate::report::{KnnResult, LinearResult};
use crate::rng::{Purpose, Stream};

/// Added to each probability of `RankMe`'s entropy, its authors' value for single precision.
const RANKME_EPSILON: f64 = 1e-7;

/// Which weights to evaluate.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// As drawn before the first step.
    Untrained,
    /// These, trained and untrained tensors in flat order.
    Given(&'a [f32], &'a [f32]),
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Evaluation {
    /// Nearest-neighbour classification; nothing without labels.
    pub knn: Option<KnnResult>,
    /// Linear classification; nothing without labels or when not asked for.
    pub linear: Option<LinearResult>,
    /// Mean standard deviation of the normalised features.
    pub embedding_std: f64,
    /// `RankMe` of the features.
    pub rankme: f64,
    /// Width of the features.
    pub dim: usize,
    /// Signs of collapse.
    pub warnings: Vec<Warning>,
}

/// Images to evaluate on: a bank and queries. The choice is the same for every seed, so that runs are measured on the same images.
pub struct EvalSet {
    bank: (Arc<dyn Source>, Vec<usize>),
    queries: (Arc<dyn Source>, Vec<usize>),
    labelled: bool,
    held_out: bool,
}

impl EvalSet {
    /// Chooses the images: queries from `eval.test`, else from the source's own test split, else a tenth of the training images, which are
    /// then left out of the bank.
    ///
    /// # Errors
    /// When `eval.test` cannot be opened.
    pub fn choose(recipe: &Recipe, train: &Arc<dyn Source>) -> Result<Self, EngineError> {
        let EvalConfig { max_train, max_test, test, .. } = &recipe.eval;
        let held_out = match test {
            Some(config) => Some(crate::data::open_test(config)?),
            None => match crate::data::open(&recipe.data, Split::Test) {
                Ok(test) => Some(test).filter(|test| test.fingerprint() != train.fingerprint()),
                // then a part of the training images serves
                Err(DataError::NoTestSplit { .. }) => None,
                Err(error) => return Err(error.into()),
            },
        };
        let labelled = |source: &Arc<dyn Source>| -> Vec<usize> {
            (0..source.len()).filter(|&index| source.label(index).is_some()).collect()
        };
        let (mut bank, mut queries) = (labelled(train), held_out.as_ref().map_or_else(Vec::new, labelled));
        let has_labels = !bank.is_empty() && (held_out.is_none() || !queries.is_empty());
        if !has_labels {
            bank.clear();
            queries = (0..held_out.as_ref().unwrap_or(train).len()).collect();
        }
        if let Some(test) = held_out.as_ref().filter(|_| has_labels) {
            same_classes(test.classes(), train.classes())?;
        }
        shuffle(0, &mut bank);
        shuffle(1, &mut queries);
        if has_labels && held_out.is_none() {
            queries = bank.split_off(bank.len() - bank.len().div_ceil(10));
        }
        bank.truncate(*max_train);
        queries.truncate(*max_test);
        bank.sort_unstable();
        queries.sort_unstable();
        let separate = held_out.is_some();
        let held_out = held_out.unwrap_or_else(|| Arc::clone(train));
        let (bank, queries) = ((Arc::clone(train), bank), (held_out, queries));
        Ok(Self { bank, queries, labelled: has_labels, held_out: separate })
    }

    /// Tells what the user may not expect of this choice.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        if self.bank.0.is_multi_label() {
            return Some("no accuracy of nearest neighbours: an image may have several labels".to_owned());
        }
        (self.labelled && !self.held_out).then(|| {
            let count = self.queries.1.len();
            format!("there are no test images, so {count} of the training images are classified (seen without labels)")
        })
    }
}

/// Shifts and scales each feature to mean 0 and deviation 1 over the bank, so that one penalty suits any network.
fn standardized(bank: &Features, queries: &Features) -> Result<(Features, Features), EngineError> {
    let (rows, dim) = (bank.rows() as f64, bank.dim());
    let (mut mean, mut square) = (vec![0.0f64; dim], vec![0.0f64; dim]);
    for row in 0..bank.rows() {
        for (at, &value) in bank.row(row).iter().enumerate() {
            mean[at] += f64::from(value) / rows;
            square[at] += f64::from(value).powi(2) / rows;
        }
    }
    let deviation: Vec<f64> = mean.iter().zip(&square).map(|(m, s)| (s - m * m).max(1e-12).sqrt()).collect();
    let scaled = |features: &Features| {
        let values = (0..features.rows()).flat_map(|row| {
            let scale = |(at, &value): (usize, &f32)| ((f64::from(value) - mean[at]) / deviation[at]) as f32;
            features.row(row).iter().enumerate().map(scale).collect::<Vec<_>>()
        });
        Features::new(values.collect(), dim)
    };
    Ok((scaled(bank)?, scaled(queries)?))
}

pub(super) fn same_classes(test: &[String], train: &[String]) -> Result<(), EngineError> {
    let name = |classes: &[String], index: usize| classes.get(index).cloned().unwrap_or_else(|| "(none)".to_owned());
    let differs = (0..test.len().max(train.len())).find(|&index| test.get(index) != train.get(index));
    match differs {
        None => Ok(()),
        Some(index) => Err(EngineError::OtherClasses { index, test: name(test, index), train: name(train, index) }),
    }
}

pub(super) fn shuffle(stream: u64, items: &mut [usize]) {
    Stream::new(0, Purpose::Evaluation, &[stream]).shuffle(items);
}

/// Evaluates one set of weights of a recipe's network.
///
/// # Errors
/// When the network cannot be built, its features are not finite, or `stop` was set meanwhile.
pub fn evaluate(
    plan: &Plan,
    set: &EvalSet,
    weights: Weights<'_>,
    device: &Device,
    threads: usize,
    stop: &AtomicBool,
) -> Result<Evaluation, EngineError> {
    let recipe = &plan.recipe;
    ops::configure(recipe.ops);
    let size = recipe.views.iter().map(|view| view.size).max().unwrap_or(0);
    let view = EvalView { size, mean: recipe.data.mean, std: recipe.data.std };
    let build = || -> Result<Box<dyn FnMut(_) -> _>, EngineError> {
        let inputs = recipe.inputs();
        let mut learner = recipe.method.build(&inputs, &plan.scope(device))?;
        if let Weights::Given(weights, buffers) = weights {
            learner.set(&Flat::upload(weights.to_vec(), buffers.to_vec(), device));
        }
        Ok(Box::new(move |images| learner.features(images, &mut Pass::eval())))
    };
    let features = |(source, indices): &(Arc<dyn Source>, Vec<usize>)| -> Result<(Features, Vec<u32>), EngineError> {
        let Extracted { values, dim, kept, .. } =
            extract(source.as_ref(), indices, view, device, threads, stop, build)?.ok_or(EngineError::Stopped)?;
        let labels = kept.iter().map(|&index| source.label(index).unwrap_or(0)).collect();
        Ok((Features::new(values, dim.max(1))?, labels))
    };
    let (queries, query_labels) = features(&set.queries)?;
    let mut evaluation = Evaluation { dim: queries.dim(), ..Evaluation::default() };
    if set.labelled {
        let (bank, bank_labels) = features(&set.bank)?;
        let EvalConfig { k, temperature, .. } = recipe.eval;
        let votes = Knn { k, temperature }.vote(&bank, &bank_labels, &queries);
        evaluation.knn = Some(KnnResult {
            k,
            temperature,
            bank: bank.rows(),
            queries: queries.rows(),
            classes: votes.classes(),
            top1: votes.accuracy(&query_labels, 1),
            top5: votes.accuracy(&query_labels, 5),
            untrained_top1: None,
            chance: chance(&query_labels),
        });
        if recipe.eval.linear {
            let classes = bank_labels.iter().chain(&query_labels).map(|&label| label as usize + 1).max().unwrap_or(0);
            let c = recipe.eval.linear_c;
            let (bank, queries) = standardized(&bank, &queries)?;
            let fitted = LogisticRegression::with_c(c).fit(&bank, &bank_labels, classes, threads)?;
            evaluation.linear = Some(LinearResult {
                c,
                train: bank.rows(),
                queries: queries.rows(),
                top1: top_k_accuracy(&fitted.scores(&queries), classes, &query_labels, 1),
                untrained_top1: None,
            });
        }
    }
    if queries.rows() > 1 {
        evaluation.embedding_std = embedding_std(&queries)?;
        evaluation.rankme = rankme(&queries, RANKME_EPSILON);
        evaluation.warnings = health(evaluation.embedding_std, evaluation.rankme, queries.dim().min(queries.rows()));
    }
    Ok(evaluation)
}
