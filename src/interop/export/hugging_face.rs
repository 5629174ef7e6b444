//! Hugging Face's transformers: `AutoModel.from_pretrained(DIR)`. Names are those of version 4, which 5 reads, too.
//!
//! <https://github.com/huggingface/transformers/tree/main/src/transformers/models>: vit, `dinov2_with_registers`, dinov2, `dinov3_vit`, resnet, convnext.

use serde_json::{Value as Json, json};

use super::{Exported, Head, Inexpressible, Own, Weights, rows};
use crate::interop::arch::Arch;
use crate::model::{ConvNextArch, MlpKind, Pool, PositionEmbedding, ResNetArch, ResidualKind, Stem, Tensors, VitArch};

fn cannot(what: impl Into<String>, why: impl Into<String>, instead: impl Into<String>) -> Inexpressible {
    Inexpressible { program: "transformers", what: what.into(), why: why.into(), instead: instead.into() }
}

const TIMM: &str = "use `--format timm`";

/// Class of the network, its configuration, its tensors, and how its output becomes features.
struct Network {
    class: &'static str,
    config: Json,
    tensors: Tensors,
    /// Python: features, or the scores of the classes, of `images`.
    features: String,
    notes: Vec<String>,
}

pub(super) fn export(own: &Own<'_>) -> Result<Exported, Inexpressible> {
    let mut network = match own.arch {
        Arch::Vit(vit) => vision_transformer(vit, own.tensors(), own.head.is_some())?,
        Arch::ResNet(net) => resnet(net, own.tensors())?,
        Arch::ConvNext(net) => convnext(net, own.tensors())?,
    };
    if let Some(head) = own.head {
        network = classifier(network, head, own.arch)?;
    }
    let Network { class, mut config, tensors, features, notes } = network;
    config["architectures"] = json!([class]);
    // transformers 5 writes `dtype`, 4 `torch_dtype`; both read either
    config["torch_dtype"] = "float32".into();
    let input = own.input;
    let preprocessor = json!({
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": true,
        "do_resize": true,
        "size": { "shortest_edge": input.shorter },
        "resample": 3,
        "do_center_crop": true,
        "crop_size": { "height": input.size, "width": input.size },
        "do_rescale": true,
        "rescale_factor": 1.0 / 255.0,
        "do_normalize": true,
        "image_mean": input.mean,
        "image_std": input.std,
    });
    let (auto, output) = match own.head {
        Some(_) => ("AutoModelForImageClassification", "logits"),
        None => ("AutoModel", "features"),
    };
    let python = format!(
        "from transformers import {auto}\n\nmodel = {auto}.from_pretrained(\".\").eval()\n\n\n\
         def {output}(images):\n    return {features}"
    );
    let (weights, preprocessor) = (Weights::Tensors(tensors), Some(preprocessor));
    Ok(Exported { weights, config, preprocessor, architecture: class.to_owned(), python, notes })
}

/// Puts a head on a network.
fn classifier(network: Network, head: &Head, arch: &Arch) -> Result<Network, Inexpressible> {
    let (class, place, layer) = match network.class {
        "ViTModel" => ("ViTForImageClassification", "vit", "classifier"),
        "Dinov2Model" => ("Dinov2ForImageClassification", "dinov2", "classifier"),
        "Dinov2WithRegistersModel" => {
            ("Dinov2WithRegistersForImageClassification", "dinov2_with_registers", "classifier")
        }
        "ResNetModel" => ("ResNetForImageClassification", "resnet", "classifier.1"),
        "ConvNextModel" => ("ConvNextForImageClassification", "convnext", "classifier"),
        _ => {
            let instead = "use `--format timm`, or `--backbone-only` for the features";
            return Err(cannot("a classifier with rotary positions", "its DINOv3 has none", instead));
        }
    };
    let mut tensors: Tensors =
        network.tensors.into_iter().map(|(name, tensor)| (format!("{place}.{name}"), tensor)).collect();
    let mut notes = network.notes;
    match arch {
        // its classifiers see the class token and the mean of the patches, side by side
        Arch::Vit(vit) if place.starts_with("dinov2") => {
            head.doubled(vit.pool == Pool::Class).put(&mut tensors, layer);
            let other = if vit.pool == Pool::Class { "mean of the patches" } else { "class token" };
            notes.push(format!("its classifier sees the {other}, too, with weights of zero"));
        }
        _ => head.put(&mut tensors, layer),
    }
    let mut config = network.config;
    let names = || head.classes().iter().enumerate();
    config["id2label"] = names().map(|(id, name)| (id.to_string(), Json::from(name.as_str()))).collect();
    config["label2id"] = names().map(|(id, name)| (name.clone(), Json::from(id))).collect();
    let kind = if head.tells_several() { "multi_label_classification" } else { "single_label_classification" };
    config["problem_type"] = kind.into();
    Ok(Network { class, config, tensors, features: "model(pixel_values=images).logits".to_owned(), notes })
}

