//! Residual networks with torchvision's structure and key names.
//!
//! He, Zhang, Ren, Sun, 2015, <https://arxiv.org/abs/1512.03385>; torchvision's variant puts the stride of a bottleneck into its 3x3
//! convolution ("v1.5"). Convolutions are drawn from `N(0, 2 / fan_out)` (He et al., 2015, <https://arxiv.org/abs/1502.01852>).

use burn::module::Module;
use burn::tensor::Tensor;

use super::config::{ResNetConfig, Stem};
use super::error::ConfigError;
use super::layers::{Affine, BatchNorm, Conv2d, ConvArch, Linear};
use super::pass::Pass;
use super::scope::{Init, Scope};
use super::segment::{Boundary, Features, Segmented};
use crate::ops;

/// Structure of a residual network.
#[derive(Clone, Debug, PartialEq)]
pub struct ResNetArch {
    /// Kind of every block.
    pub block: ResidualKind,
    /// Blocks of each stage.
    pub layers: Vec<usize>,
    /// Channels of each stage; a bottleneck puts out four times as many.
    pub planes: Vec<usize>,
    /// Channels of the stem.
    pub stem_planes: usize,
    /// First layers.
    pub stem: Stem,
    /// Channels of the images.
    pub channels: usize,
    /// Outputs of the classifier `fc`; 0: no classifier.
    pub num_classes: usize,
    /// The last norm of each block starts with a scale of zero.
    pub zero_init_residual: bool,
}

/// Kind of a residual block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResidualKind {
    /// Two 3x3 convolutions.
    Basic,
    /// 1x1, 3x3 and 1x1 convolutions, the last with four times the channels.
    Bottleneck,
}

impl ResidualKind {
    /// Output channels as a multiple of the inner ones.
    #[must_use]
    pub fn expansion(self) -> usize {
        match self {
            Self::Basic => 1,
            Self::Bottleneck => 4,
        }
    }
}

impl ResNetArch {
    /// Resolves a recipe's table.
    ///
    /// # Errors
    /// When the depth is unknown or the width leaves no channels.
    pub fn from_config(config: &ResNetConfig) -> Result<Self, ConfigError> {
        let (block, layers) = match config.depth {
            18 => (ResidualKind::Basic, [2, 2, 2, 2]),
            34 => (ResidualKind::Basic, [3, 4, 6, 3]),
            50 => (ResidualKind::Bottleneck, [3, 4, 6, 3]),
            101 => (ResidualKind::Bottleneck, [3, 4, 23, 3]),
            152 => (ResidualKind::Bottleneck, [3, 8, 36, 3]),
            depth => {
                return Err(ConfigError::new(
                    "backbone.resnet.depth",
                    format!("no residual network of depth {depth}"),
                    "set it to 18, 34, 50, 101 or 152",
                ));
            }
        };
        let base = (64.0 * config.width).round();
        if !(1.0..=4096.0).contains(&base) {
            return Err(ConfigError::new(
                "backbone.resnet.width",
                format!("{} gives {base} channels in the first stage, 1 to 4096 are possible", config.width),
                "1 gives the usual 64 channels, 0.25 gives 16",
            ));
        }
        let base = base as usize;
        Ok(Self {
            block,
            layers: layers.to_vec(),
            planes: (0..4).map(|stage| base << stage).collect(),
            stem_planes: base,
            stem: config.stem,
            channels: 3,
            num_classes: 0,
            zero_init_residual: config.zero_init_residual,
        })
    }

    /// Returns the width of the features.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.block.expansion() * self.planes.last().copied().unwrap_or(self.stem_planes)
    }
}

/// A block with its shortcut.
#[derive(Module, Debug)]
pub struct ResidualBlock {
    /// First convolution.
    pub conv1: Conv2d,
    /// Its norm.
    pub bn1: BatchNorm,
    /// Second convolution.
    pub conv2: Conv2d,
    /// Its norm.
    pub bn2: BatchNorm,
    /// Third convolution, of a bottleneck.
    pub conv3: Option<Conv2d>,
    /// Its norm.
    pub bn3: Option<BatchNorm>,
    /// Convolution and norm of the shortcut, where the shape changes.
    pub downsample: Option<(Conv2d, BatchNorm)>,
}

