//! Why a step's numbers are not finite: which layer of which micro-batch was the first, on which images.
//!
//! A step that fails is computed once more with every layer's output and every gradient looked at. What comes out is the same on all ranks, is written
//! into the run folder as a bundle (`nonfinite-step-N.json`), and computed again by `autodidact replay`.

use serde::{Deserialize, Serialize};

use crate::method::{MicroBatch, Outputs};
use crate::model::params::Layout;
use crate::model::{Kind, Spread, traced};
use crate::parallel::{Aborted, Collective};
use crate::precision::{Compute, PrecisionState};

/// Version of the bundle's format.
pub const BUNDLE_FORMAT: u32 = 1;
/// Numbers that a [`Spread`] is sent as.
const WIDTH: usize = 5;

/// A step whose loss or gradient was NaN or infinite, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// Version of the format.
    pub format: u32,
    /// Version of the program that wrote it.
    pub autodidact: String,
    /// Digest of the run's plan.
    pub plan: String,
    /// The step, counted from 1 as in the logs.
    pub step: u64,
    /// The run's seed.
    pub seed: u64,
    /// What products computed in.
    pub compute: Compute,
    /// State of the loss scale in front of the attempt that failed.
    pub precision: PrecisionState,
    /// BLAKE3 of weights and buffers in front of the step, hexadecimal.
    pub weights: String,
    /// What was not finite: `loss` or `norm of the gradient`.
    pub what: String,
    /// Its value in words, since JSON has none for it.
    pub value: String,
    /// What was not finite first; nothing where a second look found all of it finite.
    pub first: Option<First>,
    /// Indices of the images of each micro-batch of the global batch.
    pub images: Vec<Vec<u64>>,
    /// The micro-batch that `layers` and `gradients` are of: that of `first`, else the first one.
    pub micro_batch: usize,
    /// What layers put out, in the order they ran; views and outputs of the network included.
    pub layers: Vec<Layer>,
    /// Gradients of the parameters, multiplied by the loss scale.
    pub gradients: Vec<Layer>,
}

/// The first place that was not finite.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct First {
    /// Path of the module or parameter.
    pub path: String,
    /// The output of a module, else the gradient of a parameter.
    pub forward: bool,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
}

/// Values of one layer's output or one parameter's gradient.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Path of the module or parameter.
    pub path: String,
    /// Number of values.
    pub count: u64,
    /// How many of them are NaN or infinite.
    pub not_finite: u64,
    /// Smallest finite value.
    pub min: f64,
    /// Largest finite value.
    pub max: f64,
    /// Root of the mean square of the finite values.
    pub rms: f64,
}

impl Layer {
    fn new(path: &str, spread: Spread) -> Self {
        let Spread { count, not_finite, min, max, rms } = spread;
        Self { path: path.to_owned(), count, not_finite, min, max, rms }
    }
}

impl Finding {
    /// Says in one clause where the numbers went bad.
    #[must_use]
    pub fn place(&self) -> String {
        let Some(First { path, forward, micro_batch }) = &self.first else {
            return "a second look at the step found every layer and gradient finite".to_owned();
        };
        let all = self.images.get(*micro_batch).map_or(&[][..], Vec::as_slice);
        let some: Vec<String> = all.iter().take(8).map(u64::to_string).collect();
        let more = if all.len() > some.len() { format!(" and {} more", all.len() - some.len()) } else { String::new() };
        let what = match (path.as_str(), forward) {
            (path, true) if path.starts_with("view ") => {
                format!("{path} of the input is not finite before any layer has seen it")
            }
            (path, true) => format!("`{path}` is the first module whose output is not finite"),
            (path, false) => {
                format!("all outputs are finite; the gradient of `{path}` is the first that is not")
            }
        };
        format!("{what}, in micro-batch {} (images {}{more})", micro_batch + 1, some.join(", "))
    }
}

/// What was seen of one micro-batch.
#[derive(Clone, Debug, Default)]
pub(super) struct MicroSeen {
    images: Vec<u64>,
    layers: Vec<(String, Spread)>,
    gradients: Vec<Spread>,
}

/// Looks at the micro-batches of a rank, one after the other.
#[derive(Debug, Default)]
pub(super) struct Watcher {
    micros: Vec<MicroSeen>,
    /// Micro-batches whose gradients have been seen.
    backward: usize,
}