fn vision_transformer(vit: &VitArch, tensors: Tensors, classifies: bool) -> Result<Network, Inexpressible> {
    let has = [
        (!vit.class_token, "a network without class token", "its vision transformers have one"),
        (vit.qk_norm, "norms of queries and keys", "its vision transformers have none"),
        (vit.pre_norm, "a norm before the blocks", "its vision transformers have none"),
        (vit.fc_norm, "the final norm after pooling", "its vision transformers have it before"),
    ];
    if let Some((_, what, why)) = has.into_iter().find(|(has, ..)| *has) {
        return Err(cannot(what, why, TIMM));
    }
    let mut network = if vit.position == PositionEmbedding::Rope {
        dinov3(vit, tensors)
    } else if vit.registers > 0
        || vit.layer_scale.is_some()
        || vit.mlp != MlpKind::Gelu
        || !vit.prefix_positions
        // the classifier of `ViT` sees the class token alone
        || (classifies && vit.pool == Pool::Mean)
    {
        dinov2(vit, tensors)?
    } else {
        vit_model(vit, tensors)
    };
    network.features = match vit.pool {
        Pool::Class => "model(pixel_values=images).last_hidden_state[:, 0]".to_owned(),
        Pool::Mean => format!("model(pixel_values=images).last_hidden_state[:, {}:].mean(1)", vit.num_prefix()),
    };
    // no key of theirs, but our reader and others look for it
    network.config["global_pool"] = if vit.pool == Pool::Class { "token" } else { "avg" }.into();
    if !classifies && network.class == "ViTModel" {
        let note = "`pooler_output` comes from a layer that was never trained here: use `last_hidden_state`, as below";
        network.notes.push(note.to_owned());
    }
    if !classifies && vit.pool == Pool::Mean {
        network.notes.push("features are the mean of the patches, not `pooler_output`".to_owned());
    }
    Ok(network)
}

/// Renames the tensors of `ViT` and `DINOv2`, which differ in what a block holds beside its attention.
fn renamed(tensors: Tensors, in_a_block: impl Fn(&str) -> String) -> Tensors {
    let mut out = Tensors::new();
    for (name, (shape, values)) in tensors {
        let Some((block, rest)) = in_block(&name) else {
            out.insert(around_blocks(&name), (shape, values));
            continue;
        };
        let block = format!("encoder.layer.{block}");
        if let Some(leaf) = rest.strip_prefix("attn.qkv.") {
            let places = ["query", "key", "value"].map(|part| format!("{block}.attention.attention.{part}.{leaf}"));
            out.extend(places.into_iter().zip(rows(&shape, &values, 3)));
        } else {
            out.insert(format!("{block}.{}", in_a_block(rest)), (shape, values));
        }
    }
    out
}

fn vit_model(vit: &VitArch, tensors: Tensors) -> Network {
    let out = renamed(tensors, |name| {
        name.replace("norm1.", "layernorm_before.")
            .replace("norm2.", "layernorm_after.")
            .replace("attn.proj.", "attention.output.dense.")
            .replace("mlp.fc1.", "intermediate.dense.")
            .replace("mlp.fc2.", "output.dense.")
    });
    let mut config = sizes(vit);
    config["model_type"] = "vit".into();
    config["intermediate_size"] = vit.hidden.into();
    config["qkv_bias"] = vit.qkv_bias.into();
    Network { class: "ViTModel", config, tensors: out, features: String::new(), notes: Vec::new() }
}

