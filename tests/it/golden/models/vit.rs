//! Vision transformers: timm's, `DINOv2`, `DINOv3`, MAE.

use std::collections::BTreeMap;

use autodidact::mask::keep_smallest;
use autodidact::model::layers::Linear;
use autodidact::model::position::Bicubic;
use autodidact::model::{
    Decoder, DecoderArch, MlpKind, Pass, Pool, PositionEmbedding, Vit, VitArch, VitInit, gather_tokens,
};
use burn::tensor::{Tensor, TensorData};
use serde_json::Value;

use super::super::{Array, Case, Checks, Outcome};
use super::*;

/// Hugging Face's `ViT`, `DINOv2` and `ViTMAE` names in timm's (or MAE's).
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
            part = Some((index, 3));
        }
    }
    Some((path, part))
}

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
        mlp: if shape("blocks.0.mlp.fc2.weight")[1] == hidden { MlpKind::Gelu } else { MlpKind::Swiglu },
        class_token: has("cls_token"),
        registers,
        prefix_positions: has("pos_embed") && shape("pos_embed")[1] > num_patches,
        qkv_bias: has("blocks.0.attn.qkv.bias"),
        key_bias: true,
        qk_norm: has("blocks.0.attn.q_norm.weight"),
        layer_scale: has("blocks.0.ls1.gamma").then_some(1.0),
        drop_path: 0.0,
        pre_norm: has("norm_pre.weight"),
        pool: if has("cls_token") { Pool::Class } else { Pool::Mean },
        fc_norm: has("fc_norm.weight"),
        num_classes: if has("head.weight") { shape("head.weight")[0] } else { 0 },
        position: if has("pos_embed") { PositionEmbedding::Learned } else { PositionEmbedding::Rope },
        rope_base: 100.0,
        resize: Bicubic::Antialias,
        init: VitInit::Normal,
        eps,
    }
}

