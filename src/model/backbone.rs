//! The network that is pretrained, whichever it is.

use std::rc::Rc;

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor};
use burn::tensor::{Device, Tensor};

use super::config::BackboneConfig;
use super::convnext::{ConvNext, ConvNextArch};
use super::error::ConfigError;
use super::pass::Pass;
use super::recompute;
use super::resnet::{ResNet, ResNetArch};
use super::scope::Scope;
use super::segment::{Boundary, Features, Segmented};
use super::vit::Vit;
use super::vit_arch::VitArch;
use crate::ops::in_backbone;

/// A backbone.
///
/// burn's derived `Module` for an enum would put the variant's name into every parameter's path. This one does not, so that below
/// a fixed prefix the paths are the keys of torchvision and timm.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one backbone in a run, and it moves rarely")]
pub enum Backbone {
    /// Residual network.
    ResNet(ResNet),
    /// Vision transformer.
    Vit(Vit),
    /// `ConvNeXt`.
    ConvNext(ConvNext),
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
            BackboneConfig::Convnext(config) => {
                let arch = ConvNextArch::from_config(config);
                arch.check_image(image_size as usize)?;
                Self::ConvNext(ConvNext::new(&arch, scope)?)
            }
        })
    }

    /// Returns the width of the features.
    #[must_use]
    pub fn dim(&self) -> usize {
        match self {
            Self::ResNet(net) => net.arch().dim(),
            Self::Vit(net) => net.arch().dim,
            Self::ConvNext(net) => net.arch().dim(),
        }
    }

    /// Returns the vision transformer, if it is one.
    #[must_use]
    pub fn vit(&self) -> Option<&Vit> {
        match self {
            Self::Vit(net) => Some(net),
            Self::ResNet(_) | Self::ConvNext(_) => None,
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
            Self::ConvNext(net) => net,
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
        in_backbone(|| self.segments().forward_segment(index, x, pass))
    }

    /// Parts that are computed again ([`recomputed`](super::recomputed)) are runs of segments, but for the last one, which keeps next to nothing.
    fn forward_segments(&self, images: Tensor<4>, pass: &mut Pass) -> Features {
        let last = self.num_segments() - 1;
        let mut x = Boundary::Map(images);
        let Some(count) = recompute::blocks() else {
            return (0..=last).fold(x, |x, index| self.forward_segment(index, x, pass)).into_features();
        };
        let net = Rc::new(self.clone());
        for first in (0..last).step_by(count) {
            let segments = first..last.min(first + count);
            let run = move |net: &Self, x: Boundary, pass: &mut Pass| {
                segments.clone().fold(x, |x, index| net.forward_segment(index, x, pass))
            };
            x = match (x, self.vit()) {
                (Boundary::Map(map), None) => {
                    let run = move |net: &Self, map, pass: &mut Pass| run(net, Boundary::Map(map), pass).into_map();
                    Boundary::Map(recompute::part(&net, map, pass, run))
                }
                (Boundary::Map(map), Some(vit)) => {
                    let grid = vit.grid_of(&map);
                    let run =
                        move |net: &Self, map, pass: &mut Pass| run(net, Boundary::Map(map), pass).into_tokens().0;
                    Boundary::Tokens(recompute::part(&net, map, pass, run), grid)
                }
                (Boundary::Tokens(tokens, grid), _) => {
                    let run = move |net: &Self, tokens, pass: &mut Pass| {
                        run(net, Boundary::Tokens(tokens, grid), pass).into_tokens().0
                    };
                    Boundary::Tokens(recompute::part(&net, tokens, pass, run), grid)
                }
                (Boundary::Features(_), _) => unreachable!("features leave the last segment alone"),
            };
        }
        self.forward_segment(last, x, pass).into_features()
    }
}