/// `DINOv2`, with or without registers: what it has and the network has not is filled with what changes nothing.
fn dinov2(vit: &VitArch, mut tensors: Tensors) -> Result<Network, Inexpressible> {
    let gated = vit.mlp == MlpKind::Swiglu;
    if vit.mlp == MlpKind::Geglu {
        return Err(cannot(
            "an MLP gated by GELU",
            "its DINOv2 is gated by SiLU",
            "use rotary positions, or `--format safetensors`",
        ));
    }
    // its hidden width is a multiple of the width, by a whole number, and two thirds of that where gated
    let inner = vit.hidden / if gated { 2 } else { 1 };
    let width = |ratio: usize| if gated { (vit.dim * ratio * 2 / 3).next_multiple_of(8) } else { vit.dim * ratio };
    let Some(ratio) = (1..=16).find(|&ratio| width(ratio) == inner) else {
        let why = "its DINOv2 multiplies the width by a whole number";
        return Err(cannot(format!("a hidden width of {inner} for a width of {}", vit.dim), why, TIMM));
    };
    let dim = vit.dim;
    let patches = vit.grid()[0] * vit.grid()[1];
    let mut notes = Vec::new();
    // the class token has a position, registers have none
    if let Some((shape, values)) = tensors.get_mut("pos_embed") {
        let table = values.split_off(values.len() - patches * dim);
        let mut class = vec![0.0; dim];
        let of_registers = values.split_off(values.len().min(dim));
        class[..values.len()].copy_from_slice(values);
        *values = class;
        values.extend(table);
        *shape = vec![1, 1 + patches, dim];
        if let Some((_, tokens)) = tensors.get_mut("reg_token") {
            for (token, position) in tokens.iter_mut().zip(of_registers) {
                *token += position;
            }
        }
    }
    if vit.layer_scale.is_none() {
        for block in 0..vit.depth {
            for scale in ["ls1", "ls2"] {
                tensors.insert(format!("blocks.{block}.{scale}.gamma"), (vec![dim], vec![1.0; dim]));
            }
        }
        notes.push("it has a LayerScale of 1, which changes nothing".to_owned());
    }
    let mut out = renamed(tensors, |name| {
        let name = name
            .replace("attn.proj.", "attention.output.dense.")
            .replace("ls1.gamma", "layer_scale1.lambda1")
            .replace("ls2.gamma", "layer_scale2.lambda1");
        if gated { name.replace("mlp.fc1.", "mlp.weights_in.").replace("mlp.fc2.", "mlp.weights_out.") } else { name }
    });
    out.insert("embeddings.mask_token".to_owned(), (vec![1, dim], vec![0.0; dim]));
    let mut config = sizes(vit);
    config["mlp_ratio"] = ratio.into();
    config["use_swiglu_ffn"] = gated.into();
    config["qkv_bias"] = vit.qkv_bias.into();
    config["layerscale_value"] = vit.layer_scale.unwrap_or(1.0).into();
    let class = if vit.registers > 0 {
        config["model_type"] = "dinov2_with_registers".into();
        config["num_register_tokens"] = vit.registers.into();
        "Dinov2WithRegistersModel"
    } else {
        config["model_type"] = "dinov2".into();
        "Dinov2Model"
    };
    Ok(Network { class, config, tensors: out, features: String::new(), notes })
}