impl ResidualBlock {
    fn new(arch: &ResNetArch, inputs: usize, planes: usize, stride: usize, scope: &Scope) -> Self {
        let kind = arch.block;
        let outputs = planes * kind.expansion();
        let norm = |name, channels| BatchNorm::new(channels, Affine::Full, &scope.enter(name));
        let last_scale = if arch.zero_init_residual { Init::Zeros } else { Init::Ones };
        let last = |name, channels| BatchNorm::with_scale(channels, Affine::Full, last_scale, &scope.enter(name));
        let conv = |name, inputs, outputs, kernel, stride| conv(inputs, outputs, kernel, stride, &scope.enter(name));
        let downsample = (stride != 1 || inputs != outputs)
            .then(|| (conv("downsample.0", inputs, outputs, 1, stride), norm("downsample.1", outputs)));
        match kind {
            ResidualKind::Basic => Self {
                conv1: conv("conv1", inputs, planes, 3, stride),
                bn1: norm("bn1", planes),
                conv2: conv("conv2", planes, planes, 3, 1),
                bn2: last("bn2", planes),
                conv3: None,
                bn3: None,
                downsample,
            },
            ResidualKind::Bottleneck => Self {
                conv1: conv("conv1", inputs, planes, 1, 1),
                bn1: norm("bn1", planes),
                conv2: conv("conv2", planes, planes, 3, stride),
                bn2: norm("bn2", planes),
                conv3: Some(conv("conv3", planes, outputs, 1, 1)),
                bn3: Some(last("bn3", outputs)),
                downsample,
            },
        }
    }

    /// `[batch, h, w, channels]` to the same: both consumers of `x` and what they send back lie in memory alike.
    fn forward_nhwc(&self, x: Tensor<4>, pass: &mut Pass) -> Tensor<4> {
        let shortcut = match &self.downsample {
            Some((conv, norm)) => norm.forward(conv.forward_nhwc(x.clone()), pass),
            None => x.clone(),
        };
        let y = self.conv2.forward_after(&self.bn1, self.conv1.forward_nhwc(x), pass);
        match (&self.conv3, &self.bn3) {
            (Some(conv3), Some(bn3)) => bn3.forward_residual(conv3.forward_after(&self.bn2, y, pass), shortcut, pass),
            _ => self.bn2.forward_residual(y, shortcut, pass),
        }
    }
}

/// A convolution that keeps the size at stride 1, without bias.
fn conv(inputs: usize, outputs: usize, kernel: usize, stride: usize, scope: &Scope) -> Conv2d {
    let fan_out = outputs * kernel * kernel;
    let arch = ConvArch { inputs, outputs, kernel, stride, padding: kernel / 2 };
    Conv2d::new(arch, Init::Normal((2.0 / fan_out as f64).sqrt()), None, scope)
}

/// A residual network. Its module paths are torchvision's keys, without `num_batches_tracked`.
#[derive(Module, Debug)]
pub struct ResNet {
    conv1: Conv2d,
    bn1: BatchNorm,
    layer1: Vec<ResidualBlock>,
    layer2: Vec<ResidualBlock>,
    layer3: Vec<ResidualBlock>,
    layer4: Vec<ResidualBlock>,
    fc: Option<Linear>,
    #[module(skip)]
    arch: ResNetArch,
}

impl ResNet {
    /// Builds a network.
    ///
    /// # Panics
    /// When the structure does not have four stages.
    #[must_use]
    pub fn new(arch: &ResNetArch, scope: &Scope) -> Self {
        assert!(arch.layers.len() == 4 && arch.planes.len() == 4, "a residual network has four stages: {arch:?}");
        let stage = |index: usize| {
            let name = format!("layer{}", index + 1);
            let inputs = match index {
                0 => arch.stem_planes,
                _ => arch.planes[index - 1] * arch.block.expansion(),
            };
            let outputs = arch.planes[index] * arch.block.expansion();
            (0..arch.layers[index])
                .map(|block| {
                    let (inputs, stride) =
                        if block == 0 { (inputs, if index == 0 { 1 } else { 2 }) } else { (outputs, 1) };
                    ResidualBlock::new(arch, inputs, arch.planes[index], stride, &scope.enter(&name).enter(block))
                })
                .collect()
        };
        let (kernel, stride) = match arch.stem {
            Stem::Imagenet => (7, 2),
            Stem::Cifar => (3, 1),
        };
        Self {
            conv1: conv(arch.channels, arch.stem_planes, kernel, stride, &scope.enter("conv1")),
            bn1: BatchNorm::new(arch.stem_planes, Affine::Full, &scope.enter("bn1")),
            layer1: stage(0),
            layer2: stage(1),
            layer3: stage(2),
            layer4: stage(3),
            fc: (arch.num_classes > 0)
                .then(|| Linear::torch_default(arch.dim(), arch.num_classes, true, &scope.enter("fc"))),
            arch: arch.clone(),
        }
    }

    /// Returns the structure.
    #[must_use]
    pub fn arch(&self) -> &ResNetArch {
        &self.arch
    }

    /// Runs the whole network.
    ///
    /// # Shapes
    /// `[batch, channels, h, w]` to features `[batch, dim]`.
    #[must_use]
    pub fn forward(&self, images: Tensor<4>, pass: &mut Pass) -> Features {
        self.forward_segments(images, pass)
    }

    /// Classifies pooled features when the network has a classifier.
    ///
    /// # Shapes
    /// `[batch, dim]` to `[batch, num_classes]`.
    #[must_use]
    pub fn logits(&self, pooled: Tensor<2>) -> Option<Tensor<2>> {
        self.fc.as_ref().map(|fc| fc.forward(pooled))
    }

