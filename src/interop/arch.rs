//! The structure of a network, read off the shapes of its tensors, and the tensors of a structure.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::error::Refusal;
use super::layouts::{Family, Names};
use crate::model::position::Bicubic;
use crate::model::{
    Backbone, BackboneConfig, ConfigError, ConvNext, ConvNextArch, ConvNextConfig, ConvNextSize, MlpKind, Pool,
    PositionEmbedding, ResNet, ResNetArch, ResNetConfig, ResidualKind, Scope, Stem, Vit, VitArch, VitConfig, VitInit,
    VitSize,
};

/// Structure of a backbone.
#[derive(Clone, Debug, PartialEq)]
pub enum Arch {
    /// Vision transformer.
    Vit(VitArch),
    /// Residual network.
    ResNet(ResNetArch),
    /// `ConvNeXt`.
    ConvNext(ConvNextArch),
}

/// What the caller knows and no tensor tells.
#[derive(Clone, Debug, Default)]
pub struct Hints {
    /// Attention heads.
    pub heads: Option<usize>,
    /// Height and width of the images that the position embedding is made for.
    pub image: Option<[usize; 2]>,
}

/// A structure, and what was assumed.
#[derive(Clone, Debug)]
pub(super) struct Inferred {
    pub(super) arch: Arch,
    /// Assumptions, a sentence each.
    pub(super) notes: Vec<String>,
    /// The number of heads was read, not assumed.
    pub(super) heads_known: bool,
}

pub(super) type Shapes = BTreeMap<String, Vec<usize>>;

impl Arch {
    /// Resolves the backbone of a recipe for square images.
    ///
    /// # Errors
    /// When its sizes do not fit together.
    pub fn from_config(config: &BackboneConfig, image_size: u32) -> Result<Self, ConfigError> {
        Ok(match config {
            BackboneConfig::Vit(config) => Self::Vit(VitArch::from_config(config, image_size)?),
            BackboneConfig::Resnet(config) => Self::ResNet(ResNetArch::from_config(config)?),
            BackboneConfig::Convnext(config) => Self::ConvNext(ConvNextArch::from_config(config)),
        })
    }

    /// Builds the network.
    ///
    /// # Errors
    /// When its sizes do not fit together.
    pub fn build(&self, scope: &Scope) -> Result<Backbone, ConfigError> {
        Ok(match self {
            Self::Vit(arch) => Backbone::Vit(Vit::new(arch, scope)?),
            Self::ResNet(arch) => Backbone::ResNet(ResNet::new(arch, scope)),
            Self::ConvNext(arch) => Backbone::ConvNext(ConvNext::new(arch, scope)?),
        })
    }

