//! Golden cases of kind `models`: forward passes, gradients and running statistics of networks with given weights.
#![expect(clippy::unwrap_used, reason = "a case that is not as its README says fails")]

use std::collections::BTreeMap;

use autodidact::mask::keep_smallest;
use autodidact::model::layers::Linear;
use autodidact::model::params::{Flat, Layout, read_buffers, read_gradients, write};
use autodidact::model::position::Bicubic;
use autodidact::model::{
    Boundary, Decoder, DecoderArch, Kind, Noise, Pass, Pool, PositionEmbedding, ResNet, ResNetArch, ResidualKind,
    Scope, Segmented, Stem, Vit, VitArch, VitInit, gather_tokens,
};
use burn::module::Module;
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use serde_json::Value;

use super::{Array, Case, Checks, Outcome, read_tensors};

pub(super) fn run(case: &Case) -> Outcome {
    let name = case.name.as_str();
    if name.contains("dinov3") {
        Outcome::NotYet("rotary positions".to_owned())
    } else if name.contains("convnext") {
        Outcome::NotYet("ConvNeXt".to_owned())
    } else if name.starts_with("timm_vit") {
        timm_vit(case)
    } else if name.starts_with("tv_resnet") && case.manifest.get("generator").is_some() {
        generated_resnet(case)
    } else if name.starts_with("tv_resnet") {
        torchvision_resnet(case)
    } else if name.starts_with("hf_resnet") {
        hf_resnet(case)
    } else if name.starts_with("hf_vitmae") {
        hf_vitmae(case)
    } else if name.starts_with("hf_vit") || name.starts_with("hf_dinov2") {
        hf_vit(case)
    } else {
        Outcome::NotYet("no runner for this network".to_owned())
    }
}

// ---- weights ---------------------------------------------------------------------------------------------------------

/// Where a tensor of a checkpoint goes: our path, and which third of its rows for the packed projections.
type Place = (String, Option<usize>);

fn same_name(name: &str) -> Option<Place> {
    (!name.ends_with("num_batches_tracked")).then(|| (name.to_owned(), None))
}

