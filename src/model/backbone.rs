//! The network that is pretrained, whichever it is.

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor};
use burn::tensor::{Device, Tensor};

use super::config::BackboneConfig;
use super::error::ConfigError;
use super::pass::Pass;
use super::resnet::{ResNet, ResNetArch};
use super::scope::Scope;
use super::segment::{Boundary, Features, Segmented};
use super::vit::{Vit, VitArch};

/// A backbone.
///
/// burn's derived `Module` for an enum would put the variant's name into every parameter's path. This one does not, so that below
/// a fixed prefix the paths are the keys of torchvision and timm.
#[derive(Clone, Debug)]
pub enum Backbone {
    /// Residual network.
    ResNet(ResNet),
    /// Vision transformer.
    Vit(Vit),
}

impl Backbone {
    /// Builds the network of a recipe for square images.
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn new(config: &BackboneConfig, image_size: u32, scope: &Scope) -> Result<Self, ConfigError> {
        Ok(match config {
            BackboneConfig::Resnet(config) => Self::ResNet(ResNet::new(&ResNetArch::from_config(config)?, scope)),
            BackboneConfig::Vit(config) => Self::Vit(Vit::new(&VitArch::from_config(config, image_size)?, scope)?),
        })
    }

    /// Returns the width of the features.
    #[must_use]
    pub fn dim(&self) -> usize {
        match self {
            Self::ResNet(net) => net.arch().dim(),
            Self::Vit(net) => net.arch().dim,
        }
    }

    /// Returns the vision transformer, if it is one.
    #[must_use]
    pub fn vit(&self) -> Option<&Vit> {
        match self {
            Self::ResNet(_) => None,
            Self::Vit(net) => Some(net),
        }
    }

    /// Runs the whole network.
    ///
    /// # Shapes
    /// `[batch, channels, h, w]` to [`Features`].
    #[must_use]
    pub fn forward(&self, images: Tensor<4>, pass: &mut Pass) -> Features {
        self.forward_segments(images, pass)
    }

    fn segments(&self) -> &dyn Segmented {
        match self {
            Self::ResNet(net) => net,
            Self::Vit(net) => net,
        }
    }
}

impl Segmented for Backbone {
    fn num_segments(&self) -> usize {
        self.segments().num_segments()
    }

    fn segment_name(&self, index: usize) -> String {
        self.segments().segment_name(index)
    }

    fn segment_of(&self, path: &str) -> usize {
        self.segments().segment_of(path)
    }

    fn forward_segment(&self, index: usize, x: Boundary, pass: &mut Pass) -> Boundary {
        self.segments().forward_segment(index, x, pass)
    }
}

/// Applies the same expression to whichever network it is.
macro_rules! each {
    ($backbone:expr, $net:ident => $value:expr) => {
        match $backbone {
            Self::ResNet($net) => $value,
            Self::Vit($net) => $value,
        }
    };
    ($backbone:expr, map $net:ident => $value:expr) => {
        match $backbone {
            Self::ResNet($net) => Self::ResNet($value),
            Self::Vit($net) => Self::Vit($value),
        }
    };
}

impl Module for Backbone {
    fn collect_devices(&self, devices: Devices) -> Devices {
        each!(self, net => net.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        each!(self, map net => net.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        each!(self, map net => net.to_device(device))
    }

    fn train(self) -> Self {
        each!(self, map net => net.train())
    }

    fn valid(&self) -> Self {
        each!(self, map net => net.valid())
    }

    fn materialize(self) -> Self {
        each!(self, map net => net.materialize())
    }

    fn visit<Visitor: ModuleVisitor>(&self, visitor: &mut Visitor) {
        each!(self, net => net.visit(visitor));
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        each!(self, map net => net.map(mapper))
    }
}

impl ModuleDisplayDefault for Backbone {
    fn content(&self, content: Content) -> Option<Content> {
        each!(self, net => net.content(content))
    }
}

impl ModuleDisplay for Backbone {}