    /// Describes it in a few words.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Vit(vit) => {
                let mut text = format!(
                    "vision transformer: width {}, depth {}, {} heads, patch {}, {} x {} patches",
                    vit.dim,
                    vit.depth,
                    vit.heads,
                    vit.patch,
                    vit.grid()[0],
                    vit.grid()[1]
                );
                let mut add = |there: bool, words: &str| {
                    if there {
                        text += ", ";
                        text += words;
                    }
                };
                add(vit.position == PositionEmbedding::Rope, "rotary positions");
                add(!vit.class_token, "no class token");
                add(vit.registers > 0, &format!("{} registers", vit.registers));
                add(vit.layer_scale.is_some(), "LayerScale");
                add(vit.mlp == MlpKind::Swiglu, "SwiGLU");
                add(vit.mlp == MlpKind::Geglu, "GEGLU");
                add(vit.qk_norm, "norms of queries and keys");
                add(vit.pre_norm, "a norm before the blocks");
                add(vit.fc_norm, "the final norm after pooling");
                add(!vit.qkv_bias, "no biases of queries, keys and values");
                add(vit.qkv_bias && !vit.key_bias, "no bias of keys");
                text
            }
            Self::ResNet(net) => format!(
                "residual network: {} blocks {:?}, channels {:?}, stem {}",
                match net.block {
                    ResidualKind::Basic => "basic",
                    ResidualKind::Bottleneck => "bottleneck",
                },
                net.layers,
                net.planes,
                match net.stem {
                    Stem::Imagenet => "7x7 with pooling",
                    Stem::Cifar => "3x3",
                }
            ),
            Self::ConvNext(net) => {
                let scale = if net.layer_scale.is_some() { ", LayerScale" } else { "" };
                format!(
                    "ConvNeXt: blocks {:?}, channels {:?}, patch {}, kernel {}{scale}",
                    net.depths, net.dims, net.patch, net.kernel
                )
            }
        }
    }

    /// Returns the `[backbone]` table that builds it.
    ///
    /// # Errors
    /// In words, when there is none: recipes know fewer structures.
    pub fn config(&self) -> Result<BackboneConfig, String> {
        let config = match self {
            Self::Vit(vit) => BackboneConfig::Vit(vit_config(vit)?),
            Self::ResNet(net) => BackboneConfig::Resnet(resnet_config(net)?),
            Self::ConvNext(net) => BackboneConfig::Convnext(convnext_config(net)?),
        };
        let side = self.image().map_or(32, |[height, _]| height);
        match Self::from_config(&config, u32::try_from(side).unwrap_or(u32::MAX)) {
            Ok(again) if again.tensors() == self.tensors() => Ok(config),
            Ok(_) => Err("recipes have no backbone of these sizes".to_owned()),
            Err(error) => Err(error.problem),
        }
    }

    /// Height and width of the images of a vision transformer.
    pub(super) fn image(&self) -> Option<[usize; 2]> {
        match self {
            Self::Vit(vit) => Some(vit.image),
            _ => None,
        }
    }

    /// Lists paths and shapes of the tensors of the network, as its modules have them.
    #[must_use]
    pub fn tensors(&self) -> BTreeMap<String, Vec<usize>> {
        let mut out = Tensors::default();
        match self {
            Self::Vit(arch) => out.vit(arch),
            Self::ResNet(arch) => out.resnet(arch),
            Self::ConvNext(arch) => out.convnext(arch),
        }
        out.0
    }
}

// ---- the tensors of a structure --------------------------------------------------------------------------------------

#[derive(Default)]
struct Tensors(BTreeMap<String, Vec<usize>>);

impl Tensors {
    fn put(&mut self, path: impl Into<String>, shape: &[usize]) {
        self.0.insert(path.into(), shape.to_vec());
    }

    /// A layer with a weight of this shape and a bias of its first side.
    fn layer(&mut self, path: &str, shape: &[usize]) {
        self.put(format!("{path}.weight"), shape);
        self.put(format!("{path}.bias"), &shape[..1]);
    }

    fn batch_norm(&mut self, path: &str, channels: usize) {
        for leaf in ["weight", "bias", "running_mean", "running_var"] {
            self.put(format!("{path}.{leaf}"), &[channels]);
        }
    }

    fn vit(&mut self, arch: &VitArch) {
        let VitArch { dim, hidden, .. } = *arch;
        if arch.class_token {
            self.put("cls_token", &[1, 1, dim]);
        }
        if arch.registers > 0 {
            self.put("reg_token", &[1, arch.registers, dim]);
        }
        if arch.position != PositionEmbedding::Rope {
            let prefix = if arch.prefix_positions { arch.num_prefix() } else { 0 };
            self.put("pos_embed", &[1, prefix + arch.grid()[0] * arch.grid()[1], dim]);
        }
        self.put("patch_embed.proj.weight", &[dim, arch.channels, arch.patch, arch.patch]);
        if arch.pre_norm {
            self.layer("norm_pre", &[dim]);
        } else {
            self.put("patch_embed.proj.bias", &[dim]);
        }
        for block in 0..arch.depth {
            let at = |name: &str| format!("blocks.{block}.{name}");
            self.layer(&at("norm1"), &[dim]);
            self.put(at("attn.qkv.weight"), &[3 * dim, dim]);
            if arch.qkv_bias {
                self.put(at("attn.qkv.bias"), &[3 * dim]);
            }
            if arch.qk_norm {
                self.layer(&at("attn.q_norm"), &[dim / arch.heads]);
                self.layer(&at("attn.k_norm"), &[dim / arch.heads]);
            }
            self.layer(&at("attn.proj"), &[dim, dim]);
            self.layer(&at("norm2"), &[dim]);
            self.layer(&at("mlp.fc1"), &[hidden, dim]);
            self.layer(&at("mlp.fc2"), &[dim, if arch.mlp.is_gated() { hidden / 2 } else { hidden }]);
            if arch.layer_scale.is_some() {
                self.put(at("ls1.gamma"), &[dim]);
                self.put(at("ls2.gamma"), &[dim]);
            }
        }
        self.layer(if arch.fc_norm { "fc_norm" } else { "norm" }, &[dim]);
    }