impl Watcher {
    /// Runs a forward pass and notes what its layers put out.
    pub(super) fn watch(&mut self, batch: &MicroBatch, layout: &Layout, encode: impl FnOnce() -> Outputs) -> Outputs {
        let mut layers = Vec::new();
        for (index, view) in batch.views.iter().enumerate() {
            layers.push((format!("view {index}"), spread(view.clone())));
        }
        let (outputs, seen) = traced(encode);
        let module = |path: &str| path.rsplit_once('.').map_or(path, |(module, _)| module).to_owned();
        layers.extend(seen.into_iter().map(|seen| (module(&layout.entry(seen.layer).path), seen.output)));
        for (index, output) in outputs.tensors.iter().enumerate() {
            layers.push((format!("output {index}"), spread(output.clone())));
        }
        self.micros.push(MicroSeen { images: batch.images.clone(), layers, gradients: Vec::new() });
        outputs
    }

    /// Notes the gradients of the next micro-batch.
    pub(super) fn gradients(&mut self, gradients: &[Vec<f32>]) {
        let seen = &mut self.micros[self.backward];
        seen.gradients = gradients.iter().map(|values| Spread::of(values)).collect();
        self.backward += 1;
    }

    /// Returns what was seen.
    pub(super) fn finish(self) -> Vec<MicroSeen> {
        self.micros
    }
}

fn spread<const D: usize>(x: burn::tensor::Tensor<D>) -> Spread {
    Spread::of(&x.into_data().try_to_vec::<f32>().expect("inputs and outputs are fp32"))
}

/// What all ranks saw of a step.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) first: Option<First>,
    pub(super) images: Vec<Vec<u64>>,
    pub(super) micro_batch: usize,
    pub(super) layers: Vec<Layer>,
    pub(super) gradients: Vec<Layer>,
}

/// Puts together what all ranks saw; the same on each. Where all of it is finite, the layers are those of micro-batch `shown`.
pub(super) fn gather(
    own: &[MicroSeen],
    layout: &Layout,
    shown: usize,
    ranks: &dyn Collective,
) -> Result<Seen, Aborted> {
    // every rank has at least one micro-batch, and all micro-batches go through the same layers
    let paths: Vec<&str> = own[0].layers.iter().map(|(path, _)| path.as_str()).collect();
    let trained: Vec<&str> =
        layout.entries().iter().filter(|entry| entry.kind == Kind::Trained).map(|entry| entry.path.as_str()).collect();
    let images = own.iter().flat_map(|micro| micro.images.iter().map(|image| *image as f64)).collect();
    let images = ranks.all_gather_f64(images)?;
    let images: Vec<Vec<u64>> = images
        .chunks(own[0].images.len().max(1))
        .map(|micro| micro.iter().map(|image| *image as u64).collect())
        .collect();
    let spreads = own.iter().flat_map(|micro| {
        micro
            .layers
            .iter()
            .map(|(_, spread)| spread)
            .chain(&micro.gradients)
            .flat_map(|spread| [spread.count as f64, spread.not_finite as f64, spread.min, spread.max, spread.rms])
    });
    let all = ranks.all_gather_f64(spreads.collect())?;
    let spreads: Vec<Spread> = all
        .as_chunks::<WIDTH>()
        .0
        .iter()
        .map(|&[count, not_finite, min, max, rms]| Spread {
            count: count as u64,
            not_finite: not_finite as u64,
            min,
            max,
            rms,
        })
        .collect();
    let micros: Vec<(&[Spread], &[Spread])> =
        spreads.chunks(paths.len() + trained.len()).map(|micro| micro.split_at(paths.len())).collect();
    let bad = |spread: &Spread| spread.not_finite > 0;
    let forward = micros.iter().enumerate().find_map(|(micro_batch, (layers, _))| {
        Some(First { path: paths[layers.iter().position(bad)?].to_owned(), forward: true, micro_batch })
    });
    // backward, the last parameter is the first to get its gradient
    let backward = || {
        micros.iter().enumerate().find_map(|(micro_batch, (_, gradients))| {
            Some(First { path: trained[gradients.iter().rposition(bad)?].to_owned(), forward: false, micro_batch })
        })
    };
    let first = forward.or_else(backward);
    let micro_batch = first.as_ref().map_or(shown.min(micros.len() - 1), |first| first.micro_batch);
    let (layers, gradients) = micros[micro_batch];
    let named = |paths: &[&str], spreads: &[Spread]| {
        paths.iter().zip(spreads).map(|(path, spread)| Layer::new(path, *spread)).collect()
    };
    Ok(Seen { images, micro_batch, layers: named(&paths, layers), gradients: named(&trained, gradients), first })
}