pub(super) fn timm(case: &Case) -> Outcome {
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

pub(super) fn hf(case: &Case) -> Outcome {
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

pub(super) fn hf_mae(case: &Case) -> Outcome {
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

/// timm's names of `DINOv3` (`Eva`) in those of its `VisionTransformer`.
#[expect(clippy::unnecessary_wraps, reason = "one of several")]
fn timm_dinov3_name(name: &str) -> Option<Place> {
    let path = name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma");
    for (from, to, part, of) in [
        ("attn.q_bias", "attn.qkv.bias", 0, 3),
        ("attn.v_bias", "attn.qkv.bias", 2, 3),
        ("mlp.fc1_g.", "mlp.fc1.", 0, 2),
        ("mlp.fc1_x.", "mlp.fc1.", 1, 2),
    ] {
        if path.contains(from) {
            return Some((path.replace(from, to), Some((part, of))));
        }
    }
    Some((path, None))
}

/// Runs a network with rotary positions on images of any size; names of the case's outputs are those of `tokens` and `pooled`.
fn rotary(
    case: &Case,
    arch: &VitArch,
    tensors: &BTreeMap<String, Array>,
    mask_token: Option<&Array>,
    [tokens_name, pooled_name]: [&str; 2],
    place: fn(&str) -> Option<Place>,
) -> Outcome {
    let scope = scope();
    let (net, layout) = load(Vit::new(arch, &scope).unwrap(), tensors, scope.device());
    let x = input(case);
    let [_, _, height, width] = x.dims();
    let mut pass = Pass::eval();
    let mut outputs = Outputs::new(case, "");
    let mask_token = mask_token.map(|token| {
        let token = TensorData::new(token.f32(), [1, 1, arch.dim]);
        Tensor::<3>::from_data(token, scope.device()).require_grad()
    });
    let grid = [height / arch.patch, width / arch.patch];
    let whole = net.encode_tokens_at(net.embed_patches(x.clone()), grid, None, &mut pass);
    let features = net.forward(x.clone(), &mut pass);
    assert_eq!(values(&features.pooled), values(&net.pool(whole)), "segments and encode_tokens_at agree");
    let masked = case.tensors.get("bool_masked_pos").zip(mask_token.as_ref());
    let patches = masked.map_or_else(
        || net.embed_patches(x.clone()),
        |(masked, token)| {
            net.embed_masked(x.clone(), token.clone(), tensor::<2>(masked, scope.device()).unsqueeze_dim(2))
        },
    );
    let tokens = net.encode_tokens_at(patches, grid, None, &mut pass);
    let pooled = net.pool(tokens.clone());
    outputs.add(tokens_name, &tokens, true);
    outputs.add(pooled_name, &pooled, true);
    if let Some(logits) = net.logits(pooled) {
        outputs.add("logits", &logits, true);
    }
    for (index, block) in net.block_outputs(x.clone(), arch.depth, &mut pass).into_iter().enumerate() {
        outputs.add(&format!("block{index}_tokens_unnormed"), &net.patches(block), true);
    }
    let mut gradients = outputs.scalar.backward();
    let mut by_path = BTreeMap::from([("x".to_owned(), values(&x.grad(&gradients).unwrap()))]);
    if let Some(gradient) = mask_token.and_then(|token| token.grad(&gradients)) {
        by_path.insert("embeddings.mask_token".to_owned(), values(&gradient));
    }
    by_path.extend(gradients_of(&net, &layout, &mut gradients));
    compare_gradients(case, "grad.", &mut outputs.checks, &by_path, place, no_noise);
    Outcome::Compared(outputs.checks)
}

pub(super) fn timm_dinov3(case: &Case) -> Outcome {
    let (args, disk) = (case.args(), checkpoint(case));
    let tensors = renamed(&disk, timm_dinov3_name);
    let x = case.tensor("x");
    let eps = case.manifest["layernorm_eps"].as_f64().unwrap_or(1e-5);
    let mut arch = vit_arch(&tensors, case.arg_usize("num_heads"), [x.shape[2], x.shape[3]], eps);
    arch.key_bias = false;
    arch.rope_base = args["rope_temperature"].as_f64().unwrap_or(100.0);
    let folder = folder_config(case);
    match args["global_pool"].as_str().or(folder["global_pool"].as_str()) {
        Some("token") => arch.pool = Pool::Class,
        Some("avg") | None => arch.pool = Pool::Mean,
        Some(other) => return Outcome::NotYet(format!("pooling `{other}`")),
    }
    rotary(case, &arch, &tensors, None, ["tokens", "pooled"], timm_dinov3_name)
}

/// Hugging Face's `DINOv3` names in timm's.
fn hf_dinov3_name(name: &str) -> Option<Place> {
    if name.ends_with("mask_token") {
        return None;
    }
    let mut path = name.strip_prefix("model.").unwrap_or(name).to_owned();
    for (from, to) in [
        ("embeddings.cls_token", "cls_token"),
        ("embeddings.register_tokens", "reg_token"),
        ("embeddings.patch_embeddings", "patch_embed.proj"),
        ("attention.o_proj", "attn.proj"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
        ("layer_scale1.lambda1", "ls1.gamma"),
        ("layer_scale2.lambda1", "ls2.gamma"),
    ] {
        path = path.replace(from, to);
    }
    if let Some(rest) = path.strip_prefix("layer.") {
        path = format!("blocks.{rest}");
    }
    for (part, from) in ["q_proj", "k_proj", "v_proj"].into_iter().enumerate() {
        let from = format!("attention.{from}");
        if path.contains(&from) {
            return Some((path.replace(&from, "attn.qkv"), Some((part, 3))));
        }
    }
    Some((path, None))
}

/// The same where the MLP is gated.
fn hf_dinov3_gated_name(name: &str) -> Option<Place> {
    for (part, from) in ["mlp.gate_proj", "mlp.up_proj"].into_iter().enumerate() {
        if name.contains(from) {
            let (path, _) = hf_dinov3_name(&name.replace(from, "mlp.up_proj"))?;
            return Some((path, Some((part, 2))));
        }
    }
    hf_dinov3_name(name)
}

pub(super) fn hf_dinov3(case: &Case) -> Outcome {
    let (disk, config) = (checkpoint(case), folder_config(case));
    let gated = disk.keys().any(|name| name.contains("mlp.gate_proj"));
    let place = if gated { hf_dinov3_gated_name } else { hf_dinov3_name };
    let mut tensors = renamed(&disk, place);
    tensors.retain(|_, array| !array.values.is_empty());
    let x = case.tensor("x");
    let heads = config["num_attention_heads"].as_u64().expect("num_attention_heads") as usize;
    let eps = config["layer_norm_eps"].as_f64().unwrap_or(1e-5);
    let mut arch = vit_arch(&tensors, heads, [x.shape[2], x.shape[3]], eps);
    arch.key_bias = disk.keys().any(|name| name.ends_with("k_proj.bias"));
    arch.rope_base =
        config["rope_theta"].as_f64().or(config["rope_parameters"]["rope_theta"].as_f64()).unwrap_or(100.0);
    arch.mlp = match (gated, config["hidden_act"].as_str().unwrap_or("gelu")) {
        (false, "gelu") => MlpKind::Gelu,
        (true, "gelu") => MlpKind::Geglu,
        (true, "silu" | "swish") => MlpKind::Swiglu,
        (_, other) => return Outcome::NotYet(format!("activation `{other}`")),
    };
    // Layers without bias have one of zeros here.
    for index in 0..arch.depth {
        for (layer, len) in [("attn.proj", arch.dim), ("mlp.fc1", arch.hidden), ("mlp.fc2", arch.dim)] {
            let zeros = Array { shape: vec![len], values: vec![0.0; len] };
            tensors.entry(format!("blocks.{index}.{layer}.bias")).or_insert(zeros);
        }
    }
    let mask_token = disk.iter().find(|(name, _)| name.ends_with("embeddings.mask_token")).map(|(_, token)| token);
    rotary(case, &arch, &tensors, mask_token, ["last_hidden_state", "pooler_output"], place)
}