/// Hugging Face's `ViT`, DINOv2 and `ViTMAE` names in timm's (or MAE's).
fn hf_vit_name(name: &str) -> Option<Place> {
    if name.ends_with("mask_token") && !name.starts_with("decoder.") || name.starts_with("pooler.") {
        return None;
    }
    let mut part = None;
    let name = name.strip_prefix("vit.").unwrap_or(name);
    let mut path = match name.strip_prefix("decoder.") {
        Some(rest) => rest.replace("decoder_layers.", "decoder_blocks."),
        None => name.to_owned(),
    };
    for (from, to) in [
        ("embeddings.cls_token", "cls_token"),
        ("embeddings.register_tokens", "reg_token"),
        ("embeddings.position_embeddings", "pos_embed"),
        ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
        ("encoder.layer.", "blocks."),
        ("attention.output.dense", "attn.proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
        ("mlp.weights_in", "mlp.fc1"),
        ("mlp.weights_out", "mlp.fc2"),
        ("layer_scale1.lambda1", "ls1.gamma"),
        ("layer_scale2.lambda1", "ls2.gamma"),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        ("layernorm.", "norm."),
    ] {
        path = path.replace(from, to);
    }
    for (index, from) in ["query", "key", "value"].into_iter().enumerate() {
        let from = format!("attention.attention.{from}");
        if path.contains(&from) {
            path = path.replace(&from, "attn.qkv");
            part = Some(index);
        }
    }
    Some((path, part))
}

/// Hugging Face's ResNet names in torchvision's.
fn hf_resnet_name(name: &str) -> Option<Place> {
    if name.ends_with("num_batches_tracked") {
        return None;
    }
    let leaf = name.rsplit('.').next()?;
    let conv = name.contains(".convolution.");
    if name.starts_with("embedder.") {
        return Some((format!("{}1.{leaf}", if conv { "conv" } else { "bn" }), None));
    }
    let parts: Vec<&str> = name.split('.').collect(); // encoder stages S layers J (layer K | shortcut) kind leaf
    let stage = parts.get(2)?.parse::<usize>().ok()? + 1;
    let inner = match parts[5] {
        "shortcut" => format!("downsample.{}", usize::from(!conv)),
        _ => format!("{}{}", if conv { "conv" } else { "bn" }, parts[6].parse::<usize>().ok()? + 1),
    };
    Some((format!("layer{stage}.{}.{inner}.{leaf}", parts[4]), None))
}

/// Tensors of a checkpoint by our paths; the thirds of packed projections are put together.
fn renamed(tensors: &BTreeMap<String, Array>, place: fn(&str) -> Option<Place>) -> BTreeMap<String, Array> {
    let mut out: BTreeMap<String, Array> = BTreeMap::new();
    let mut thirds: BTreeMap<String, [Option<Array>; 3]> = BTreeMap::new();
    for (name, array) in tensors {
        match place(name) {
            None => {}
            Some((path, None)) => {
                out.insert(path, array.clone());
            }
            Some((path, Some(part))) => thirds.entry(path).or_default()[part] = Some(array.clone()),
        }
    }
    for (path, parts) in thirds {
        let parts = parts.map(|part| part.unwrap_or_else(|| panic!("{path}: query, key or value is missing")));
        let mut shape = parts[0].shape.clone();
        shape[0] *= 3;
        out.insert(path, Array { shape, values: parts.into_iter().flat_map(|part| part.values).collect() });
    }
    out
}

fn checkpoint(case: &Case) -> BTreeMap<String, Array> {
    read_tensors(&case.root.join(case.manifest["checkpoint"].as_str().expect("the manifest names a checkpoint")))
}

/// `config.json` beside the checkpoint.
fn folder_config(case: &Case) -> Value {
    let path = case.root.join(case.manifest["checkpoint"].as_str().expect("the manifest names a checkpoint"));
    let text =
        std::fs::read_to_string(path.with_file_name("config.json")).unwrap_or_else(|e| panic!("config.json: {e}"));
    serde_json::from_str(&text).unwrap()
}

fn load<M: Module>(module: M, tensors: &BTreeMap<String, Array>, device: &Device) -> (M, Layout) {
    let layout = Layout::of(&module);
    let values = tensors.iter().map(|(name, array)| (name.clone(), array.f32())).collect();
    let (weights, buffers) = layout.collect(&values).unwrap_or_else(|e| panic!("{e}"));
    for entry in layout.entries() {
        assert_eq!(entry.shape, tensors[&entry.path].shape, "shape of {}", entry.path);
    }
    (write(module, &layout, &Flat::upload(weights, buffers, device), device), layout)
}

fn scope() -> Scope {
    Scope::new(0, &Device::flex().autodiff())
}

// ---- comparisons -----------------------------------------------------------------------------------------------------

fn tensor<const D: usize>(array: &Array, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(array.f32(), array.shape.clone()), device)
}

fn input(case: &Case) -> Tensor<4> {
    tensor::<4>(case.tensor("x"), &Device::flex().autodiff()).require_grad()
}

fn values<const D: usize>(x: &Tensor<D>) -> Vec<f32> {
    x.clone().into_data().try_to_vec().unwrap()
}

fn tolerance(case: &Case, kind: &str) -> f64 {
    case.manifest["tolerance"][kind].as_f64().unwrap_or_else(|| case.tolerance("rel_to_max"))
}

/// Outputs under the names of the case, flat enough for any rank.
struct Outputs<'a> {
    case: &'a Case,
    prefix: &'static str,
    checks: Checks,
    scalar: Tensor<1>,
}

impl<'a> Outputs<'a> {
    fn new(case: &'a Case, prefix: &'static str) -> Self {
        let scalar = Tensor::zeros([1], &Device::flex().autodiff());
        Self { case, prefix, checks: Checks::default(), scalar }
    }

