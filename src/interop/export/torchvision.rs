//! torchvision: a state dict, and the constructor whose state dict it is.

use serde_json::json;

use super::{Exported, Inexpressible, Own, Weights, python_list};
use crate::interop::arch::Arch;
use crate::model::{ConvNextArch, MlpKind, Pool, PositionEmbedding, ResNetArch, ResidualKind, Stem, Tensors, VitArch};

fn cannot(what: impl Into<String>, why: impl Into<String>) -> Inexpressible {
    let instead = "use `--format timm`, or `--format safetensors`".to_owned();
    Inexpressible { program: "torchvision", what: what.into(), why: why.into(), instead }
}

pub(super) fn export(own: &Own<'_>) -> Result<Exported, Inexpressible> {
    // constructor and its arguments; the classifier in Python and in the state dict
    let (constructor, arguments, head, rename): (_, _, [&str; 2], fn(&str) -> String) = match own.arch {
        Arch::Vit(vit) => ("VisionTransformer", vision_transformer(vit)?, ["heads", "heads.head"], vit_name),
        Arch::ResNet(net) => ("ResNet", resnet(net)?, ["fc", "fc"], str::to_owned),
        Arch::ConvNext(net) => ("ConvNeXt", convnext(net)?, ["classifier[2]", "classifier.2"], convnext_name),
    };
    let architecture = format!("torchvision.models.{constructor}");
    let classes = own.head.map_or_else(String::new, |head| format!("    num_classes={},\n", head.classes().len()));
    let builder = format!("{architecture}(\n    {arguments},\n{classes})");
    let renamed = own.tensors().into_iter().map(|(name, (shape, values))| {
        let name = rename(&name);
        let shape = if name.ends_with("layer_scale") { vec![shape[0], 1, 1] } else { shape };
        (name, (shape, values))
    });
    let mut tensors: Tensors = renamed.collect();
    let mut config = json!({
        "architecture": architecture,
        "builder": builder,
        "pretrained_cfg": super::timm::pretrained_cfg(own),
    });
    let (output, behind, notes) = if let Some(classifier) = own.head {
        classifier.put(&mut tensors, head[1]);
        config["label_names"] = classifier.classes().into();
        ("logits", String::new(), Vec::new())
    } else {
        let note = "the state dict has no classifier: the code below replaces it by the identity";
        ("features", format!("model.{} = torch.nn.Identity()\n", head[0]), vec![note.to_owned()])
    };
    let python = format!(
        "import functools\n\nimport torch\nimport torchvision\nfrom safetensors.torch import load_file\n\n\
         model = {builder}\n{behind}model.load_state_dict(load_file(\"model.safetensors\"))\nmodel.eval()\n\n\n\
         def {output}(images):\n    return model(images)"
    );
    if let Arch::Vit(vit) = own.arch {
        config["num_heads"] = vit.heads.into();
        config["image_size"] = json!(vit.image);
        config["layer_norm_eps"] = vit.eps.into();
    }
    Ok(Exported { weights: Weights::Tensors(tensors), config, preprocessor: None, architecture, python, notes })
}

fn vision_transformer(vit: &VitArch) -> Result<String, Inexpressible> {
    let has = [
        (vit.position == PositionEmbedding::Rope, "rotary positions", "its positions are learned"),
        (!vit.class_token, "a network without class token", "its vision transformers have one"),
        (vit.pool == Pool::Mean, "the mean of the patches as features", "it takes the class token"),
        (vit.registers > 0, "register tokens", "it has none"),
        (!vit.prefix_positions, "a class token without position", "its class token has one"),
        (vit.layer_scale.is_some(), "LayerScale", "its vision transformers have none"),
        (vit.mlp != MlpKind::Gelu, "a gated MLP", "its MLP is two layers with GELU"),
        (!vit.qkv_bias, "queries and keys without biases", "its attention has them"),
        (vit.qk_norm, "norms of queries and keys", "its attention has none"),
        (vit.pre_norm, "a norm before the blocks", "it has none"),
        (vit.fc_norm, "the final norm after pooling", "it comes before"),
        (vit.image[0] != vit.image[1], "images that are no squares", "its images are"),
    ];
    if let Some((_, what, why)) = has.into_iter().find(|(has, ..)| *has) {
        return Err(cannot(what, why));
    }
    Ok(format!(
        "image_size={}, patch_size={}, num_layers={}, num_heads={}, hidden_dim={}, mlp_dim={},\n    \
         norm_layer=functools.partial(torch.nn.LayerNorm, eps={:e})",
        vit.image[0], vit.patch, vit.depth, vit.heads, vit.dim, vit.hidden, vit.eps
    ))
}

