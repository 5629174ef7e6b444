//! Methods: one file is one paper.
//!
//! A [`Method`] is a network (a burn module) with two pure parts: [`Method::encode`] turns one micro-batch into outputs, and [`Method::loss`]
//! turns outputs into a loss. It knows no ranks, no clock, no optimizer and no loop. The engine sees it as a [`Learner`], an object-safe
//! face that also gives access to the parameters in flat order, so the engine is compiled once for all methods.

pub mod barlow;
pub mod byol;
mod center;
mod check;
pub mod classify;
pub mod data2vec;
pub mod dcl;
pub mod dino;
pub mod dinov2;
pub mod ibot;
pub mod ijepa;
pub mod lejepa;
pub mod mae;
mod masked_views;
pub mod moco2;
pub mod moco3;
mod multicrop;
pub mod nnclr;
mod queue;
pub mod simclr;
pub mod simmim;
pub mod simsiam;
mod small_data;
pub mod swav;
#[cfg(test)]
mod testing;
pub mod vicreg;
pub mod visreg;

use std::ops::Range;

use burn::module::{Module, ParamId};
use burn::tensor::{Device, Gradients, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::augment::ViewConfig;
use crate::model::params::{self, Flat, Layout};
use crate::model::{Backbone, BackboneConfig, ConfigError, Kind, Pass, Scope, Start, merge, uncounted};
use crate::optim::{ParameterRule, RampConfig, ema};
use crate::problem::Numbers;

/// A self-supervised objective: everything that is particular to one paper, and nothing else.
#[diagnostic::on_unimplemented(note = "derive `Module` on the struct, then implement `Method`; see CONTRIBUTING.md")]
pub trait Method: Module + Send + 'static {
    /// The `[method.<name>]` table of a recipe.
    type Config;

    /// What one evaluation of the loss sees.
    const SEES: Sees;

    /// Whether it learns from labels, by `finetune` instead of `pretrain`.
    const SUPERVISED: bool = false;

    /// Builds the network, backbone included.
    ///
    /// # Errors
    /// When method, backbone and views cannot work together; the error names the recipe key.
    fn build(config: &Self::Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError>;

    /// Checks the table, alone and against the rest of the recipe; keys start with `method.<name>`.
    fn check(config: &Self::Config, inputs: &Inputs<'_>, found: &mut Numbers);

    /// Checks the table against the labels of the data.
    fn suits(_config: &Self::Config, _labels: &Labels, _found: &mut Numbers) {}

    /// Fills in what follows from the data: values the recipe leaves open, and says why, a line each.
    fn resolve(_config: &mut Self::Config, _facts: &RunFacts) -> Vec<String> {
        Vec::new()
    }

    /// Returns the names of the classes that it scores, in their order; nothing where it scores none.
    fn classes(_config: &Self::Config) -> &[String] {
        &[]
    }

    /// Returns what is different for some parameters (no decay, frozen, rates of their own); the recipe's rules come after.
    fn rules(_config: &Self::Config) -> Vec<ParameterRule> {
        Vec::new()
    }

    /// Runs the network over one micro-batch.
    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs;

    /// Computes the loss of the outputs: of the whole global batch or of one micro-batch, as [`Method::SEES`] says.
    fn loss(&self, outputs: Outputs, progress: &Progress) -> Loss;

    /// Returns the encoder that is evaluated and exported.
    fn backbone(&self) -> &Backbone;

    /// Scores the classes for each image, `[images, classes]`, where that is what the method learns.
    fn scores(&self, _images: Tensor<4>, _pass: &mut Pass) -> Option<Tensor<2>> {
        None
    }

    /// Returns the momentum by which the teacher follows after this step, if there is one.
    ///
    /// A teacher is a field `teacher` built below [`Scope::untrained`]: each of its parameters that has a trained one of the same path
    /// beside it becomes `momentum * teacher + (1 - momentum) * student` when the optimizer has moved the student.
    fn teacher_momentum(&self, _progress: &Progress) -> Option<f64> {
        None
    }

    /// Computes new values of saved tensors that no gradient moves (queues, centres) from [`Loss::statistics`] of the global batch.
    fn update(&self, _statistics: &[Vec<f32>], _progress: &Progress) -> Vec<Update> {
        Vec::new()
    }

    /// Returns the parameters whose rows are scaled to length 1 at the start and after each step.
    fn unit_rows(&self) -> Vec<ParamId> {
        Vec::new()
    }
}

/// What a network is built for, from the recipe.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The backbone's table.
    pub backbone: &'a BackboneConfig,
    /// The groups of views.
    pub views: &'a [ViewConfig],
    /// Images of one optimizer step.
    pub global: usize,
    /// Images of one forward pass.
    pub micro: usize,
}

impl Inputs<'_> {
    /// Returns the number of views an image is turned into.
    #[must_use]
    pub fn num_views(&self) -> usize {
        self.views.iter().fold(0, |sum, view| sum.saturating_add(view.count))
    }

    /// Lists the size of each view, group by group.
    pub fn view_sizes(&self) -> impl Iterator<Item = u32> {
        self.views.iter().flat_map(|view| std::iter::repeat_n(view.size, view.count))
    }
}