    /// Compares an output if the case has it, and adds its probe to the scalar; `mean` divides by the root of the count.
    fn add<const D: usize>(&mut self, name: &str, got: &Tensor<D>, divide: bool) {
        let Some(expected) = self.case.tensors.get(&format!("{}out.{name}", self.prefix)) else { return };
        let what = format!("{}out.{name}", self.prefix);
        let shape_fits = expected.shape.iter().filter(|&&n| n != 1).eq(got.dims().iter().filter(|&&n| n != 1));
        assert!(shape_fits, "{what}: shape {:?}, expected {:?}", got.dims(), expected.shape);
        self.checks.relative_to_max(&what, &values(got), expected, tolerance(self.case, "rel_to_max"));
        if let Some(probe) = self.case.tensors.get(&format!("{}probe.{name}", self.prefix)) {
            let count = probe.values.len();
            let probe = Tensor::<1>::from_data(TensorData::new(probe.f32(), [count]), &Device::flex().autodiff());
            let scale = if divide { (count as f64).powf(-0.5) } else { 1.0 };
            self.scalar = self.scalar.clone() + (got.clone().reshape([count]) * probe).sum() * scale;
        }
    }

    /// Goes backward; returns the gradients of the parameters and the input by path.
    fn backward<M: Module>(&self, x: &Tensor<4>, module: &M, layout: &Layout) -> BTreeMap<String, Vec<f32>> {
        let mut gradients = self.scalar.backward();
        let mut out = BTreeMap::from([("x".to_owned(), values(&x.grad(&gradients).expect("the input is a leaf")))]);
        out.extend(gradients_of(module, layout, &mut gradients));
        out
    }
}

fn gradients_of<M: Module>(module: &M, layout: &Layout, gradients: &mut Gradients) -> BTreeMap<String, Vec<f32>> {
    let flat = read_gradients(module, layout, gradients);
    let trained = layout.entries().iter().filter(|entry| entry.kind == Kind::Trained);
    trained.map(|entry| (entry.path.clone(), flat[entry.offset..entry.offset + entry.len].to_vec())).collect()
}

/// Returns the gradient of a tensor on disk with `len` values from those of our parameters.
fn gradient_on_disk(
    gradients: &BTreeMap<String, Vec<f32>>,
    name: &str,
    len: usize,
    place: fn(&str) -> Option<Place>,
) -> Vec<f32> {
    let (path, part) = place(name).unwrap_or_else(|| (name.to_owned(), None));
    let whole = gradients.get(&path).unwrap_or_else(|| panic!("no parameter `{path}` for `{name}`"));
    match part {
        Some(part) => whole.chunks(whole.len() / 3).nth(part).unwrap().to_vec(),
        // The position of a class token that is folded into the token has the token's gradient.
        None if path == "pos_embed" && whole.len() < len => {
            gradients["cls_token"].iter().chain(whole).copied().collect()
        }
        None => whole.clone(),
    }
}

/// Compares every gradient of the case; `noise` bounds what rounding does to one (relative to its maximum).
fn compare_gradients(
    case: &Case,
    prefix: &str,
    checks: &mut Checks,
    gradients: &BTreeMap<String, Vec<f32>>,
    place: fn(&str) -> Option<Place>,
    noise: impl Fn(&str, &[f32]) -> f64,
) {
    for (name, expected) in case.tensors.iter().filter(|(name, _)| name.starts_with(prefix)) {
        let got = gradient_on_disk(gradients, &name[prefix.len()..], expected.values.len(), place);
        let tolerance = tolerance(case, "grad_rel_to_max").max(noise(&name[prefix.len()..], &got));
        checks.relative_to_max(name, &got, expected, tolerance);
    }
}

fn no_noise(_: &str, _: &[f32]) -> f64 {
    0.0
}

// ---- vision transformers ---------------------------------------------------------------------------------------------

/// A count or a pair of them.
fn pair(value: &Value) -> Option<[usize; 2]> {
    let count = |v: &Value| v.as_u64().map(|n| n as usize);
    match value {
        Value::Array(items) => Some([count(items.first()?)?, count(items.get(1)?)?]),
        other => count(other).map(|n| [n, n]),
    }
}

