//! timm: `config.json` as `timm.models.save_for_hf` writes it. Any network of a class is built by one function of that class and arguments.
//!
//! Arguments in JSON cannot name a layer, so where an epsilon or an MLP is no argument, the function is one that has it.

use serde_json::{Value as Json, json};

use super::{Exported, Inexpressible, Own, Weights, ratio};
use crate::interop::arch::Arch;
use crate::model::{ConvNextArch, MlpKind, Pool, PositionEmbedding, ResNetArch, ResidualKind, Stem, Tensors, VitArch};

fn cannot(what: impl Into<String>, why: impl Into<String>, instead: impl Into<String>) -> Inexpressible {
    Inexpressible { program: "timm", what: what.into(), why: why.into(), instead: instead.into() }
}

const PLAIN: &str = "use `--format safetensors`, whose names are timm's and torchvision's";

pub(super) fn export(own: &Own<'_>) -> Result<Exported, Inexpressible> {
    let mut tensors = own.tensors();
    let (architecture, features, pool, mut args) = match own.arch {
        Arch::Vit(vit) if vit.position == PositionEmbedding::Rope => eva(vit, &mut tensors)?,
        Arch::Vit(vit) => vision_transformer(vit)?,
        Arch::ResNet(net) => resnet(net)?,
        Arch::ConvNext(net) => convnext(net)?,
    };
    // where it loads a folder, timm reads the pooling here alone
    args["global_pool"] = pool.into();
    let mut config = json!({
        "architecture": architecture,
        "num_classes": 0,
        "num_features": features,
        "global_pool": pool,
        "model_args": args,
        "pretrained_cfg": pretrained_cfg(own),
    });
    let mut output = "features";
    if let Some(head) = own.head {
        let name = match own.arch {
            Arch::Vit(_) => "head",
            Arch::ResNet(_) => "fc",
            Arch::ConvNext(_) => "head.fc",
        };
        head.put(&mut tensors, name);
        config["num_classes"] = head.classes().len().into();
        config["label_names"] = head.classes().into();
        output = "logits";
    }
    if let Arch::Vit(vit) = own.arch {
        // for readers that cannot tell it from the architecture
        config["layer_norm_eps"] = vit.eps.into();
        if vit.position == PositionEmbedding::Rope {
            config["rope_theta"] = vit.rope_base.into();
        }
    }
    let python = format!(
        "import timm\n\nmodel = timm.create_model(\"local-dir:.\", pretrained=True).eval()\n\n\n\
         def {output}(images):\n    return model(images)"
    );
    Ok(Exported {
        weights: Weights::Tensors(tensors),
        config,
        preprocessor: None,
        architecture: architecture.to_owned(),
        python,
        notes: Vec::new(),
    })
}

/// What timm knows of the images.
pub(super) fn pretrained_cfg(own: &Own<'_>) -> Json {
    let input = own.input;
    json!({
        "input_size": [3, input.size, input.size],
        "mean": input.mean,
        "std": input.std,
        "interpolation": "bicubic",
        "crop_pct": f64::from(input.size) / f64::from(input.shorter),
        "crop_mode": "center",
        "num_classes": own.head.map_or(0, |head| head.classes().len()),
    })
}

type Built = (&'static str, usize, &'static str, Json);

fn pool(vit: &VitArch) -> &'static str {
    match vit.pool {
        Pool::Class => "token",
        Pool::Mean => "avg",
    }
}

/// <https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/vision_transformer.py>
fn vision_transformer(vit: &VitArch) -> Result<Built, Inexpressible> {
    let architecture = match (vit.mlp, vit.eps) {
        (MlpKind::Gelu, 1e-6) => "vit_base_patch16_224",
        (MlpKind::Gelu, 1e-5) => "vit_base_patch16_clip_224",
        (MlpKind::Swiglu, 1e-6) => "vit_giant_patch14_dinov2",
        (MlpKind::Geglu, _) => {
            return Err(cannot("an MLP gated by GELU", "its vision transformers have GELU or SwiGLU", PLAIN));
        }
        (MlpKind::Gelu, eps) => {
            let why = "its vision transformers have 1e-6 or 1e-5";
            return Err(cannot(
                format!("layer norms of epsilon {eps:e}"),
                why,
                "use `--format hf`, where any can be set",
            ));
        }
        (MlpKind::Swiglu, eps) => {
            let why = "its vision transformer with SwiGLU has 1e-6";
            return Err(cannot(
                format!("layer norms of epsilon {eps:e}"),
                why,
                "use `--format hf`, where any can be set",
            ));
        }
    };
    let args = json!({
        "img_size": vit.image,
        "patch_size": vit.patch,
        "in_chans": vit.channels,
        "embed_dim": vit.dim,
        "depth": vit.depth,
        "num_heads": vit.heads,
        "mlp_ratio": ratio(vit.hidden, vit.dim),
        "qkv_bias": vit.qkv_bias,
        "qk_norm": vit.qk_norm,
        "init_values": vit.layer_scale,
        "class_token": vit.class_token,
        "no_embed_class": !vit.prefix_positions,
        "reg_tokens": vit.registers,
        "pre_norm": vit.pre_norm,
        "fc_norm": vit.fc_norm,
    });
    Ok((architecture, vit.dim, pool(vit), args))
}

