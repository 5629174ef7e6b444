//! `ConvNeXt` with timm's structure and key names.
//!
//! Liu et al., 2022, <https://arxiv.org/abs/2201.03545>; official code facebookresearch/ConvNeXt `models/convnext.py`, names and options of timm's
//! `convnext.py`. Weights are drawn from a truncated normal of deviation 0.02, biases start at zero. Maps are channels-last inside:
//! a block's norm and MLP go over rows of pixels. Not here: timm's overlapping stems, dilation, 1x1 convolutions as MLP (the same
//! function), and `ConvNeXt` V2's response normalisation.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::block::{LinearInit, Mlp};
use super::config::{ConvNextConfig, MlpKind};
use super::error::ConfigError;
use super::layers::{Conv2d, ConvArch, DepthwiseConv, DropPath, LayerNorm, Linear};
use super::pass::Pass;
use super::scope::{Init, Scope};
use super::segment::{Boundary, Features, Segmented};
use crate::ops;

const WEIGHT: Init = Init::TruncatedNormal(0.02);

/// Structure of a `ConvNeXt`.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvNextArch {
    /// Blocks of each stage.
    pub depths: Vec<usize>,
    /// Channels of each stage.
    pub dims: Vec<usize>,
    /// Side of the stem's patches.
    pub patch: usize,
    /// The first stage shrinks its input, too (timm: with a stem of 2 px; Hugging Face: never).
    pub shrink_first: bool,
    /// Side of the depthwise convolutions, odd.
    pub kernel: usize,
    /// Initial LayerScale.
    pub layer_scale: Option<f64>,
    /// Stochastic depth rate of the last block.
    pub drop_path: f64,
    /// Channels of the images.
    pub channels: usize,
    /// Outputs of the classifier `head.fc`; 0: no classifier.
    pub num_classes: usize,
    /// Epsilon of the layer norms.
    pub eps: f64,
    /// Epsilon of the norm behind the pooling (Hugging Face: 1e-12).
    pub head_eps: f64,
}

impl ConvNextArch {
    /// Resolves a recipe's table.
    #[must_use]
    pub fn from_config(config: &ConvNextConfig) -> Self {
        let (depths, dims) = config.sizes();
        Self {
            depths: depths.to_vec(),
            dims: dims.to_vec(),
            patch: config.patch,
            shrink_first: config.patch == 2,
            kernel: config.kernel,
            layer_scale: (config.layer_scale > 0.0).then_some(config.layer_scale),
            drop_path: config.drop_path,
            channels: 3,
            num_classes: 0,
            eps: 1e-6,
            head_eps: 1e-6,
        }
    }

    /// Returns the width of the features.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dims.last().copied().unwrap_or(0)
    }

    /// Checks that a network can be built.
    ///
    /// # Errors
    /// Names the key of the `[backbone.convnext]` table that is wrong.
    pub fn check(&self) -> Result<(), ConfigError> {
        let fail = |key: &str, problem: String, hint: &str| {
            Err(ConfigError::new(&format!("backbone.convnext.{key}"), problem, hint))
        };
        if self.depths.is_empty() || self.depths.contains(&0) {
            return fail("depths", format!("{:?} leaves a stage without blocks", self.depths), "use 1 or more in each");
        }
        if self.dims.len() != self.depths.len() || self.dims.contains(&0) {
            let (dims, stages) = (&self.dims, self.depths.len());
            return fail("dims", format!("{dims:?} are not the channels of {stages} stages"), "use 1 or more in each");
        }
        if self.patch == 0 {
            return fail("patch", "0 is too small".to_owned(), "4 is usual, 1 suits images of about 32 px");
        }
        if self.kernel.is_multiple_of(2) {
            return fail("kernel", format!("{} is even and has no middle", self.kernel), "7 is usual");
        }
        if !(0.0..1.0).contains(&self.drop_path) {
            return fail("drop_path", format!("{} is no probability below 1", self.drop_path), "0.1 is usual");
        }
        Ok(())
    }

    /// Returns the smallest side of images of which a pixel reaches the last stage.
    #[must_use]
    pub fn min_image(&self) -> usize {
        (0..self.depths.len()).fold(self.patch, |side, stage| side.saturating_mul(self.stride(stage)))
    }

    /// Checks that square images leave something after the last stage.
    ///
    /// # Errors
    /// Names the key to change.
    pub fn check_image(&self, side: usize) -> Result<(), ConfigError> {
        let least = self.min_image();
        if side >= least {
            return Ok(());
        }
        let problem = format!("stem and stages shrink images {least} times, and these have {side} px");
        Err(ConfigError::new("backbone.convnext.patch", problem, "use larger images, or a smaller patch"))
    }

    /// How many times a stage shrinks its input before its blocks.
    fn stride(&self, stage: usize) -> usize {
        if stage > 0 || self.shrink_first { 2 } else { 1 }
    }

    fn num_blocks(&self) -> usize {
        self.depths.iter().sum()
    }
}