/// What is known of a run when its plan is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunFacts {
    /// Images of the data.
    pub images: usize,
    /// Steps of the run.
    pub steps: u64,
    /// Steps of one epoch.
    pub steps_per_epoch: u64,
    /// What is learnt from labels.
    pub labels: Labels,
}

/// The labels of the images that a run learns from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// Name and number of training images of each class; empty where nothing is learnt from labels.
    pub classes: Vec<(String, usize)>,
    /// An image may have several classes, or none.
    pub several: bool,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The run's seed, the key of what a loss draws.
    pub seed: u64,
    /// This step, counted from 0.
    pub step: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Steps of one epoch.
    pub steps_per_epoch: u64,
}

impl Progress {
    /// Returns the epoch of this step, counted from 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.step / self.steps_per_epoch
    }

    /// Returns what a number has come to.
    #[must_use]
    pub fn at(&self, ramp: &RampConfig) -> f64 {
        ramp.resolve(self.steps, self.steps_per_epoch).at(self.step)
    }
}

/// What one evaluation of a loss sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sees {
    /// The outputs of the whole global batch, gathered from all ranks in micro-batch order (contrastive losses).
    GlobalBatch,
    /// The outputs of one micro-batch (losses that are a sum over images).
    MicroBatch,
}

/// One micro-batch on the device.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// How far the run is; its seed and epoch are keys of masks.
    pub progress: Progress,
    /// Index of each image in the data, the key of its random draws.
    pub images: Vec<u64>,
    /// Classes of each image; empty where some image has no label. Only supervised methods look at them.
    pub labels: Vec<Vec<u32>>,
    /// Views, each `[images, 3, height, width]`, normalised.
    pub views: Vec<Tensor<4>>,
}

/// What a network makes of a micro-batch: two-dimensional tensors, one row for each image, that stack over micro-batches.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// Tensors the loss is differentiated by.
    pub tensors: Vec<Tensor<2>>,
    /// Tensors it is not (targets, masks).
    pub constants: Vec<Tensor<2>>,
}