/// Applies the same expression to whichever network it is.
macro_rules! each {
    ($backbone:expr, $net:ident => $value:expr) => {
        match $backbone {
            Self::ResNet($net) => $value,
            Self::Vit($net) => $value,
            Self::ConvNext($net) => $value,
        }
    };
    ($backbone:expr, map $net:ident => $value:expr) => {
        match $backbone {
            Self::ResNet($net) => Self::ResNet($value),
            Self::Vit($net) => Self::Vit($value),
            Self::ConvNext($net) => Self::ConvNext($value),
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

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::model::params::{Flat, Layout, read_buffers, read_gradients, read_weights, write};
    use crate::model::{Noise, PositionEmbedding, VitConfig};

    #[derive(Module, Debug)]
    struct Wrapped {
        backbone: Backbone,
    }

    fn build(text: &str, size: u32, device: &Device) -> Backbone {
        let config: BackboneConfig = toml::from_str(text).unwrap();
        Backbone::new(&config, size, &Scope::new(3, device)).unwrap()
    }

    const RESNET: &str = "[resnet]\ndepth = 18\nwidth = 0.125\nstem = \"cifar\"";
    const RESNET50: &str = "[resnet]\ndepth = 50\nwidth = 0.125";
    const CONVNEXT: &str =
        "[convnext]\ndepths = [1, 2, 1, 1]\ndims = [8, 12, 24, 32]\nlayer_scale = 0.1\ndrop_path = 0.5";
    const ROPE: &str = "[vit]\npatch = 8\ndim = 48\ndepth = 2\nheads = 4\nregisters = 2\nlayer_scale = 0.1\nmlp = \"swiglu\"\n\
                        key_bias = false\nposition = \"rope\"\ndrop_path = 0.5";
    const VIT: &str = "[vit]\npatch = 8\ndim = 48\ndepth = 2\nheads = 4\nregisters = 2\nlayer_scale = 0.1\nqk_norm = true\n\
                       drop_path = 0.5";

    fn images(batch: usize, size: usize, device: &Device) -> Tensor<4> {
        let count = batch * 3 * size * size;
        let values: Vec<f32> = (0..count).map(|i| ((i * 7919 % 1009) as f32 / 504.5) - 1.0).collect();
        Tensor::from_data(TensorData::new(values, [batch, 3, size, size]), device)
    }

    fn bits(features: Features) -> Vec<u32> {
        let mut values = features.pooled.into_data().try_to_vec::<f32>().unwrap();
        if let Some(patches) = features.patches {
            values.extend(patches.into_data().try_to_vec::<f32>().unwrap());
        }
        values.into_iter().map(f32::to_bits).collect()
    }

    fn train(batch: usize) -> Pass {
        Pass::train(Noise { seed: 1, step: 4, rows: (0..batch as u64).map(|image| (image, 0)).collect() })
    }

    #[test]
    fn paths_of_a_vit_are_the_keys_of_timm() {
        let net = Wrapped { backbone: build(&VIT.replace("depth = 2", "depth = 1"), 16, &Device::flex()) };
        let mut paths: Vec<String> = Layout::of(&net).entries().iter().map(|entry| entry.path.clone()).collect();
        paths.sort();
        let mut expected: Vec<String> = [
            "cls_token",
            "reg_token",
            "pos_embed",
            "patch_embed.proj.weight",
            "patch_embed.proj.bias",
            "blocks.0.norm1.weight",
            "blocks.0.norm1.bias",
            "blocks.0.attn.qkv.weight",
            "blocks.0.attn.qkv.bias",
            "blocks.0.attn.q_norm.weight",
            "blocks.0.attn.q_norm.bias",
            "blocks.0.attn.k_norm.weight",
            "blocks.0.attn.k_norm.bias",
            "blocks.0.attn.proj.weight",
            "blocks.0.attn.proj.bias",
            "blocks.0.ls1.gamma",
            "blocks.0.norm2.weight",
            "blocks.0.norm2.bias",
            "blocks.0.mlp.fc1.weight",
            "blocks.0.mlp.fc1.bias",
            "blocks.0.mlp.fc2.weight",
            "blocks.0.mlp.fc2.bias",
            "blocks.0.ls2.gamma",
            "norm.weight",
            "norm.bias",
        ]
        .iter()
        .map(|key| format!("backbone.{key}"))
        .collect();
        expected.sort();
        assert_eq!(paths, expected);
    }

    #[test]
    fn paths_of_a_resnet_are_the_keys_of_torchvision() {
        let net = Wrapped { backbone: build(RESNET50, 32, &Device::flex()) };
        let mut paths: Vec<String> = Layout::of(&net).entries().iter().map(|entry| entry.path.clone()).collect();
        paths.sort();
        let norm = |name: &str| ["weight", "bias", "running_mean", "running_var"].map(|leaf| format!("{name}.{leaf}"));
        let mut expected = vec!["conv1.weight".to_owned()];
        expected.extend(norm("bn1"));
        for (stage, blocks) in [3, 4, 6, 3].into_iter().enumerate() {
            for block in 0..blocks {
                let place = format!("layer{}.{block}", stage + 1);
                for index in 1..=3 {
                    expected.push(format!("{place}.conv{index}.weight"));
                    expected.extend(norm(&format!("{place}.bn{index}")));
                }
                if block == 0 {
                    expected.push(format!("{place}.downsample.0.weight"));
                    expected.extend(norm(&format!("{place}.downsample.1")));
                }
            }
        }
        let mut expected: Vec<String> = expected.iter().map(|key| format!("backbone.{key}")).collect();
        expected.sort();
        assert_eq!(paths, expected);
    }

    #[test]
    fn every_parameter_is_drawn_under_its_own_path() {
        for text in [VIT, ROPE, RESNET, RESNET50, CONVNEXT] {
            let net = build(text, 32, &Device::flex());
            let layout = Layout::of(&net);
            let weights = read_weights(&net, &layout);
            let mut seen = std::collections::HashMap::new();
            for entry in
                layout.entries().iter().filter(|entry| entry.path.ends_with(".weight") && entry.shape.len() > 1)
            {
                let first = weights[entry.offset].to_bits();
                assert_eq!(seen.insert(first, &entry.path), None, "two parameters share their draws");
            }
        }
        // The path of the draw is the module path: the same layer alone gives the same numbers.
        let net = build(VIT, 32, &Device::flex());
        let layout = Layout::of(&net);
        let entry = layout.entries().iter().find(|entry| entry.path == "blocks.1.mlp.fc2.weight").unwrap();
        let scope = Scope::new(3, &Device::flex()).enter("blocks").enter(1).enter("mlp").enter("fc2");
        let alone = scope.param("weight", [entry.shape[0], entry.shape[1]], crate::model::Init::TruncatedNormal(0.02));
        let alone: Vec<f32> = alone.val().into_data().try_to_vec().unwrap();
        assert_eq!(read_weights(&net, &layout)[entry.offset..entry.offset + entry.len], alone);
    }

    #[test]
    fn a_pass_has_the_same_bits_with_and_without_recording() {
        for (text, size) in [(VIT, 64), (ROPE, 64), (RESNET, 32), (RESNET50, 64), (CONVNEXT, 72)] {
            let plain = build(text, size, &Device::flex());
            let recorded = build(text, size, &Device::flex().autodiff());
            let size = size as usize;
            for pass in [|| Pass::eval(), || train(4)] {
                let expected = bits(plain.forward(images(4, size, &Device::flex()), &mut pass()));
                let got = recorded.forward(images(4, size, &Device::flex().autodiff()), &mut pass());
                assert!(got.pooled.is_tracked());
                assert_eq!(bits(got), expected, "{text}");
            }
        }
    }

    /// Along the gradient of all weights at once, against central differences; batch norm of few values has too sharp bends for that.
    #[test]
    fn gradients_are_slopes() {
        for (text, size) in [(VIT, 32), (ROPE, 40), (CONVNEXT, 48)] {
            let device = Device::flex().autodiff();
            let net = build(text, size, &device);
            let layout = Layout::of(&net);
            let buffers = read_buffers(&net, &layout);
            // away from the initial weights: a class token of 1e-6 in front of a norm has no slope to speak of
            let weights: Vec<f32> =
                read_weights(&net, &layout).iter().enumerate().map(|(i, w)| w + 0.1 * (i as f32 * 0.7).sin()).collect();
            let with = |weights: Vec<f32>| {
                write(net.clone(), &layout, &Flat::upload(weights, buffers.clone(), &device), &device)
            };
            let loss = |net: &Backbone| {
                let pooled = net.forward(images(4, size as usize, &device), &mut train(4)).pooled;
                let count = pooled.shape().num_elements();
                let probe: Vec<f32> = (0..count).map(|i| (i as f32 * 0.9).sin()).collect();
                (pooled.reshape([count]) * Tensor::<1>::from_data(TensorData::new(probe, [count]), &device)).sum()
            };
            let net = with(weights.clone());
            let gradient = read_gradients(&net, &layout, &mut loss(&net).backward()).concat();
            let length = gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
            let at = |step: f64| {
                let moved = weights.iter().zip(&gradient).map(|(w, g)| w + (step * f64::from(*g) / length) as f32);
                f64::from(loss(&with(moved.collect())).into_scalar::<f32>())
            };
            let step = 1e-3;
            let slope = (at(step) - at(-step)) / (2.0 * step);
            assert!((slope / length - 1.0).abs() < 0.02, "{text}: slope {slope}, gradient {length}");
        }
    }

    #[test]
    fn weights_go_out_and_in() {
        for text in [VIT, ROPE, RESNET, CONVNEXT] {
            let device = Device::flex().autodiff();
            let net = build(text, 32, &device);
            let layout = Layout::of(&net);
            let (weights, buffers) = (read_weights(&net, &layout), read_buffers(&net, &layout));
            let other = {
                let config: BackboneConfig = toml::from_str(text).unwrap();
                Backbone::new(&config, 32, &Scope::new(99, &device)).unwrap()
            };
            let other_layout = Layout::of(&other);
            let copy = write(
                other,
                &other_layout,
                &Flat::upload(weights.clone(), buffers.clone(), &Device::flex()),
                &Device::flex(),
            );
            assert_eq!(Layout::of(&copy), other_layout, "ids and kinds stay");
            let expected = bits(net.forward(images(2, 32, &device), &mut Pass::eval()));
            assert_eq!(bits(copy.forward(images(2, 32, &Device::flex()), &mut Pass::eval())), expected);
        }
    }

    #[test]
    fn segments_are_the_network_and_own_its_parameters() {
        for text in [VIT, ROPE, RESNET, RESNET50, CONVNEXT] {
            let device = Device::flex();
            let net = build(text, 32, &device);
            let layout = Layout::of(&net);
            let (weights, buffers) = (read_weights(&net, &layout), read_buffers(&net, &layout));
            // Doubling a parameter must change the output of its own segment and of none before.
            let run = |net: &Backbone| -> Vec<Vec<u32>> {
                let mut at = Boundary::Map(images(2, 32, &device));
                let mut pass = Pass::eval();
                let mut seen = Vec::new();
                for index in 0..net.num_segments() {
                    at = net.forward_segment(index, at, &mut pass);
                    seen.push(match at.clone() {
                        Boundary::Map(map) => map.into_data().try_to_vec::<f32>().unwrap(),
                        Boundary::Tokens(tokens, _) => tokens.into_data().try_to_vec::<f32>().unwrap(),
                        Boundary::Features(features) => features.pooled.into_data().try_to_vec::<f32>().unwrap(),
                    });
                }
                seen.into_iter().map(|values| values.into_iter().map(f32::to_bits).collect()).collect()
            };
            let reference = run(&net);
            let mut owned = vec![0; net.num_segments()];
            for entry in layout.entries().iter().filter(|entry| entry.path.ends_with("weight")) {
                let mut changed = weights.clone();
                changed[entry.offset..entry.offset + entry.len].iter_mut().for_each(|w| *w = *w * 1.5 + 0.01);
                let outputs = run(&write(
                    net.clone(),
                    &layout,
                    &Flat::upload(changed.clone(), buffers.clone(), &device),
                    &device,
                ));
                let first = (0..outputs.len()).find(|&index| outputs[index] != reference[index]);
                assert_eq!(first, Some(net.segment_of(&entry.path)), "{}", entry.path);
                owned[net.segment_of(&entry.path)] += 1;
            }
            let idle: Vec<_> = (0..owned.len()).filter(|&i| owned[i] == 0).map(|i| net.segment_name(i)).collect();
            assert!(idle.is_empty() || idle == ["pool"], "{idle:?}");
        }
    }

    #[test]
    fn fixed_positions_are_buffers() {
        let config = VitConfig {
            position: PositionEmbedding::Sincos,
            ..toml::from_str("patch = 8\ndim = 48\nheads = 4").unwrap()
        };
        let net = Backbone::new(&BackboneConfig::Vit(config), 32, &Scope::new(0, &Device::flex().autodiff())).unwrap();
        let layout = Layout::of(&net);
        assert_eq!(layout.num_buffers(), 17 * 48);
        assert!(read_buffers(&net, &layout)[..48].iter().all(|&v| v == 0.0), "none for the class token");
    }
}