    fn resnet(&mut self, arch: &ResNetArch) {
        let side = match arch.stem {
            Stem::Imagenet => 7,
            Stem::Cifar => 3,
        };
        self.put("conv1.weight", &[arch.stem_planes, arch.channels, side, side]);
        self.batch_norm("bn1", arch.stem_planes);
        let mut inputs = arch.stem_planes;
        for (stage, (&blocks, &planes)) in arch.layers.iter().zip(&arch.planes).enumerate() {
            let outputs = planes * arch.block.expansion();
            for block in 0..blocks {
                let at = |name: &str| format!("layer{}.{block}.{name}", stage + 1);
                let convolutions: &[[usize; 3]] = match arch.block {
                    ResidualKind::Basic => &[[planes, inputs, 3], [planes, planes, 3]],
                    ResidualKind::Bottleneck => &[[planes, inputs, 1], [planes, planes, 3], [outputs, planes, 1]],
                };
                for (index, &[to, from, side]) in convolutions.iter().enumerate() {
                    self.put(at(&format!("conv{}.weight", index + 1)), &[to, from, side, side]);
                    self.batch_norm(&at(&format!("bn{}", index + 1)), to);
                }
                if block == 0 && (stage > 0 || inputs != outputs) {
                    self.put(at("downsample.0.weight"), &[outputs, inputs, 1, 1]);
                    self.batch_norm(&at("downsample.1"), outputs);
                }
                inputs = outputs;
            }
        }
    }

    fn convnext(&mut self, arch: &ConvNextArch) {
        let first = arch.dims.first().copied().unwrap_or(0);
        self.layer("stem.0", &[first, arch.channels, arch.patch, arch.patch]);
        self.layer("stem.1", &[first]);
        let mut inputs = first;
        for (stage, (&depth, &dim)) in arch.depths.iter().zip(&arch.dims).enumerate() {
            let at = |name: &str| format!("stages.{stage}.{name}");
            if stage > 0 || arch.shrink_first {
                self.layer(&at("downsample.0"), &[inputs]);
                self.layer(&at("downsample.1"), &[dim, inputs, 2, 2]);
            }
            for block in 0..depth {
                let at = |name: &str| format!("stages.{stage}.blocks.{block}.{name}");
                if arch.layer_scale.is_some() {
                    self.put(at("gamma"), &[dim]);
                }
                self.layer(&at("conv_dw"), &[dim, 1, arch.kernel, arch.kernel]);
                self.layer(&at("norm"), &[dim]);
                self.layer(&at("mlp.fc1"), &[4 * dim, dim]);
                self.layer(&at("mlp.fc2"), &[dim, 4 * dim]);
            }
            inputs = dim;
        }
        self.layer("head.norm", &[arch.dim()]);
    }
}

// ---- from shapes -----------------------------------------------------------------------------------------------------

/// Reads the structure off the shapes of tensors under our names. `partial`: names of packed tensors of which a part is missing.
pub(super) fn infer(
    names: &Names,
    place: &str,
    shapes: &Shapes,
    partial: &dyn Fn(&str) -> bool,
    config: Option<&Json>,
    hints: &Hints,
) -> Result<Inferred, Refusal> {
    match names.family {
        Family::Vit => infer_vit(names, place, shapes, partial, config, hints),
        Family::ResNet => infer_resnet(shapes),
        Family::ConvNext => infer_convnext(names, shapes, config),
    }
}

/// The shape of a tensor with so many sides; a side of 1 in front may be missing.
fn shape<const D: usize>(shapes: &Shapes, name: &str) -> Result<[usize; D], Refusal> {
    let odd = |problem: String| {
        Refusal::new(
            problem,
            "is the file complete, and of a network that is supported? docs/checkpoints.md lists them",
        )
    };
    let Some(found) = shapes.get(name) else { return Err(odd(format!("it has no tensor for `{name}`"))) };
    let mut out = [1; D];
    if found.len() > D || found.contains(&0) || found.iter().any(|&side| side > 1 << 24) {
        return Err(odd(format!("the tensor for `{name}` is {found:?}, which no such network has")));
    }
    out[D - found.len()..].copy_from_slice(found);
    Ok(out)
}