/// Reads what the weights tell: sizes, and which parts exist.
fn vit_arch(tensors: &BTreeMap<String, Array>, heads: usize, image: [usize; 2], eps: f64) -> VitArch {
    let has = |name: &str| tensors.contains_key(name);
    let shape = |name: &str| tensors.get(name).unwrap_or_else(|| panic!("no `{name}`")).shape.as_slice();
    let proj = shape("patch_embed.proj.weight");
    let (dim, channels, patch) = (proj[0], proj[1], proj[2]);
    let depth = (0..1000).take_while(|i| has(&format!("blocks.{i}.norm1.weight"))).count();
    let hidden = shape("blocks.0.mlp.fc1.weight")[0];
    let registers = if has("reg_token") { shape("reg_token")[1] } else { 0 };
    let num_patches = (image[0] / patch) * (image[1] / patch);
    VitArch {
        image,
        patch,
        channels,
        dim,
        depth,
        heads,
        hidden,
        gated: shape("blocks.0.mlp.fc2.weight")[1] != hidden,
        class_token: has("cls_token"),
        registers,
        prefix_positions: shape("pos_embed")[1] > num_patches,
        qkv_bias: has("blocks.0.attn.qkv.bias"),
        qk_norm: has("blocks.0.attn.q_norm.weight"),
        layer_scale: has("blocks.0.ls1.gamma").then_some(1.0),
        drop_path: 0.0,
        pre_norm: has("norm_pre.weight"),
        pool: if has("cls_token") { Pool::Class } else { Pool::Mean },
        fc_norm: has("fc_norm.weight"),
        num_classes: if has("head.weight") { shape("head.weight")[0] } else { 0 },
        position: PositionEmbedding::Learned,
        resize: Bicubic::Antialias,
        init: VitInit::Normal,
        eps,
    }
}

fn timm_vit(case: &Case) -> Outcome {
    let args = case.args();
    let tensors = renamed(&checkpoint(case), same_name);
    let x = input(case);
    let [_, _, height, width] = x.dims();
    let image = pair(&args["img_size"]).unwrap_or([height, width]);
    let eps = case.manifest["layernorm_eps"].as_f64().unwrap_or(1e-6);
    let mut arch = vit_arch(&tensors, case.arg_usize("num_heads"), image, eps);
    match args["global_pool"].as_str() {
        None => {}
        Some("token") => arch.pool = Pool::Class,
        Some("avg") => arch.pool = Pool::Mean,
        Some(other) => return Outcome::NotYet(format!("pooling `{other}`")),
    }
    let scope = scope();
    let (net, layout) = load(Vit::new(&arch, &scope).unwrap(), &tensors, scope.device());

    let mut pass = Pass::eval();
    let mut outputs = Outputs::new(case, "");
    let tokens = net.encode_tokens(net.embed_patches(x.clone()), &mut pass);
    let pooled = net.pool(tokens.clone());
    let features = net.forward(x.clone(), &mut pass);
    assert_eq!(values(&features.pooled), values(&pooled), "segments and encode_tokens agree");
    outputs.add("tokens", &tokens, true);
    outputs.add("pooled", &pooled, true);
    if let Some(logits) = net.logits(pooled) {
        outputs.add("logits", &logits, true);
    }
    for (index, block) in net.block_outputs(x.clone(), arch.depth, &mut pass).into_iter().enumerate() {
        outputs.add(&format!("block{index}_tokens_unnormed"), &net.patches(block), true);
    }
    let gradients = outputs.backward(&x, &net, &layout);
    compare_gradients(case, "grad.", &mut outputs.checks, &gradients, same_name, no_noise);
    Outcome::Compared(outputs.checks)
}