/// <https://github.com/pytorch/vision/blob/main/torchvision/models/vision_transformer.py>
fn vit_name(name: &str) -> String {
    match name {
        "cls_token" => return "class_token".to_owned(),
        "pos_embed" => return "encoder.pos_embedding".to_owned(),
        _ => {}
    }
    if let Some(rest) = name.strip_prefix("patch_embed.proj.") {
        return format!("conv_proj.{rest}");
    }
    if let Some(rest) = name.strip_prefix("norm.") {
        return format!("encoder.ln.{rest}");
    }
    let Some((block, rest)) = name.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) else {
        return name.to_owned();
    };
    let rest = rest
        .replace("norm1.", "ln_1.")
        .replace("norm2.", "ln_2.")
        .replace("attn.qkv.", "self_attention.in_proj_")
        .replace("attn.proj.", "self_attention.out_proj.")
        .replace("mlp.fc1.", "mlp.0.")
        .replace("mlp.fc2.", "mlp.3.");
    format!("encoder.layers.encoder_layer_{block}.{rest}")
}

fn resnet(net: &ResNetArch) -> Result<String, Inexpressible> {
    if net.stem == Stem::Cifar {
        let why = "the first convolution of its residual networks is 7 x 7 with stride 2";
        return Err(Inexpressible {
            program: "torchvision",
            what: "the 3 x 3 stem for small images (`stem = \"cifar\"`)".to_owned(),
            why: why.to_owned(),
            instead: "use `--format safetensors`, which loads into its network once `conv1` and `maxpool` are replaced (docs/export.md)".to_owned(),
        });
    }
    if net.stem_planes != 64 || net.planes != [64, 128, 256, 512] {
        let why = "its residual networks begin with 64 channels, doubled from stage to stage";
        return Err(Inexpressible {
            program: "torchvision",
            what: format!("channels {:?} after a stem of {}", net.planes, net.stem_planes),
            why: why.to_owned(),
            instead: "use `--format hf`, where any can be set".to_owned(),
        });
    }
    let block = match net.block {
        ResidualKind::Basic => "BasicBlock",
        ResidualKind::Bottleneck => "Bottleneck",
    };
    Ok(format!("torchvision.models.resnet.{block}, {}", python_list(&net.layers)))
}

fn convnext(net: &ConvNextArch) -> Result<String, Inexpressible> {
    let has = [
        (net.patch != 4 || net.shrink_first, format!("patches of {} px", net.patch), "its ConvNeXts have 4"),
        (net.kernel != 7, format!("kernels of {} px", net.kernel), "its ConvNeXts have 7"),
        (net.layer_scale.is_none(), "blocks without LayerScale".to_owned(), "its ConvNeXts have it"),
        (net.depths.len() != 4, format!("{} stages", net.depths.len()), "its ConvNeXts are read with four"),
        (
            net.eps != 1e-6 || net.head_eps != 1e-6,
            format!("epsilons of {:e} and {:e}", net.eps, net.head_eps),
            "its layer norms have 1e-6",
        ),
    ];
    if let Some((_, what, why)) = has.into_iter().find(|(has, ..)| *has) {
        return Err(cannot(what, why));
    }
    let stages = net.depths.iter().enumerate().map(|(stage, depth)| {
        let next = net.dims.get(stage + 1).map_or_else(|| "None".to_owned(), ToString::to_string);
        format!("torchvision.models.convnext.CNBlockConfig({}, {next}, {depth})", net.dims[stage])
    });
    let stages: Vec<String> = stages.collect();
    Ok(format!("[\n        {},\n    ]", stages.join(",\n        ")))
}

/// <https://github.com/pytorch/vision/blob/main/torchvision/models/convnext.py>
fn convnext_name(name: &str) -> String {
    if let Some(rest) = name.strip_prefix("stem.") {
        return format!("features.0.{rest}");
    }
    if let Some(rest) = name.strip_prefix("head.norm.") {
        return format!("classifier.0.{rest}");
    }
    let parts = name.strip_prefix("stages.").and_then(|rest| rest.split_once('.'));
    let Some((stage, rest)) = parts.and_then(|(stage, rest)| Some((stage.parse::<usize>().ok()?, rest))) else {
        return name.to_owned();
    };
    if let Some(rest) = rest.strip_prefix("downsample.") {
        return format!("features.{}.{rest}", 2 * stage);
    }
    let rest = rest
        .replace("blocks.", "")
        .replace(".conv_dw.", ".block.0.")
        .replace(".norm.", ".block.2.")
        .replace(".mlp.fc1.", ".block.3.")
        .replace(".mlp.fc2.", ".block.5.")
        .replace(".gamma", ".layer_scale");
    format!("features.{}.{rest}", 2 * stage + 1)
}