/// Depthwise convolution, norm and MLP, beside a shortcut.
#[derive(Module, Debug)]
pub struct ConvNextBlock {
    /// Scale of the branch, `[dim]`.
    pub gamma: Option<Param<Tensor<1>>>,
    /// Depthwise convolution.
    pub conv_dw: DepthwiseConv,
    /// Norm of each pixel.
    pub norm: LayerNorm,
    /// MLP of each pixel.
    pub mlp: Mlp,
    #[module(skip)]
    drop_path: DropPath,
}

impl ConvNextBlock {
    /// Builds block `index` of the network, whose branch is dropped with probability `drop_rate` while training.
    fn new(arch: &ConvNextArch, dim: usize, index: usize, drop_rate: f64, scope: &Scope) -> Self {
        let init = LinearInit::TruncatedNormal(0.02);
        Self {
            gamma: arch.layer_scale.map(|scale| scope.param("gamma", [dim], Init::Constant(scale))),
            conv_dw: DepthwiseConv::new(dim, arch.kernel, WEIGHT, &scope.enter("conv_dw")),
            norm: LayerNorm::new(dim, arch.eps, &scope.enter("norm")),
            mlp: Mlp::new(dim, 4 * dim, MlpKind::Gelu, init, &scope.enter("mlp")),
            drop_path: DropPath::new(drop_rate, index as u64),
        }
    }

    /// Returns the rate at which the branch is dropped while training.
    #[must_use]
    pub fn drop_path(&self) -> f64 {
        self.drop_path.rate()
    }

    /// `[batch, h, w, dim]` to the same.
    fn forward_nhwc(&self, x: Tensor<4>, pass: &Pass) -> Tensor<4> {
        let [batch, height, width, dim] = x.dims();
        let rows = |x: Tensor<4>| x.reshape([batch, height * width, dim]);
        let y = self.norm.forward(rows(self.conv_dw.forward_nhwc(x.clone())));
        let scale = self.gamma.as_ref().map(Param::val);
        let y = self.drop_path.add(rows(x), pass, |residual| self.mlp.forward(y, scale, residual));
        y.reshape([batch, height, width, dim])
    }
}

/// Blocks of one size, after a norm and a convolution that shrink what comes in.
#[derive(Module, Debug)]
pub struct ConvNextStage {
    /// Norm and convolution.
    pub downsample: Option<(LayerNorm, Conv2d)>,
    /// Blocks.
    pub blocks: Vec<ConvNextBlock>,
}

/// Norm behind the pooling, and the classifier.
#[derive(Module, Debug)]
struct ConvNextHead {
    norm: LayerNorm,
    fc: Option<Linear>,
}

/// A `ConvNeXt`. Its module paths are timm's keys.
#[derive(Module, Debug)]
pub struct ConvNext {
    stem: (Conv2d, LayerNorm),
    stages: Vec<ConvNextStage>,
    head: ConvNextHead,
    #[module(skip)]
    arch: ConvNextArch,
}