fn dinov3(vit: &VitArch, mut tensors: Tensors) -> Network {
    let gated = vit.mlp.is_gated();
    let dim = vit.dim;
    let mut notes = Vec::new();
    if vit.layer_scale.is_none() {
        for block in 0..vit.depth {
            for scale in ["ls1", "ls2"] {
                tensors.insert(format!("blocks.{block}.{scale}.gamma"), (vec![dim], vec![1.0; dim]));
            }
        }
        notes.push("it has a LayerScale of 1, which changes nothing".to_owned());
    }
    let mut out = Tensors::from([("embeddings.mask_token".to_owned(), (vec![1, 1, dim], vec![0.0; dim]))]);
    for (name, (shape, values)) in tensors {
        let name = match name.as_str() {
            "cls_token" => "embeddings.cls_token".to_owned(),
            "reg_token" => "embeddings.register_tokens".to_owned(),
            "patch_embed.proj.weight" => "embeddings.patch_embeddings.weight".to_owned(),
            "patch_embed.proj.bias" => "embeddings.patch_embeddings.bias".to_owned(),
            _ => {
                let Some((block, rest)) = in_block(&name) else {
                    out.insert(name, (shape, values));
                    continue;
                };
                let block = format!("layer.{block}");
                if let Some(leaf) = rest.strip_prefix("attn.qkv.") {
                    let places =
                        ["q_proj", "k_proj", "v_proj"].map(|part| (part, format!("{block}.attention.{part}.{leaf}")));
                    let parts = places.into_iter().zip(rows(&shape, &values, 3));
                    let there = |part: &str| leaf != "bias" || part != "k_proj" || vit.key_bias;
                    out.extend(parts.filter(|((part, _), _)| there(part)).map(|((_, name), tensor)| (name, tensor)));
                    continue;
                }
                if let Some(leaf) = rest.strip_prefix("mlp.fc1.").filter(|_| gated) {
                    let places = ["gate_proj", "up_proj"].map(|part| format!("{block}.mlp.{part}.{leaf}"));
                    out.extend(places.into_iter().zip(rows(&shape, &values, 2)));
                    continue;
                }
                let rest = rest
                    .replace("attn.proj.", "attention.o_proj.")
                    .replace("ls1.gamma", "layer_scale1.lambda1")
                    .replace("ls2.gamma", "layer_scale2.lambda1")
                    .replace("mlp.fc1.", "mlp.up_proj.")
                    .replace("mlp.fc2.", "mlp.down_proj.");
                format!("{block}.{rest}")
            }
        };
        out.insert(name, (shape, values));
    }
    let mut config = sizes(vit);
    config["model_type"] = "dinov3_vit".into();
    config["intermediate_size"] = (vit.hidden / if gated { 2 } else { 1 }).into();
    config["use_gated_mlp"] = gated.into();
    config["hidden_act"] = if vit.mlp == MlpKind::Swiglu { "silu" } else { "gelu" }.into();
    config["rope_theta"] = vit.rope_base.into();
    config["num_register_tokens"] = vit.registers.into();
    config["query_bias"] = vit.qkv_bias.into();
    config["key_bias"] = (vit.qkv_bias && vit.key_bias).into();
    config["value_bias"] = vit.qkv_bias.into();
    config["layerscale_value"] = vit.layer_scale.unwrap_or(1.0).into();
    Network { class: "DINOv3ViTModel", config, tensors: out, features: String::new(), notes }
}

/// Keys of every vision transformer.
fn sizes(vit: &VitArch) -> Json {
    json!({
        "hidden_size": vit.dim,
        "num_hidden_layers": vit.depth,
        "num_attention_heads": vit.heads,
        "hidden_act": "gelu",
        "layer_norm_eps": vit.eps,
        "image_size": if vit.image[0] == vit.image[1] { json!(vit.image[0]) } else { json!(vit.image) },
        "patch_size": vit.patch,
        "num_channels": vit.channels,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    })
}

/// What is around the blocks of `ViT` and `DINOv2`.
fn around_blocks(name: &str) -> String {
    match name {
        "cls_token" => "embeddings.cls_token".to_owned(),
        "reg_token" => "embeddings.register_tokens".to_owned(),
        "pos_embed" => "embeddings.position_embeddings".to_owned(),
        _ => match name.strip_prefix("patch_embed.proj.") {
            Some(leaf) => format!("embeddings.patch_embeddings.projection.{leaf}"),
            None => name.replace("norm.", "layernorm."),
        },
    }
}

fn in_block(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("blocks.")?.split_once('.')
}