/// Rotary positions: <https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/eva.py>, as its `DINOv3` functions call it.
fn eva(vit: &VitArch, tensors: &mut Tensors) -> Result<Built, Inexpressible> {
    let architecture = match vit.eps {
        1e-5 => "vit_small_patch16_dinov3",
        1e-6 => "eva02_tiny_patch14_224",
        eps => {
            let why = "its networks with rotary positions have 1e-6 or 1e-5";
            return Err(cannot(
                format!("layer norms of epsilon {eps:e}"),
                why,
                "use `--format hf`, where any can be set",
            ));
        }
    };
    if vit.mlp == MlpKind::Geglu {
        return Err(cannot(
            "an MLP gated by GELU",
            "its networks with rotary positions have GELU or SwiGLU",
            "use `--format hf`",
        ));
    }
    // this attention has biases of queries and values alone
    let separate = vit.qkv_bias && !vit.key_bias;
    let renamed = std::mem::take(tensors).into_iter().flat_map(|(name, (shape, values))| {
        if let Some(block) = name.strip_suffix("ls1.gamma") {
            return vec![(format!("{block}gamma_1"), (shape, values))];
        }
        if let Some(block) = name.strip_suffix("ls2.gamma") {
            return vec![(format!("{block}gamma_2"), (shape, values))];
        }
        if let Some(layer) = name.strip_suffix("qkv.bias").filter(|_| separate) {
            let mut parts = super::rows(&shape, &values, 3).into_iter();
            let (query, value) = (parts.next(), parts.nth(1));
            let named = [("q_bias", query), ("v_bias", value)].into_iter();
            return named.filter_map(|(end, part)| Some((format!("{layer}{end}"), part?))).collect();
        }
        vec![(name, (shape, values))]
    });
    *tensors = renamed.collect();
    let gated = vit.mlp == MlpKind::Swiglu;
    let args = json!({
        "img_size": vit.image,
        "patch_size": vit.patch,
        "in_chans": vit.channels,
        "embed_dim": vit.dim,
        "depth": vit.depth,
        "num_heads": vit.heads,
        "mlp_ratio": ratio(if gated { vit.hidden / 2 } else { vit.hidden }, vit.dim),
        "swiglu_mlp": gated,
        "swiglu_align_to": 0,
        "scale_mlp": false,
        "qkv_bias": vit.qkv_bias,
        "qkv_fused": true,
        "attn_type": if separate { "eva" } else { "rope" },
        "qk_norm": vit.qk_norm,
        "init_values": vit.layer_scale,
        "class_token": vit.class_token,
        "num_reg_tokens": vit.registers,
        "use_abs_pos_emb": false,
        "use_rot_pos_emb": true,
        "rope_type": "dinov3",
        "rope_temperature": vit.rope_base,
        "rope_rotate_half": true,
        "use_pre_transformer_norm": vit.pre_norm,
        "use_post_transformer_norm": !vit.fc_norm,
        "use_fc_norm": vit.fc_norm,
        "dynamic_img_size": true,
    });
    Ok((architecture, vit.dim, pool(vit), args))
}

/// <https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/resnet.py>
fn resnet(net: &ResNetArch) -> Result<Built, Inexpressible> {
    if net.stem == Stem::Cifar {
        let why = "the first convolution of its residual networks is 7 x 7 with stride 2, or three of 3 x 3";
        return Err(cannot("the 3 x 3 stem for small images (`stem = \"cifar\"`)", why, PLAIN));
    }
    if net.stem_planes != 64 {
        let why = "the first convolution of its residual networks has 64 channels";
        return Err(cannot(
            format!("a stem of {} channels", net.stem_planes),
            why,
            "use `--format hf`, where any can be set",
        ));
    }
    let architecture = match net.block {
        ResidualKind::Basic => "resnet18",
        ResidualKind::Bottleneck => "resnet50",
    };
    let args = json!({ "in_chans": net.channels, "layers": net.layers, "channels": net.planes });
    Ok((architecture, net.dim(), "avg", args))
}

/// <https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/convnext.py>
fn convnext(net: &ConvNextArch) -> Result<Built, Inexpressible> {
    if net.depths.len() != 4 {
        return Err(cannot(format!("{} stages", net.depths.len()), "its ConvNeXts have four", PLAIN));
    }
    if net.shrink_first != (net.patch == 2) {
        let why = "its first stage shrinks its input if and only if the patches are 2 px";
        return Err(cannot(format!("patches of {} px here", net.patch), why, "use `--format hf`"));
    }
    if net.patch > 4 {
        let why = "it dilates the last stages of a network that would shrink images more than 32 times";
        return Err(cannot(format!("patches of {} px", net.patch), why, "use `--format hf`"));
    }
    if net.eps != net.head_eps {
        let why = "all its layer norms have the same epsilon";
        return Err(cannot(format!("epsilons of {:e} and {:e}", net.eps, net.head_eps), why, "use `--format hf`"));
    }
    let args = json!({
        "in_chans": net.channels,
        "depths": net.depths,
        "dims": net.dims,
        "patch_size": net.patch,
        "kernel_sizes": net.kernel,
        "ls_init_value": net.layer_scale,
        "norm_eps": net.eps,
    });
    Ok(("convnext_tiny", net.dim(), "avg", args))
}