/// How many of `name(0)`, `name(1)`, ... there are.
fn count(shapes: &Shapes, name: impl Fn(usize) -> String) -> usize {
    (0..shapes.len()).take_while(|&index| shapes.contains_key(&name(index))).count()
}

/// Looks for a setting in `config.json`, of Hugging Face or of timm.
fn setting<'a>(config: Option<&'a Json>, name: &str) -> Option<&'a Json> {
    let config = config?;
    ["vision_config", "model_args", "pretrained_cfg"]
        .iter()
        .map(|table| &config[*table])
        .chain([config])
        .map(|table| &table[name])
        .find(|value| !value.is_null())
}

fn setting_count(config: Option<&Json>, name: &str) -> Option<usize> {
    setting(config, name)?
        .as_u64()
        .and_then(|count| usize::try_from(count).ok())
        .filter(|&count| count > 0 && count < 1 << 16)
}

/// Height and width.
fn setting_pair(config: Option<&Json>, name: &str) -> Option<[usize; 2]> {
    let side = |value: &Json| value.as_u64().and_then(|side| usize::try_from(side).ok());
    match setting(config, name)? {
        Json::Array(sides) => Some([side(sides.first()?)?, side(sides.get(1)?)?]),
        value => Some([side(value)?; 2]),
    }
}

/// Heads that the published networks of a width have.
fn usual_heads(dim: usize, place: &str) -> Option<usize> {
    const KNOWN: [(usize, usize); 12] = [
        (192, 3),
        (384, 6),
        (512, 8),
        (640, 10),
        (768, 12),
        (896, 14),
        (1024, 16),
        (1152, 16),
        (1280, 16),
        (1408, 16),
        (1536, 24),
        (1664, 16),
    ];
    // MoCo v3's small network has heads of 32 (moco-v3 `vits.py`)
    if dim == 384 && (place.ends_with("base_encoder") || place.ends_with("momentum_encoder")) {
        return Some(12);
    }
    let known = KNOWN.iter().find(|(width, _)| *width == dim).map(|&(_, heads)| heads);
    known.or_else(|| dim.is_multiple_of(64).then_some(dim / 64)).filter(|&heads| heads > 0)
}