fn resnet(net: &ResNetArch, tensors: Tensors) -> Result<Network, Inexpressible> {
    if net.stem == Stem::Cifar {
        let why = "the first convolution of its residual networks is 7 x 7 with stride 2";
        let instead = "use `--format safetensors`, which loads into torchvision's network once `conv1` and `maxpool` are replaced (docs/export.md)";
        return Err(cannot("the 3 x 3 stem for small images (`stem = \"cifar\"`)", why, instead));
    }
    let out: Tensors = tensors.into_iter().map(|(name, tensor)| (resnet_name(&name), tensor)).collect();
    let expansion = net.block.expansion();
    let config = json!({
        "model_type": "resnet",
        "num_channels": net.channels,
        "embedding_size": net.stem_planes,
        "hidden_sizes": net.planes.iter().map(|planes| planes * expansion).collect::<Vec<_>>(),
        "depths": net.layers,
        "layer_type": match net.block {
            ResidualKind::Basic => "basic",
            ResidualKind::Bottleneck => "bottleneck",
        },
        "hidden_act": "relu",
        "downsample_in_first_stage": false,
        "downsample_in_bottleneck": false,
    });
    let features = "model(pixel_values=images).pooler_output.flatten(1)".to_owned();
    Ok(Network { class: "ResNetModel", config, tensors: out, features, notes: Vec::new() })
}

fn resnet_name(name: &str) -> String {
    if let Some(rest) = name.strip_prefix("conv1.") {
        return format!("embedder.embedder.convolution.{rest}");
    }
    if let Some(rest) = name.strip_prefix("bn1.") {
        return format!("embedder.embedder.normalization.{rest}");
    }
    let parts = name.strip_prefix("layer").and_then(|rest| {
        let (stage, rest) = rest.split_once('.')?;
        let (block, rest) = rest.split_once('.')?;
        Some((stage.parse::<usize>().ok()?.checked_sub(1)?, block, rest))
    });
    let Some((stage, block, rest)) = parts else { return name.to_owned() };
    let mut rest =
        rest.replace("downsample.0.", "shortcut.convolution.").replace("downsample.1.", "shortcut.normalization.");
    for layer in 1..=3 {
        rest = rest
            .replace(&format!("conv{layer}."), &format!("layer.{}.convolution.", layer - 1))
            .replace(&format!("bn{layer}."), &format!("layer.{}.normalization.", layer - 1));
    }
    format!("encoder.stages.{stage}.layers.{block}.{rest}")
}

fn convnext(net: &ConvNextArch, tensors: Tensors) -> Result<Network, Inexpressible> {
    if net.shrink_first {
        let why = "its first stage never shrinks its input";
        return Err(cannot(format!("patches of {} px with a stage that shrinks at once", net.patch), why, TIMM));
    }
    if net.kernel != 7 {
        return Err(cannot(format!("kernels of {} px", net.kernel), "its ConvNeXts have 7", TIMM));
    }
    if net.eps != 1e-6 {
        let why = "the layer norms of its blocks have 1e-6";
        return Err(cannot(format!("layer norms of epsilon {:e}", net.eps), why, TIMM));
    }
    let out: Tensors = tensors.into_iter().map(|(name, tensor)| (convnext_name(&name), tensor)).collect();
    let config = json!({
        "model_type": "convnext",
        "num_channels": net.channels,
        "patch_size": net.patch,
        "num_stages": net.depths.len(),
        "hidden_sizes": net.dims,
        "depths": net.depths,
        "hidden_act": "gelu",
        "layer_norm_eps": net.head_eps,
        "layer_scale_init_value": net.layer_scale.unwrap_or(0.0),
        "drop_path_rate": 0.0,
    });
    let features = "model(pixel_values=images).pooler_output".to_owned();
    Ok(Network { class: "ConvNextModel", config, tensors: out, features, notes: Vec::new() })
}

fn convnext_name(name: &str) -> String {
    for (from, to) in [
        ("stem.0.", "embeddings.patch_embeddings."),
        ("stem.1.", "embeddings.layernorm."),
        ("head.norm.", "layernorm."),
    ] {
        if let Some(rest) = name.strip_prefix(from) {
            return format!("{to}{rest}");
        }
    }
    let rest = name
        .replace(".downsample.", ".downsampling_layer.")
        .replace(".blocks.", ".layers.")
        .replace(".conv_dw.", ".dwconv.")
        .replace(".norm.", ".layernorm.")
        .replace(".mlp.fc1.", ".pwconv1.")
        .replace(".mlp.fc2.", ".pwconv2.")
        .replace(".gamma", ".layer_scale_parameter");
    format!("encoder.{rest}")
}