fn hf_vit(case: &Case) -> Outcome {
    let disk = checkpoint(case);
    let mut tensors = renamed(&disk, hf_vit_name);
    let config = folder_config(case);
    let image = pair(&config["image_size"]).expect("image_size");
    let heads = config["num_attention_heads"].as_u64().expect("num_attention_heads") as usize;
    let mut arch = vit_arch(&tensors, heads, image, config["layer_norm_eps"].as_f64().unwrap_or(1e-6));
    arch.resize = if arch.registers > 0 { Bicubic::Antialias } else { Bicubic::Plain };
    if arch.registers > 0 && arch.prefix_positions {
        // Only the class token has a position besides the patches: fold it into the token.
        let positions = tensors.remove("pos_embed").unwrap();
        let dim = arch.dim;
        let class = tensors.get_mut("cls_token").unwrap();
        for (value, position) in class.values.iter_mut().zip(&positions.values[..dim]) {
            *value += position;
        }
        let shape = vec![1, positions.shape[1] - 1, dim];
        tensors.insert("pos_embed".to_owned(), Array { shape, values: positions.values[dim..].to_vec() });
        arch.prefix_positions = false;
    }
    let scope = scope();
    let (net, layout) = load(Vit::new(&arch, &scope).unwrap(), &tensors, scope.device());
    let x = input(case);
    let mut pass = Pass::eval();
    let mut outputs = Outputs::new(case, "");
    let mask_token = disk.get("embeddings.mask_token").map(|token| {
        Tensor::<3>::from_data(TensorData::new(token.f32(), [1, 1, arch.dim]), scope.device()).require_grad()
    });
    let patches = match (case.tensors.get("bool_masked_pos"), &mask_token) {
        (Some(masked), Some(token)) => {
            let masked = tensor::<2>(masked, scope.device()).unsqueeze_dim(2);
            net.embed_masked(x.clone(), token.clone(), masked)
        }
        _ => net.embed_patches(x.clone()),
    };
    let tokens = net.encode_tokens(patches, &mut pass);
    let pooled = net.pool(tokens.clone());
    let pooler = disk.contains_key("pooler.dense.weight").then(|| {
        let part = |name: &str| (name.to_owned(), disk[&format!("pooler.dense.{name}")].clone());
        let weights = BTreeMap::from([part("weight"), part("bias")]);
        load(Linear::torch_default(arch.dim, arch.dim, true, &scope), &weights, scope.device()).0
    });
    let pooled = match pooler {
        Some(pooler) => pooler.forward(pooled).tanh(),
        None => pooled,
    };
    outputs.add("last_hidden_state", &tokens, true);
    outputs.add("pooler_output", &pooled, true);
    let mut gradients = outputs.scalar.backward();
    let mut by_path = BTreeMap::from([("x".to_owned(), values(&x.grad(&gradients).unwrap()))]);
    if let Some(gradient) = mask_token.and_then(|token| token.grad(&gradients)) {
        by_path.insert("embeddings.mask_token".to_owned(), values(&gradient));
    }
    by_path.extend(gradients_of(&net, &layout, &mut gradients));
    compare_gradients(case, "grad.", &mut outputs.checks, &by_path, hf_vit_name, no_noise);
    Outcome::Compared(outputs.checks)
}

fn hf_vitmae(case: &Case) -> Outcome {
    let tensors = renamed(&checkpoint(case), hf_vit_name);
    let config = folder_config(case);
    let count = |name: &str| config[name].as_u64().unwrap_or_else(|| panic!("config.json: {name}")) as usize;
    let eps = config["layer_norm_eps"].as_f64().expect("layer_norm_eps");
    let image = pair(&config["image_size"]).expect("image_size");
    let (decoder_tensors, encoder_tensors): (BTreeMap<_, _>, BTreeMap<_, _>) =
        tensors.into_iter().partition(|(name, _)| name.starts_with("decoder_") || name == "mask_token");
    let mut arch = vit_arch(&encoder_tensors, count("num_attention_heads"), image, eps);
    arch.position = PositionEmbedding::Sincos;
    let mut decoder_arch = DecoderArch::for_encoder(
        &arch,
        count("decoder_hidden_size"),
        count("decoder_num_hidden_layers"),
        count("decoder_num_attention_heads"),
    )
    .unwrap();
    decoder_arch.hidden = count("decoder_intermediate_size");
    decoder_arch.eps = eps;
    let scope = scope();
    let encoder = Vit::new(&arch, &scope).unwrap();
    let decoder = Decoder::new(&decoder_arch, &scope).unwrap();
    let (encoder, encoder_layout) = load(encoder, &encoder_tensors, scope.device());
    let (decoder, decoder_layout) = load(decoder, &decoder_tensors, scope.device());

    let x = input(case);
    let [batch, channels, height, width] = x.dims();
    let (rows, columns) = (height / arch.patch, width / arch.patch);
    let patches = rows * columns;
    let keep = autodidact::mask::num_kept(patches, case.arg_f64("mask_ratio"));
    let kept: Vec<Vec<usize>> =
        case.tensor("noise").values.chunks(patches).map(|noise| keep_smallest(noise, keep)).collect();
    let mask: Vec<f32> = kept
        .iter()
        .flat_map(|list| autodidact::mask::removed(list, patches))
        .map(|removed| f32::from(u8::from(removed)))
        .collect();
    let mut checks = Checks::default();
    checks.absolute("mask", &mask, case.tensor("mask"), 0.0);

    let mut pass = Pass::eval();
    let latent = encoder.encode_tokens(gather_tokens(encoder.embed_patches(x.clone()), &kept), &mut pass);
    let tolerance = tolerance(case, "rel_to_max");
    let expected = case.tensor("encoder_last_hidden_state");
    checks.relative_to_max("encoder_last_hidden_state", &values(&latent), expected, tolerance);
    let prediction = decoder.forward(latent, &kept, &pass);
    checks.relative_to_max("logits", &values(&prediction), case.tensor("logits"), tolerance);

    // The loss is the method's business; here it is the scalar whose gradients are stored.
    let pixels = arch.patch * arch.patch * channels;
    let target = x.clone().detach().reshape([batch, channels, rows, arch.patch, columns, arch.patch]);
    let mut target = target.permute([0, 2, 4, 3, 5, 1]).reshape([batch, patches, pixels]);
    if case.args()["norm_pix_loss"].as_bool().unwrap_or(false) {
        let centred = target.clone() - target.mean_dim(2);
        let var = centred.clone().powi_scalar(2).sum_dim(2) / (pixels - 1) as f64;
        target = centred / (var + 1e-6).sqrt();
    }
    let removed = mask.iter().sum::<f32>();
    let mask = Tensor::<2>::from_data(TensorData::new(mask, [batch, patches]), scope.device());
    let error = (prediction - target).powi_scalar(2).mean_dim(2).reshape([batch, patches]);
    let loss = (error * mask).sum() / removed;
    checks.relative_to_max("loss", &values(&loss), case.tensor("loss"), tolerance);

    let mut gradients = loss.backward();
    let mut by_path = gradients_of(&encoder, &encoder_layout, &mut gradients);
    by_path.extend(gradients_of(&decoder, &decoder_layout, &mut gradients));
    compare_gradients(case, "grad.", &mut checks, &by_path, hf_vit_name, no_noise);
    Outcome::Compared(checks)
}