#[expect(clippy::too_many_lines, reason = "one paragraph for each thing that shapes tell")]
fn infer_vit(
    names: &Names,
    place: &str,
    shapes: &Shapes,
    partial: &dyn Fn(&str) -> bool,
    config: Option<&Json>,
    hints: &Hints,
) -> Result<Inferred, Refusal> {
    let has = |name: &str| shapes.contains_key(name);
    let mut notes = Vec::new();
    let [dim, channels, patch, width] = shape::<4>(shapes, "patch_embed.proj.weight")?;
    if patch != width {
        return Err(Refusal::new(format!("its patches are {patch} x {width} px"), "patches of recipes are square"));
    }
    let depth = count(shapes, |index| format!("blocks.{index}.norm1.weight"));
    let [hidden, _] = shape::<2>(shapes, "blocks.0.mlp.fc1.weight")?;
    let [_, inner] = shape::<2>(shapes, "blocks.0.mlp.fc2.weight")?;
    let gated = 2 * inner == hidden;
    let activation = setting(config, "hidden_act").and_then(Json::as_str);
    let mlp = match (gated, activation) {
        (false, _) => MlpKind::Gelu,
        // our own folders say it
        (true, _) if setting(config, "mlp").and_then(Json::as_str) == Some("geglu") => MlpKind::Geglu,
        (true, Some("gelu")) if !has("blocks.0.mlp.weights_in.weight") && names.name.contains("DINOv3") => {
            MlpKind::Geglu
        }
        (true, _) => MlpKind::Swiglu,
    };
    if let (false, Some(name)) = (gated, activation)
        && name != "gelu"
    {
        notes.push(format!("its activation is `{name}`, ours the exact GELU: features differ until it is trained on"));
    } else if names.name == "CLIP image tower" {
        notes.push("OpenAI's CLIP computes `QuickGELU`, this program the exact GELU (as most of open_clip): features of OpenAI's weights differ until trained on".to_owned());
    }
    let class_token = has("cls_token");
    let registers = if has("reg_token") { shape::<3>(shapes, "reg_token")?[1] } else { 0 };
    let head_width =
        shapes.get("blocks.0.attn.q_norm.weight").and_then(|shape| shape.first()).copied().filter(|&side| side > 0);
    let told = hints
        .heads
        .or_else(|| setting_count(config, "num_attention_heads"))
        .or_else(|| setting_count(config, "num_heads"));
    let told = told.or_else(|| head_width.map(|side| dim / side));
    let heads = match told {
        Some(heads) if heads > 0 && dim.is_multiple_of(heads) => heads,
        Some(heads) => {
            return Err(Refusal::new(
                format!("a width of {dim} does not divide into {heads} heads"),
                "does config.json belong to this file?",
            ));
        }
        None => {
            let usual = usual_heads(dim, place);
            notes.push(match usual {
                Some(heads) => {
                    format!("{heads} attention heads are assumed, as published networks of width {dim} have; no tensor tells")
                }
                None => format!(
                    "no tensor tells how many attention heads it has, and no published network has the width {dim}: 1 is written here"
                ),
            });
            usual.unwrap_or(1)
        }
    };
    let image = hints.image.or_else(|| setting_pair(config, "image_size").or_else(|| setting_pair(config, "img_size")));
    let position = if has("pos_embed") { PositionEmbedding::Learned } else { PositionEmbedding::Rope };
    let (grid, prefix_positions) = if has("pos_embed") {
        let [_, rows, _] = shape::<3>(shapes, "pos_embed")?;
        grid_of(rows, usize::from(class_token), registers, image.map(|image| image.map(|side| side / patch)))?
    } else {
        notes.push("it has no position embedding, so positions are taken to be rotary, as in DINOv3".to_owned());
        (image.map_or([14, 14], |image| image.map(|side| (side / patch).max(1))), false)
    };
    let fc_norm = has("fc_norm.weight") && !has("norm.weight");
    let rope_base = setting(config, "rope_theta")
        .or_else(|| setting(config, "rope_parameters").map(|table| &table["rope_theta"]))
        .and_then(Json::as_f64)
        .unwrap_or(100.0);
    let eps = setting(config, "layer_norm_eps").and_then(Json::as_f64).unwrap_or(match position {
        PositionEmbedding::Rope => 1e-5,
        _ => names.eps,
    });
    let arch = VitArch {
        image: grid.map(|side| side * patch),
        patch,
        channels,
        dim,
        depth,
        heads,
        hidden,
        mlp,
        class_token,
        registers,
        prefix_positions,
        qkv_bias: has("blocks.0.attn.qkv.bias"),
        key_bias: !partial("blocks.0.attn.qkv.bias"),
        qk_norm: has("blocks.0.attn.q_norm.weight"),
        layer_scale: has("blocks.0.ls1.gamma").then_some(1e-5),
        drop_path: 0.0,
        pre_norm: has("norm_pre.weight"),
        pool: match setting(config, "global_pool").and_then(Json::as_str) {
            Some("avg") => Pool::Mean,
            Some("token") if class_token => Pool::Class,
            _ if class_token && !fc_norm => Pool::Class,
            _ => Pool::Mean,
        },
        fc_norm,
        num_classes: 0,
        position,
        rope_base,
        resize: Bicubic::Antialias,
        init: VitInit::Normal,
        eps,
    };
    arch.check().map_err(|error| Refusal::new(error.problem, error.hint))?;
    Ok(Inferred { arch: Arch::Vit(arch), notes, heads_known: told.is_some() })
}