/// A loss before its division: the engine sums `sum` and `count` over the global batch and divides once.
#[derive(Debug)]
pub struct Loss {
    /// Sum of the terms, `[1]`.
    pub sum: Tensor<1>,
    /// Number of terms.
    pub count: f64,
    /// Parts of the sum, for the logs.
    pub parts: Vec<(&'static str, Tensor<1>)>,
    /// What [`Method::update`] needs; summed over the micro-batches where each has a loss of its own.
    pub statistics: Vec<Tensor<1>>,
    /// Embeddings `[images, dim]` whose spread shows a collapse.
    pub embeddings: Option<Tensor<2>>,
    /// What the mean loss, or the part of that name, is when the network tells nothing apart.
    pub uniform: Option<(Option<&'static str>, f64)>,
}

impl Loss {
    /// A loss and nothing beside it.
    #[must_use]
    pub fn new(sum: Tensor<1>, count: f64) -> Self {
        Self { sum, count, parts: Vec::new(), statistics: Vec::new(), embeddings: None, uniform: None }
    }

    /// Says what the mean loss is when the network tells nothing apart, such as the logarithm of the number of candidates.
    #[must_use]
    pub fn with_uniform(self, uniform: f64) -> Self {
        Self { uniform: Some((None, uniform)), ..self }
    }

    /// The same of a part, where other parts hide it.
    #[must_use]
    pub fn with_uniform_part(self, part: &'static str, uniform: f64) -> Self {
        Self { uniform: Some((Some(part), uniform)), ..self }
    }

    /// Shows embeddings, so that a collapse to a point is noticed.
    #[must_use]
    pub fn with_embeddings(self, embeddings: Tensor<2>) -> Self {
        Self { embeddings: Some(embeddings.detach()), ..self }
    }
}

/// New values of a saved tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// Which.
    pub id: ParamId,
    /// All of its values, row-major.
    pub values: Vec<f32>,
}

/// What the engine sees of a method.
pub trait Learner: Send {
    /// See [`Method::SEES`].
    fn sees(&self) -> Sees;
    /// See [`Method::encode`].
    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs;
    /// See [`Method::loss`].
    fn loss(&self, outputs: Outputs, progress: &Progress) -> Loss;
    /// Moves what no gradient moves after a step: saved tensors by [`Method::update`], teacher, unit rows.
    fn after_step(&self, statistics: &[Vec<f32>], progress: &Progress, weights: &mut [f32], buffers: &mut [f32]);
    /// Makes the first weights what [`Method::unit_rows`] asks for.
    fn at_start(&self, weights: &mut [f32]);
    /// See [`Method::scores`].
    fn scores(&self, images: Tensor<4>, pass: &mut Pass) -> Option<Tensor<2>>;
    /// Returns what stands for each image after the backbone, `[images, dim]`.
    fn features(&self, images: Tensor<4>, pass: &mut Pass) -> Tensor<2>;
    /// Returns the weights of the encoder that is evaluated and exported.
    fn backbone(&self) -> Start;
    /// Tells whose encoder that is: the student's or the teacher's.
    fn evaluated(&self) -> &'static str;
    /// Returns the parameters' paths, shapes and places in the flat vectors.
    fn layout(&self) -> &Layout;
    /// Returns the trained parameters in flat order.
    fn weights(&self) -> Vec<f32>;
    /// Returns the saved but untrained tensors in flat order.
    fn buffers(&self) -> Vec<f32>;
    /// Replaces all parameters.
    fn set(&mut self, flat: &Flat);
    /// Gives back what [`Learner::set`] was given last, and lets go of the trained parameters: until the next `set` nothing can be encoded.
    ///
    /// Once every rank of a process has done so and dropped what it got, the first one can move the weights where they are.
    fn release(&mut self) -> Option<Flat>;
    /// Runs the network over one micro-batch outside of autodiff: the same outputs, and nothing is kept for a backward pass.
    fn encode_untracked(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs;
    /// Takes out the gradient of each trained parameter in the layout's order, zero where there is none.
    fn gradients(&self, gradients: &mut Gradients) -> Vec<Vec<f32>>;
    /// Takes out the gradients of those trained parameters that have one and adds them to `sums`, one for each in the layout's order.
    fn add_gradients(&self, gradients: &mut Gradients, sums: &mut Vec<Option<Vec<f32>>>);
}

struct Holder<M> {
    // taken only inside `set` and `release`
    network: Option<M>,
    layout: Layout,
    /// Places of the teacher's values in the buffers, and of the student's in the weights.
    twins: Vec<(Range<usize>, Range<usize>)>,
    device: Device,
    /// What `set` was given last; the network's parameters are views of it.
    flat: Option<Flat>,
}

/// Scales a row to length 1; torch's `normalize`, with its bound of 1e-12.
fn unit(row: &mut [f32]) {
    let norm = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt().max(1e-12);
    for x in row {
        *x = (f64::from(*x) / norm) as f32;
    }
}

impl<M: Method> Holder<M> {
    fn network(&self) -> &M {
        self.network.as_ref().expect("a network is only absent while it is replaced")
    }
}

impl<M: Method> Learner for Holder<M> {
    fn sees(&self) -> Sees {
        M::SEES
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        self.network().encode(batch, pass)
    }

    fn loss(&self, outputs: Outputs, progress: &Progress) -> Loss {
        self.network().loss(outputs, progress)
    }

    fn after_step(&self, statistics: &[Vec<f32>], progress: &Progress, weights: &mut [f32], buffers: &mut [f32]) {
        for Update { id, values } in self.network().update(statistics, progress) {
            let place = &mut buffers[self.layout.entry(id).range()];
            assert_eq!(place.len(), values.len(), "an update of another tensor");
            place.copy_from_slice(&values);
        }
        self.at_start(weights);
        if let Some(momentum) = self.network().teacher_momentum(progress) {
            for (teacher, student) in &self.twins {
                ema::update(&mut buffers[teacher.clone()], &weights[student.clone()], momentum);
            }
        }
    }