// ---- residual networks -----------------------------------------------------------------------------------------------

fn spatial_mean(x: &Tensor<4>) -> Tensor<2> {
    let [batch, channels, height, width] = x.dims();
    x.clone().reshape([batch, channels, height * width]).mean_dim(2).reshape([batch, channels])
}

/// Runs the segments; hands over the map behind the stem and behind each stage, returns the pooled features.
fn run_stages(net: &ResNet, x: &Tensor<4>, pass: &mut Pass, mut seen: impl FnMut(&str, &Tensor<4>)) -> Tensor<2> {
    let mut at = Boundary::Map(x.clone());
    let stage = |index: usize| net.segment_name(index).split('.').next().unwrap().to_owned();
    for index in 0..net.num_segments() {
        at = net.forward_segment(index, at, pass);
        if let Boundary::Map(map) = &at
            && stage(index + 1) != stage(index)
        {
            seen(&stage(index), map);
        }
    }
    at.into_features().pooled
}

fn torchvision_resnet(case: &Case) -> Outcome {
    let args = case.args();
    let counts = |name: &str| args[name].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect();
    let planes: Vec<usize> = counts("planes");
    let block = match args["block"].as_str() {
        Some("BasicBlock") => ResidualKind::Basic,
        Some("Bottleneck") => ResidualKind::Bottleneck,
        other => return Outcome::NotYet(format!("block {other:?}")),
    };
    let stem = match args["stem"].as_str() {
        Some("imagenet") => Stem::Imagenet,
        Some("cifar") => Stem::Cifar,
        other => return Outcome::NotYet(format!("stem {other:?}")),
    };
    let tensors = renamed(&checkpoint(case), same_name);
    let arch = ResNetArch {
        block,
        layers: counts("layers"),
        stem_planes: tensors["conv1.weight"].shape[0],
        planes,
        stem,
        channels: tensors["conv1.weight"].shape[1],
        num_classes: tensors.get("fc.weight").map_or(0, |fc| fc.shape[0]),
    };
    let scope = scope();
    let (net, layout) = load(ResNet::new(&arch, &scope), &tensors, scope.device());
    let x = input(case);

    let mut outputs = Outputs::new(case, "");
    add_stages(&net, &x, &mut Pass::eval(), &mut outputs, true);
    let gradients = outputs.backward(&x, &net, &layout);
    let mut checks = outputs.checks;
    compare_gradients(case, "grad.", &mut checks, &gradients, same_name, no_noise);

    if case.tensors.contains_key("train.out.pooled") {
        let rows: Vec<_> = (0..x.dims()[0] as u64).map(|image| (image, 0)).collect();
        let train = |x: &Tensor<4>| {
            let mut pass = Pass::train(Noise { seed: 0, step: 0, rows: rows.clone() });
            let mut outputs = Outputs::new(case, "train.");
            add_stages(&net, x, &mut pass, &mut outputs, false);
            let gradients = outputs.backward(x, &net, &layout);
            (outputs.checks, gradients, pass.take_batch_stats())
        };
        let (train_checks, gradients, stats) = train(&input(case));
        checks.merge(train_checks);
        // Statistics over a handful of values make these gradients ill-conditioned: moving the input by its last bit
        // alone moves some by 2e-5 of their maximum, and every layer rounds as well.
        let nudged = train(&nudged(case)).1;
        compare_gradients(case, "train.grad.", &mut checks, &gradients, same_name, |name, got| {
            let other = gradient_on_disk(&nudged, name, got.len(), same_name);
            let largest = got.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let moved = got.iter().zip(&other).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
            4.0 * f64::from(moved / largest)
        });
        let mut buffers = read_buffers(&net, &layout);
        for stats in stats {
            let [mean, var] = layout.places(&stats);
            let host = |tensor: Tensor<1>| tensor.into_data().try_to_vec::<f32>().unwrap();
            autodidact::model::params::fold(&mut buffers[mean], &host(stats.mean));
            autodidact::model::params::fold(&mut buffers[var], &host(stats.var));
        }
        for entry in layout.entries().iter().filter(|entry| entry.kind == Kind::Buffer) {
            let name = format!("train.state.{}", entry.path);
            if let Some(expected) = case.tensors.get(&name) {
                let got = &buffers[entry.offset..entry.offset + entry.len];
                checks.relative_to_max(&name, got, expected, tolerance(case, "rel_to_max"));
            }
        }
    }
    Outcome::Compared(checks)
}