impl ConvNext {
    /// Builds a network.
    ///
    /// # Errors
    /// When the sizes do not fit together ([`ConvNextArch::check`]).
    pub fn new(arch: &ConvNextArch, scope: &Scope) -> Result<Self, ConfigError> {
        arch.check()?;
        let last = (arch.num_blocks() - 1).max(1) as f64;
        let norm = |dim, scope: &Scope| LayerNorm::new(dim, arch.eps, scope);
        let conv = |inputs, outputs, side, scope: &Scope| {
            let conv = ConvArch { inputs, outputs, kernel: side, stride: side, padding: 0 };
            Conv2d::new(conv, WEIGHT, Some(Init::Zeros), scope)
        };
        let (mut stages, mut index, mut inputs) = (Vec::new(), 0, arch.dims[0]);
        for (stage, (&depth, &dim)) in arch.depths.iter().zip(&arch.dims).enumerate() {
            let scope = scope.enter("stages").enter(stage);
            let stride = arch.stride(stage);
            let downsample = (stride > 1).then(|| {
                let scope = scope.enter("downsample");
                (norm(inputs, &scope.enter(0)), conv(inputs, dim, stride, &scope.enter(1)))
            });
            let block = |block: usize| {
                let (index, scope) = (index + block, scope.enter("blocks").enter(block));
                ConvNextBlock::new(arch, dim, index, arch.drop_path * index as f64 / last, &scope)
            };
            stages.push(ConvNextStage { downsample, blocks: (0..depth).map(block).collect() });
            (index, inputs) = (index + depth, dim);
        }
        let (stem, head) = (scope.enter("stem"), scope.enter("head"));
        let classifier = || Linear::new(arch.dim(), arch.num_classes, WEIGHT, Some(Init::Zeros), &head.enter("fc"));
        Ok(Self {
            stem: (conv(arch.channels, arch.dims[0], arch.patch, &stem.enter(0)), norm(arch.dims[0], &stem.enter(1))),
            stages,
            head: ConvNextHead {
                norm: LayerNorm::new(arch.dim(), arch.head_eps, &head.enter("norm")),
                fc: (arch.num_classes > 0).then(classifier),
            },
            arch: arch.clone(),
        })
    }

    /// Returns the structure.
    #[must_use]
    pub fn arch(&self) -> &ConvNextArch {
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
        self.head.fc.as_ref().map(|fc| fc.forward(pooled))
    }

    /// Stage and block of segment `index`; nothing for the stem and the head.
    fn block_at(&self, index: usize) -> Option<(usize, usize)> {
        let mut block = index.checked_sub(1)?;
        for (stage, &depth) in self.arch.depths.iter().enumerate() {
            if block < depth {
                return Some((stage, block));
            }
            block -= depth;
        }
        None
    }
}

impl Segmented for ConvNext {
    fn num_segments(&self) -> usize {
        2 + self.arch.num_blocks()
    }

    fn segment_name(&self, index: usize) -> String {
        match self.block_at(index) {
            Some((stage, block)) => format!("stages.{stage}.blocks.{block}"),
            None if index == 0 => "stem".to_owned(),
            None => "head".to_owned(),
        }
    }

    fn segment_of(&self, path: &str) -> usize {
        let last = self.num_segments() - 1;
        if path.starts_with("head.") {
            return last;
        }
        // what shrinks belongs to the first block behind it
        let path = path.replace(".downsample.", ".blocks.0.");
        (1..last).find(|&index| path.starts_with(&format!("{}.", self.segment_name(index)))).unwrap_or(0)
    }