    fn at_start(&self, weights: &mut [f32]) {
        for id in self.network().unit_rows() {
            let entry = self.layout.entry(id);
            let row = entry.len / entry.shape[0].max(1);
            weights[entry.range()].chunks_mut(row.max(1)).for_each(unit);
        }
    }

    fn scores(&self, images: Tensor<4>, pass: &mut Pass) -> Option<Tensor<2>> {
        self.network().scores(images, pass)
    }

    fn features(&self, images: Tensor<4>, pass: &mut Pass) -> Tensor<2> {
        self.network().backbone().forward(images, pass).pooled
    }

    fn backbone(&self) -> Start {
        let (weights, buffers) = (self.weights(), self.buffers());
        let tensor = |entry: &params::Entry| {
            let place = self.layout.entry(entry.id);
            let values = if place.kind == Kind::Trained { &weights } else { &buffers };
            (entry.path.clone(), (entry.shape.clone(), values[place.range()].to_vec()))
        };
        let mut tensors = Layout::of(self.network().backbone()).entries().iter().map(tensor).collect();
        merge(&mut tensors);
        Start::new(tensors)
    }

    fn evaluated(&self) -> &'static str {
        let own = Layout::of(self.network().backbone());
        // a frozen backbone is no teacher, so the field's name tells, not whether anything of it is trained
        let teacher = own.entries().iter().any(|entry| self.layout.entry(entry.id).path.starts_with("teacher."));
        if teacher { "teacher" } else { "student" }
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn weights(&self) -> Vec<f32> {
        self.flat.as_ref().map_or_else(|| params::read_weights(self.network(), &self.layout), Flat::weights)
    }

    fn buffers(&self) -> Vec<f32> {
        self.flat.as_ref().map_or_else(|| params::read_buffers(self.network(), &self.layout), Flat::buffers)
    }

    fn set(&mut self, flat: &Flat) {
        if let Some(network) = self.network.take() {
            self.network = Some(params::write(network, &self.layout, flat, &self.device));
            self.flat = Some(flat.clone());
        }
    }

    fn release(&mut self) -> Option<Flat> {
        let flat = self.flat.take()?;
        self.network = self.network.take().map(|network| params::release(network, &self.layout, &self.device));
        Some(flat)
    }

    fn encode_untracked(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let views = batch.views.iter().map(|view| view.clone().without_autodiff()).collect();
        uncounted(|| self.network().valid().encode(&MicroBatch { views, ..batch.clone() }, pass))
    }

    fn gradients(&self, gradients: &mut Gradients) -> Vec<Vec<f32>> {
        params::read_gradients(self.network(), &self.layout, gradients)
    }