/// The input with every value moved to a neighbouring float.
fn nudged(case: &Case) -> Tensor<4> {
    let mut x = case.tensor("x").clone();
    for (index, value) in x.values.iter_mut().enumerate() {
        let float = *value as f32;
        *value = f64::from(if splitmix64(index as u64) & 1 == 0 { float.next_up() } else { float.next_down() });
    }
    tensor::<4>(&x, &Device::flex().autodiff()).require_grad()
}

fn add_stages(net: &ResNet, x: &Tensor<4>, pass: &mut Pass, outputs: &mut Outputs<'_>, divide: bool) {
    let pooled = run_stages(net, x, pass, |stage, map| {
        let rank = outputs.case.tensors.get(&format!("{}out.{stage}", outputs.prefix)).map_or(0, |t| t.shape.len());
        match rank {
            2 => outputs.add(stage, &spatial_mean(map), divide),
            _ => outputs.add(stage, map, divide),
        }
    });
    outputs.add("pooled", &pooled, divide);
    if let Some(logits) = net.logits(pooled) {
        outputs.add("logits", &logits, divide);
    }
}

fn hf_resnet(case: &Case) -> Outcome {
    let config = folder_config(case);
    let counts = |name: &str| -> Vec<usize> {
        config[name].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect()
    };
    let block = match config["layer_type"].as_str() {
        Some("basic") => ResidualKind::Basic,
        Some("bottleneck") => ResidualKind::Bottleneck,
        other => return Outcome::NotYet(format!("layer type {other:?}")),
    };
    for flag in ["downsample_in_first_stage", "downsample_in_bottleneck"] {
        if config[flag].as_bool() == Some(true) {
            return Outcome::NotYet(flag.to_owned());
        }
    }
    let tensors = renamed(&checkpoint(case), hf_resnet_name);
    let arch = ResNetArch {
        block,
        layers: counts("depths"),
        planes: counts("hidden_sizes").into_iter().map(|size| size / block.expansion()).collect(),
        stem_planes: tensors["conv1.weight"].shape[0],
        stem: Stem::Imagenet,
        channels: tensors["conv1.weight"].shape[1],
        num_classes: 0,
    };
    let scope = scope();
    let (net, layout) = load(ResNet::new(&arch, &scope), &tensors, scope.device());
    let x = input(case);
    let mut outputs = Outputs::new(case, "");
    let pooled = run_stages(&net, &x, &mut Pass::eval(), |stage, map| {
        if stage == "layer4" {
            outputs.add("last_hidden_state", map, true);
        }
    });
    outputs.add("pooler_output", &pooled, true);
    let gradients = outputs.backward(&x, &net, &layout);
    compare_gradients(case, "grad.", &mut outputs.checks, &gradients, hf_resnet_name, no_noise);
    Outcome::Compared(outputs.checks)
}