/// Rows and columns of a position embedding, and whether class token and registers have places of their own in it.
///
/// With registers, `rows` may count the class token's place alone (`DINOv2`); it goes into the token then.
fn grid_of(
    rows: usize,
    class: usize,
    registers: usize,
    known: Option<[usize; 2]>,
) -> Result<([usize; 2], bool), Refusal> {
    let prefixes = [class + registers, class, 0];
    if let Some(grid) = known
        && let Some(&prefix) = prefixes.iter().find(|&&prefix| prefix + grid[0] * grid[1] == rows)
    {
        return Ok((grid, prefix > 0 && prefix == class + registers));
    }
    let square = |count: usize| (count > 0 && count.isqrt().pow(2) == count).then(|| count.isqrt());
    // registers have no places in any published network but those that were trained with them from the start
    let order = if registers > 0 { [class, 0, class + registers] } else { prefixes };
    for prefix in order {
        if let Some(side) = rows.checked_sub(prefix).and_then(square) {
            return Ok(([side; 2], prefix > 0 && prefix == class + registers));
        }
    }
    Err(Refusal::new(
        format!("its position embedding has {rows} rows, which are no square of patches"),
        "only `config.json` beside the file (`image_size`) can tell height and width of another shape",
    ))
}

fn infer_resnet(shapes: &Shapes) -> Result<Inferred, Refusal> {
    let [stem_planes, channels, side, _] = shape::<4>(shapes, "conv1.weight")?;
    let stem = match side {
        7 => Stem::Imagenet,
        3 => Stem::Cifar,
        _ => {
            let hint = "recipes have stems of 7 x 7 and 3 x 3 px";
            return Err(Refusal::new(format!("its first convolution is {side} x {side}"), hint));
        }
    };
    let bottleneck = shapes.contains_key("layer1.0.conv3.weight");
    let mut layers = Vec::new();
    let mut planes = Vec::new();
    for stage in 1..=4 {
        layers.push(count(shapes, |block| format!("layer{stage}.{block}.conv1.weight")));
        planes.push(shape::<4>(shapes, &format!("layer{stage}.0.conv1.weight"))?[0]);
    }
    let arch = ResNetArch {
        block: if bottleneck { ResidualKind::Bottleneck } else { ResidualKind::Basic },
        layers,
        planes,
        stem_planes,
        stem,
        channels,
        num_classes: 0,
        zero_init_residual: false,
    };
    let [outputs, inputs, ..] = shape::<4>(shapes, "layer1.0.conv2.weight")?;
    if inputs != arch.planes[0] || outputs != arch.planes[0] {
        let problem =
            format!("its 3 x 3 convolutions take {inputs} of {} channels, so it is a ResNeXt", arch.planes[0]);
        return Err(Refusal::new(problem, "recipes have residual networks without groups"));
    }
    if bottleneck {
        let [outputs, ..] = shape::<4>(shapes, "layer1.0.conv3.weight")?;
        if outputs != 4 * arch.planes[0] {
            let problem =
                format!("its blocks put out {outputs} channels after {}, so it is a wide ResNet", arch.planes[0]);
            return Err(Refusal::new(problem, "recipes widen all channels alike (`backbone.resnet.width`)"));
        }
    }
    Ok(Inferred { arch: Arch::ResNet(arch), notes: Vec::new(), heads_known: true })
}

fn infer_convnext(names: &Names, shapes: &Shapes, config: Option<&Json>) -> Result<Inferred, Refusal> {
    let norm = |stage: usize, block: usize| format!("stages.{stage}.blocks.{block}.norm.weight");
    let stages = count(shapes, |stage| norm(stage, 0));
    let [_, channels, patch, _] = shape::<4>(shapes, "stem.0.weight")?;
    let dims: Result<Vec<usize>, Refusal> =
        (0..stages).map(|stage| Ok(shape::<1>(shapes, &norm(stage, 0))?[0])).collect();
    let told = |name: &str| setting(config, name).and_then(Json::as_f64);
    // Hugging Face's `layer_norm_eps` is that of the last norm alone
    let (eps, head_eps) = if names.name == "Hugging Face ConvNeXt" {
        (names.eps, told("layer_norm_eps").unwrap_or(1e-12))
    } else {
        let eps = told("norm_eps").unwrap_or(names.eps);
        (eps, eps)
    };
    let arch = ConvNextArch {
        depths: (0..stages).map(|stage| count(shapes, |block| norm(stage, block))).collect(),
        dims: dims?,
        patch,
        shrink_first: shapes.contains_key("stages.0.downsample.1.weight"),
        kernel: shape::<4>(shapes, "stages.0.blocks.0.conv_dw.weight")?[3],
        layer_scale: shapes.contains_key("stages.0.blocks.0.gamma").then_some(1e-6),
        drop_path: 0.0,
        channels,
        num_classes: 0,
        eps,
        head_eps,
    };
    arch.check().map_err(|error| Refusal::new(error.problem, error.hint))?;
    Ok(Inferred { arch: Arch::ConvNext(arch), notes: Vec::new(), heads_known: true })
}