    fn forward_segment(&self, index: usize, x: Boundary, pass: &mut Pass) -> Boundary {
        let x = ops::to_nhwc(x.into_map()); // a view, except for images
        Boundary::Map(ops::to_nchw(match self.block_at(index) {
            Some((stage, block)) => {
                let stage = &self.stages[stage];
                let x = match &stage.downsample {
                    Some((norm, conv)) if block == 0 => conv.forward_nhwc(norm.forward(x)),
                    _ => x,
                };
                stage.blocks[block].forward_nhwc(x, pass)
            }
            None if index == 0 => self.stem.1.forward(self.stem.0.forward_nhwc(x)),
            None => {
                let pooled = self.head.norm.forward(ops::mean_pool_nhwc(x));
                return Boundary::Features(Features { pooled, patches: None });
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::model::params::Layout;

    fn config(text: &str) -> ConvNextConfig {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn the_tiny_one_has_the_published_number_of_parameters() {
        let arch = ConvNextArch { num_classes: 1000, ..ConvNextArch::from_config(&config("")) };
        let net = ConvNext::new(&arch, &Scope::new(0, &Device::flex())).unwrap();
        assert_eq!(Layout::of(&net).num_weights(), 28_589_128);
    }

    #[test]
    fn named_sizes_are_those_of_the_paper() {
        let sizes = |text: &str| config(text).sizes();
        assert_eq!(sizes("size = \"small\""), ([3, 3, 27, 3], [96, 192, 384, 768]));
        assert_eq!(sizes("size = \"base\"\ndepths = [1, 2, 3, 4]"), ([1, 2, 3, 4], [128, 256, 512, 1024]));
        assert_eq!(ConvNextArch::from_config(&config("size = \"large\"")).dim(), 1536);
    }

    #[test]
    fn paths_are_the_keys_of_timm() {
        let config = config("depths = [1, 1, 1, 1]\ndims = [4, 4, 4, 4]\npatch = 2");
        let arch = ConvNextArch { num_classes: 2, ..ConvNextArch::from_config(&config) };
        let net = ConvNext::new(&arch, &Scope::new(0, &Device::flex())).unwrap();
        let mut expected = Vec::new();
        let mut layer = |name: &str| expected.extend(["weight", "bias"].map(|leaf| format!("{name}.{leaf}")));
        layer("stem.0");
        layer("stem.1");
        for stage in 0..4 {
            layer(&format!("stages.{stage}.downsample.0"));
            layer(&format!("stages.{stage}.downsample.1"));
            for part in ["conv_dw", "norm", "mlp.fc1", "mlp.fc2"] {
                layer(&format!("stages.{stage}.blocks.0.{part}"));
            }
        }
        layer("head.norm");
        layer("head.fc");
        expected.extend((0..4).map(|stage| format!("stages.{stage}.blocks.0.gamma")));
        expected.sort();
        let mut paths: Vec<String> = Layout::of(&net).entries().iter().map(|entry| entry.path.clone()).collect();
        paths.sort();
        assert_eq!(paths, expected);
        assert_eq!(arch.min_image(), 32, "as with a stem of 4 px");
    }

    #[test]
    fn stochastic_depth_grows_linearly_over_all_stages() {
        let config = config("depths = [1, 1, 2, 1]\ndims = [4, 4, 4, 4]\ndrop_path = 0.2");
        let net = ConvNext::new(&ConvNextArch::from_config(&config), &Scope::new(0, &Device::flex())).unwrap();
        let rates: Vec<f64> = net.stages.iter().flat_map(|stage| &stage.blocks).map(ConvNextBlock::drop_path).collect();
        assert!(rates.iter().zip([0.0, 0.05, 0.1, 0.15, 0.2]).all(|(a, b)| (a - b).abs() < 1e-12), "{rates:?}");
    }

    #[test]
    fn errors_name_the_key_the_value_and_the_fix() {
        let fail = |text: &str| ConvNextArch::from_config(&config(text)).check().unwrap_err().to_string();
        assert_eq!(
            fail("depths = [1, 0, 1, 1]"),
            "`backbone.convnext.depths`: [1, 0, 1, 1] leaves a stage without blocks\nhint: use 1 or more in each"
        );
        assert!(fail("dims = [1, 2, 3, 0]").starts_with("`backbone.convnext.dims`: [1, 2, 3, 0] are not"));
        assert!(fail("kernel = 4").starts_with("`backbone.convnext.kernel`: 4 is even"));
        assert!(fail("patch = 0").starts_with("`backbone.convnext.patch`"));
        assert!(fail("drop_path = 1.0").starts_with("`backbone.convnext.drop_path`"));
        let small = ConvNextArch::from_config(&config("")).check_image(31).unwrap_err().to_string();
        assert!(small.starts_with("`backbone.convnext.patch`: stem and stages shrink images 32 times"), "{small}");
    }
}
