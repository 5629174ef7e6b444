//! Methods: one file is one paper.
//!
//! A [`Method`] is a network (a burn module) with two pure parts: [`Method::encode`] turns one micro-batch into outputs, and [`Method::loss`]
//! turns outputs into a loss. It knows no ranks, no clock, no optimizer and no loop. The engine sees it as a [`Learner`], an object-safe
//! face that also gives access to the parameters in flat order, so the engine is compiled once for all methods.

pub mod mae;
pub mod simclr;

use burn::module::Module;
use burn::tensor::{Device, Gradients, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::augment::ViewConfig;
use crate::model::params::{self, Flat, Layout};
use crate::model::{Backbone, BackboneConfig, ConfigError, Pass, Scope};

/// A self-supervised objective: everything that is particular to one paper, and nothing else.
#[diagnostic::on_unimplemented(note = "derive `Module` on the struct, then implement `Method`; see CONTRIBUTING.md")]
pub trait Method: Module + Send + 'static {
    /// The `[method.<name>]` table of a recipe.
    type Config;

    /// What one evaluation of the loss sees.
    const SEES: Sees;

    /// Builds the network, backbone included.
    ///
    /// # Errors
    /// When method, backbone and views cannot work together; the error names the recipe key.
    fn build(config: &Self::Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError>;

    /// Runs the network over one micro-batch.
    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs;

    /// Computes the loss of the outputs: of the whole global batch or of one micro-batch, as [`Method::SEES`] says.
    fn loss(&self, outputs: Outputs) -> Loss;

    /// Returns the encoder that is evaluated and exported.
    fn backbone(&self) -> &Backbone;
}

/// What a network is built for, from the recipe.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The backbone's table.
    pub backbone: &'a BackboneConfig,
    /// The groups of views.
    pub views: &'a [ViewConfig],
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
    /// The run's seed, a key of masks.
    pub seed: u64,
    /// Pass over the data, a key of masks.
    pub epoch: u64,
    /// Index of each image in the data, the key of its random draws.
    pub images: Vec<u64>,
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
}

/// What the engine sees of a method.
pub trait Learner: Send {
    /// See [`Method::SEES`].
    fn sees(&self) -> Sees;
    /// See [`Method::encode`].
    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs;
    /// See [`Method::loss`].
    fn loss(&self, outputs: Outputs) -> Loss;
    /// Returns what stands for each image after the backbone, `[images, dim]`.
    fn features(&self, images: Tensor<4>, pass: &mut Pass) -> Tensor<2>;
    /// Returns the parameters' paths, shapes and places in the flat vectors.
    fn layout(&self) -> &Layout;
    /// Returns the trained parameters in flat order.
    fn weights(&self) -> Vec<f32>;
    /// Returns the saved but untrained tensors in flat order.
    fn buffers(&self) -> Vec<f32>;
    /// Replaces all parameters.
    fn set(&mut self, flat: &Flat);
    /// Takes out the gradients of the trained parameters in flat order, zero where there is none.
    fn gradients(&self, gradients: &mut Gradients) -> Vec<f32>;
}

struct Holder<M> {
    // taken only inside `set`
    network: Option<M>,
    layout: Layout,
    device: Device,
}

impl<M: Method> Holder<M> {
    fn network(&self) -> &M {
        self.network.as_ref().expect("a network is only absent while `set` replaces it")
    }
}

impl<M: Method> Learner for Holder<M> {
    fn sees(&self) -> Sees {
        M::SEES
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        self.network().encode(batch, pass)
    }

    fn loss(&self, outputs: Outputs) -> Loss {
        self.network().loss(outputs)
    }

    fn features(&self, images: Tensor<4>, pass: &mut Pass) -> Tensor<2> {
        self.network().backbone().forward(images, pass).pooled
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn weights(&self) -> Vec<f32> {
        params::read_weights(self.network(), &self.layout)
    }

    fn buffers(&self) -> Vec<f32> {
        params::read_buffers(self.network(), &self.layout)
    }

    fn set(&mut self, flat: &Flat) {
        if let Some(network) = self.network.take() {
            self.network = Some(params::write(network, &self.layout, flat, &self.device));
        }
    }

    fn gradients(&self, gradients: &mut Gradients) -> Vec<f32> {
        params::read_gradients(self.network(), &self.layout, gradients)
    }
}

/// Shows a network on `device` to the engine.
pub fn learner<M: Method>(network: M, device: &Device) -> Box<dyn Learner> {
    let layout = Layout::of(&network);
    Box::new(Holder { network: Some(network), layout, device: device.clone() })
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
    /// Masked autoencoder (He et al., 2021, <https://arxiv.org/abs/2111.06377>).
    Mae => mae::Mae,
}