    fn stages(&self) -> [&[ResidualBlock]; 4] {
        [&self.layer1, &self.layer2, &self.layer3, &self.layer4]
    }

    /// Stage and block of segment `index`; nothing for the stem and the pooling.
    fn block_at(&self, index: usize) -> Option<(usize, usize)> {
        let mut block = index.checked_sub(1)?;
        for (stage, blocks) in self.stages().iter().enumerate() {
            if block < blocks.len() {
                return Some((stage, block));
            }
            block -= blocks.len();
        }
        None
    }
}

impl Segmented for ResNet {
    fn num_segments(&self) -> usize {
        2 + self.arch.layers.iter().sum::<usize>()
    }

    fn segment_name(&self, index: usize) -> String {
        match self.block_at(index) {
            Some((stage, block)) => format!("layer{}.{block}", stage + 1),
            None if index == 0 => "stem".to_owned(),
            None => "pool".to_owned(),
        }
    }

    fn segment_of(&self, path: &str) -> usize {
        let last = self.num_segments() - 1;
        if path.starts_with("fc.") {
            return last;
        }
        // the dot keeps `layer1.1` from claiming `layer1.10`
        (1..last).find(|&index| path.starts_with(&format!("{}.", self.segment_name(index)))).unwrap_or(0)
    }

    fn forward_segment(&self, index: usize, x: Boundary, pass: &mut Pass) -> Boundary {
        let x = ops::to_nhwc(x.into_map()); // a view, except for images
        Boundary::Map(ops::to_nchw(match self.block_at(index) {
            Some((stage, block)) => self.stages()[stage][block].forward_nhwc(x, pass),
            None if index == 0 => {
                let x = self.bn1.forward_relu(self.conv1.forward_nhwc(x), pass);
                match self.arch.stem {
                    Stem::Imagenet => ops::max_pool2d_nhwc(x, [3, 3], [2, 2], [1, 1]),
                    Stem::Cifar => x,
                }
            }
            None => return Boundary::Features(Features { pooled: ops::mean_pool_nhwc(x), patches: None }),
        }))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    fn config(depth: usize, width: f64) -> ResNetConfig {
        ResNetConfig { depth, width, stem: Stem::Imagenet, zero_init_residual: false }
    }

    #[test]
    fn depth_and_width_are_checked() {
        let fail = |depth, width| ResNetArch::from_config(&config(depth, width)).unwrap_err().to_string();
        assert_eq!(
            fail(20, 1.0),
            "`backbone.resnet.depth`: no residual network of depth 20\nhint: set it to 18, 34, 50, 101 or 152"
        );
        assert!(fail(18, 0.001).starts_with("`backbone.resnet.width`: 0.001 gives 0 channels"));
        assert!(fail(18, f64::NAN).starts_with("`backbone.resnet.width`"));
    }

    #[test]
    fn blocks_are_the_identity_at_first_if_asked() {
        for depth in [18, 50] {
            let config = ResNetConfig { zero_init_residual: true, ..config(depth, 0.0625) };
            let net = ResNet::new(&ResNetArch::from_config(&config).unwrap(), &Scope::new(0, &Device::flex()));
            let block = &net.layer1[1];
            let norm = block.bn3.as_ref().unwrap_or(&block.bn2);
            let scale: Vec<f32> = norm.weight.as_ref().unwrap().val().into_data().try_to_vec().unwrap();
            assert_eq!(scale, vec![0.0; scale.len()]);
            let channels = net.arch().planes[0] * net.arch().block.expansion();
            // what comes out of a rectifier: not negative
            let values: Vec<f32> = (0..2 * 4 * 4 * channels).map(|i| (i * 37 % 101) as f32 / 50.0).collect();
            let x = Tensor::<4>::from_data(TensorData::new(values, [2, 4, 4, channels]), &Device::flex());
            let y = block.forward_nhwc(x.clone(), &mut Pass::eval());
            assert_eq!(x.into_data(), y.into_data());
        }
    }

    #[test]
    fn sizes_are_those_of_the_paper() {
        let arch = |depth, width| ResNetArch::from_config(&config(depth, width)).unwrap();
        assert_eq!((arch(18, 1.0).dim(), arch(34, 0.25).dim(), arch(50, 1.0).dim()), (512, 128, 2048));
        assert_eq!(arch(50, 2.0).planes, [128, 256, 512, 1024]);
    }

    #[test]
    fn the_deep_one_has_the_published_number_of_parameters() {
        let arch = ResNetArch { num_classes: 1000, ..ResNetArch::from_config(&config(101, 1.0)).unwrap() };
        let net = ResNet::new(&arch, &Scope::new(0, &burn::tensor::Device::flex()));
        assert_eq!(crate::model::params::Layout::of(&net).num_weights(), 44_549_160);
    }
}