// ---- to a recipe -----------------------------------------------------------------------------------------------------

fn vit_config(vit: &VitArch) -> Result<VitConfig, String> {
    if vit.image[0] != vit.image[1] {
        return Err(format!("images of recipes are square, these are {} x {}", vit.image[0], vit.image[1]));
    }
    let inner = if vit.mlp.is_gated() { vit.hidden * 3 / 4 } else { vit.hidden };
    let base: VitConfig = toml::from_str(&format!("patch = {}", vit.patch)).map_err(|error| error.to_string())?;
    let sizes = [VitSize::Tiny, VitSize::Small, VitSize::Base, VitSize::Large, VitSize::Huge, VitSize::Giant];
    let named =
        sizes.into_iter().find(|&size| VitConfig { size, ..base.clone() }.sizes() == (vit.dim, vit.depth, vit.heads));
    let spelt = |value: usize| named.is_none().then_some(value);
    let config = |mlp_ratio: f64| VitConfig {
        size: named.unwrap_or_default(),
        dim: spelt(vit.dim),
        depth: spelt(vit.depth),
        heads: spelt(vit.heads),
        mlp_ratio,
        mlp: vit.mlp,
        class_token: vit.class_token,
        registers: vit.registers,
        layer_scale: vit.layer_scale,
        qkv_bias: vit.qkv_bias,
        key_bias: vit.key_bias,
        qk_norm: vit.qk_norm,
        pool: vit.pool,
        fc_norm: vit.fc_norm,
        pre_norm: vit.pre_norm,
        position: vit.position,
        prefix_positions: (vit.prefix_positions != (vit.registers == 0)).then_some(vit.prefix_positions),
        rope_base: vit.rope_base,
        resize_positions: vit.resize,
        norm_eps: vit.eps,
        ..base.clone()
    };
    let fits = |ratio: &f64| {
        let side = u32::try_from(vit.image[0]).unwrap_or(u32::MAX);
        VitArch::from_config(&config(*ratio), side).is_ok_and(|arch| arch.hidden == vit.hidden)
    };
    // the hidden width is rounded down: a little more than the quotient gives it back
    let exact = inner as f64 / vit.dim as f64;
    let ratio = [4.0, exact, exact + 1e-9, exact + 0.5 / vit.dim as f64].into_iter().find(fits);
    ratio.map(config).ok_or_else(|| format!("no `mlp_ratio` gives a hidden width of {}", vit.hidden))
}

fn resnet_config(net: &ResNetArch) -> Result<ResNetConfig, String> {
    let width = net.stem_planes as f64 / 64.0;
    let configs =
        [18, 34, 50, 101, 152].map(|depth| ResNetConfig { depth, width, stem: net.stem, zero_init_residual: false });
    let fits = |config: &ResNetConfig| {
        ResNetArch::from_config(config)
            .is_ok_and(|arch| arch.block == net.block && arch.layers == net.layers && arch.planes == net.planes)
    };
    configs.into_iter().find(fits).ok_or_else(|| {
        "recipes have the depths 18, 34, 50, 101 and 152, with channels that double from stage to stage".to_owned()
    })
}

fn convnext_config(net: &ConvNextArch) -> Result<ConvNextConfig, String> {
    let four = |values: &[usize]| <[usize; 4]>::try_from(values).map_err(|_| "recipes have four stages".to_owned());
    let (depths, dims) = (four(&net.depths)?, four(&net.dims)?);
    let sizes = [ConvNextSize::Tiny, ConvNextSize::Small, ConvNextSize::Base, ConvNextSize::Large];
    let base: ConvNextConfig = toml::from_str("").map_err(|error| error.to_string())?;
    let named = sizes.into_iter().find(|&size| ConvNextConfig { size, ..base.clone() }.sizes() == (depths, dims));
    Ok(ConvNextConfig {
        size: named.unwrap_or_default(),
        depths: named.is_none().then_some(depths),
        dims: named.is_none().then_some(dims),
        patch: net.patch,
        kernel: net.kernel,
        layer_scale: net.layer_scale.unwrap_or(0.0),
        ..base
    })
}