    fn add_gradients(&self, gradients: &mut Gradients, sums: &mut Vec<Option<Vec<f32>>>) {
        params::add_gradients(self.network(), &self.layout, gradients, sums);
    }
}

/// Shows a network on `device` to the engine.
pub fn learner<M: Method>(network: M, device: &Device) -> Box<dyn Learner> {
    let layout = Layout::of(&network);
    let twins = layout.twins("teacher.");
    Box::new(Holder { network: Some(network), layout, twins, device: device.clone(), flat: None })
}

/// The one table of methods: recipe key, configuration, network.
macro_rules! methods {
    ($($(#[$doc:meta])* $variant:ident => $module:ident :: $network:ident,)*) => {
        /// The `[method.*]` table of a recipe.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "lowercase")]
        pub enum MethodConfig {
            $($(#[$doc])* $variant($module::Config),)*
        }

        impl MethodConfig {
            /// Builds the network of this method.
            ///
            /// # Errors
            /// When method, backbone and views cannot work together.
            pub fn build(&self, inputs: &Inputs<'_>, scope: &Scope) -> Result<Box<dyn Learner>, ConfigError> {
                match self {
                    $(Self::$variant(config) => {
                        Ok(learner($module::$network::build(config, inputs, scope)?, scope.device()))
                    })*
                }
            }

            /// Checks the method's table, alone and against the rest of the recipe.
            pub fn check(&self, inputs: &Inputs<'_>, found: &mut Numbers) {
                match self {
                    $(Self::$variant(config) => $module::$network::check(config, inputs, found),)*
                }
            }

            /// Tells whether the method learns from labels.
            #[must_use]
            pub fn is_supervised(&self) -> bool {
                match self {
                    $(Self::$variant(_) => $module::$network::SUPERVISED,)*
                }
            }

            /// Checks the method's table against the data.
            pub fn suits(&self, labels: &Labels, found: &mut Numbers) {
                match self {
                    $(Self::$variant(config) => $module::$network::suits(config, labels, found),)*
                }
            }

            /// Tells whether the method learns several labels an image.
            #[must_use]
            pub fn is_multi_label(&self) -> bool {
                matches!(self, Self::Classify(config) if config.multi_label == Some(true))
            }

            /// Returns the names of the classes that the method scores, in their order.
            #[must_use]
            pub fn classes(&self) -> &[String] {
                match self {
                    $(Self::$variant(config) => $module::$network::classes(config),)*
                }
            }

            /// Fills in what follows from the data; returns what was decided and why.
            pub fn resolve(&mut self, facts: &RunFacts) -> Vec<String> {
                match self {
                    $(Self::$variant(config) => $module::$network::resolve(config, facts),)*
                }
            }

            /// Returns what the method treats differently from parameter to parameter.
            #[must_use]
            pub fn rules(&self) -> Vec<ParameterRule> {
                match self {
                    $(Self::$variant(config) => $module::$network::rules(config),)*
                }
            }

            /// Returns the key of this method in a recipe.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => stringify!($module),)*
                }
            }
        }
    };
}

methods! {
    /// SimCLR (Chen et al., 2020, <https://arxiv.org/abs/2002.05709>).
    Simclr => simclr::SimClr,
    /// DCL and DCLW (Yeh et al., 2021, <https://arxiv.org/abs/2110.06848>).
    Dcl => dcl::Dcl,
    /// MoCo v2 (Chen et al., 2020, <https://arxiv.org/abs/2003.04297>).
    Moco2 => moco2::MoCo2,
    /// MoCo v3 (Chen et al., 2021, <https://arxiv.org/abs/2104.02057>).
    Moco3 => moco3::MoCo3,
    /// NNCLR (Dwibedi et al., 2021, <https://arxiv.org/abs/2104.14548>).
    Nnclr => nnclr::Nnclr,
    /// `SwAV` (Caron et al., 2020, <https://arxiv.org/abs/2006.09882>).
    Swav => swav::SwAv,
    /// BYOL (Grill et al., 2020, <https://arxiv.org/abs/2006.07733>).
    Byol => byol::Byol,
    /// `SimSiam` (Chen & He, 2020, <https://arxiv.org/abs/2011.10566>).
    Simsiam => simsiam::SimSiam,
    /// Barlow Twins (Zbontar et al., 2021, <https://arxiv.org/abs/2103.03230>).
    Barlow => barlow::BarlowTwins,
    /// `VICReg` (Bardes et al., 2021, <https://arxiv.org/abs/2105.04906>).
    Vicreg => vicreg::VicReg,
    /// `LeJEPA` (Balestriero & `LeCun`, 2025, <https://arxiv.org/abs/2511.08544>).
    Lejepa => lejepa::LeJepa,
    /// `VISReg` (Wu et al., 2026, <https://arxiv.org/abs/2606.02572>).
    Visreg => visreg::VisReg,
    /// DINO (Caron et al., 2021, <https://arxiv.org/abs/2104.14294>).
    Dino => dino::Dino,
    /// `DINOv2` (Oquab et al., 2023, <https://arxiv.org/abs/2304.07193>).
    Dinov2 => dinov2::DinoV2,
    /// iBOT (Zhou et al., 2021, <https://arxiv.org/abs/2111.07832>).
    Ibot => ibot::Ibot,
    /// Masked autoencoder (He et al., 2021, <https://arxiv.org/abs/2111.06377>).
    Mae => mae::Mae,
    /// `SimMIM` (Xie et al., 2021, <https://arxiv.org/abs/2111.09886>).
    Simmim => simmim::SimMim,
    /// data2vec for images (Baevski et al., 2022, <https://arxiv.org/abs/2202.03555>).
    Data2vec => data2vec::Data2Vec,
    /// I-JEPA (Assran et al., 2023, <https://arxiv.org/abs/2301.08243>).
    Ijepa => ijepa::IJepa,
    /// Classification of labelled images, for `finetune`.
    Classify => classify::Classify,
}