/// A network whose weights and input come from a counter generator.
fn generated_resnet(case: &Case) -> Outcome {
    let seed = case.args()["seed"].as_u64().unwrap();
    let generate = |index: u64, count: usize, low: f64, high: f64| -> Vec<f64> {
        (0..count as u64)
            .map(|i| {
                let hash = splitmix64(seed.wrapping_add(index << 40).wrapping_add(i));
                f64::from((low + (high - low) * ((hash >> 40) as f64 / f64::from(1 << 24))) as f32)
            })
            .collect()
    };
    let mut tensors = BTreeMap::new();
    for row in case.manifest["tensor_table"]["rows"].as_array().unwrap() {
        let Some(low) = row[3].as_f64() else { continue }; // num_batches_tracked
        let shape: Vec<usize> = row[1].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect();
        let values = generate(row[2].as_u64().unwrap(), shape.iter().product(), low, row[4].as_f64().unwrap());
        tensors.insert(row[0].as_str().unwrap().to_owned(), Array { shape, values });
    }
    let args = case.args();
    let shape: Vec<usize> =
        args["input_shape"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect();
    let index = args["input_tensor_index"].as_u64().unwrap();
    let count = shape.iter().product();
    let x = Array { values: generate(index, count, case.arg_f64("input_lo"), case.arg_f64("input_hi")), shape };

    let mut checks = Checks::default();
    for (name, values) in [("x_head", &x.values), ("conv1_head", &tensors["conv1.weight"].values)] {
        let expected = case.tensor(name);
        let got: Vec<f32> = values[..expected.values.len()].iter().map(|&v| v as f32).collect();
        checks.absolute(name, &got, expected, 0.0);
    }
    let blocks = |stage: usize| {
        (0..1000).take_while(|i| tensors.contains_key(&format!("layer{stage}.{i}.conv1.weight"))).count()
    };
    let arch = ResNetArch {
        block: if tensors.contains_key("layer1.0.conv3.weight") {
            ResidualKind::Bottleneck
        } else {
            ResidualKind::Basic
        },
        layers: (1..=4).map(blocks).collect(),
        planes: (1..=4).map(|stage| tensors[&format!("layer{stage}.0.conv1.weight")].shape[0]).collect(),
        stem_planes: tensors["conv1.weight"].shape[0],
        stem: if tensors["conv1.weight"].shape[2] == 7 { Stem::Imagenet } else { Stem::Cifar },
        channels: tensors["conv1.weight"].shape[1],
        num_classes: tensors.get("fc.weight").map_or(0, |fc| fc.shape[0]),
    };
    let device = Device::flex();
    let (net, _) = load(ResNet::new(&arch, &Scope::new(0, &device)), &tensors, &device);
    let tolerance = tolerance(case, "rel_to_max");
    let mut compare = |name: &str, got: Vec<f32>| {
        if let Some(expected) = case.tensors.get(name) {
            checks.relative_to_max(name, &got, expected, tolerance);
        }
    };
    let pooled = run_stages(&net, &tensor(&x, &device), &mut Pass::eval(), |stage, map| {
        compare(stage, values(map));
        compare(&format!("{stage}_mean_c"), values(&spatial_mean(map)));
    });
    compare("pooled", values(&pooled));
    if let Some(logits) = net.logits(pooled) {
        compare("logits", values(&logits));
    }
    Outcome::Compared(checks)
}

fn splitmix64(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
