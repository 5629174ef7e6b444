//! The table of layouts: what keys are called in the files of each program, and where in them a backbone lies.
//!
//! A layout is one row of [`NAMES`]. Where rows of it lie (`module.encoder_q.`, `teacher/backbone.`) is found by looking for its anchor; [`PLACES`] gives such places
//! names and says which one is meant where there are several.

use super::pattern::Rename;

/// Kind of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Vit,
    ResNet,
    ConvNext,
}

/// How a program calls the parts of a network.
#[derive(Debug)]
pub(super) struct Names {
    /// Whose names they are.
    pub(super) name: &'static str,
    pub(super) family: Family,
    /// A key that every such network has; what comes before it in a file is where the network lies.
    pub(super) anchor: &'static str,
    /// The beginning of another.
    pub(super) also: &'static str,
    /// From its names to ours, which are those of timm and torchvision.
    pub(super) renames: &'static [Rename],
    /// Beginnings of keys that are no part of a backbone; `~` before an end instead.
    pub(super) outside: &'static [&'static str],
    /// Beginnings of keys (`~`: parts of keys) of networks that look alike and are others, and what they are.
    pub(super) unlike: &'static [(&'static str, &'static str)],
    /// Epsilon of the layer norms, which no tensor tells.
    pub(super) eps: f64,
}

const VIT_OUTSIDE: &[&str] = &[
    "head.",
    "head_dist.",
    "heads.",
    "fc.",
    "decoder_",
    "decoder.",
    "decoder_blocks.",
    "mask_token",
    "pre_logits.",
    "predictor",
    "projection_head.",
    "prototypes.",
    "dino_head.",
    "ibot_head.",
    "cls_pred.",
    "pooler.",
    "classifier.",
    "rope_embed.",
    "~.bias_mask",
    "~attn.k_bias",
    "local_cls_norm.",
    "projector.",
    "proj.",
];

const VIT_UNLIKE: &[(&str, &str)] = &[
    ("dist_token", "a DeiT with a distillation token"),
    ("~relative_position", "a network with relative position biases (BEiT, Swin)"),
    ("~rel_pos_", "a network with relative position biases (BEiT, SAM)"),
    ("attn_pool.", "a vision transformer with attention pooling"),
    ("~.conv_ffn.", "a hybrid of convolutions and attention"),
    ("patch_embed.proj.0.", "a vision transformer with a stem of convolutions"),
    ("cls_norm.", "a DINOv3 with a norm of its own for the class token"),
];

const RESNET_OUTSIDE: &[&str] = &[
    "fc.",
    "head.",
    "heads.",
    "classifier.",
    "linear.",
    "projection_head.",
    "prototypes",
    "projector.",
    "predictor.",
    "queue",
    "~num_batches_tracked",
    "bn_proj.",
    "proj.",
];

const RESNET_UNLIKE: &[(&str, &str)] = &[
    ("attnpool.", "CLIP's residual network with attention pooling"),
    ("~.se.", "a residual network with squeeze-and-excitation"),
    ("~downsample.2.", "a ResNet-D, whose shortcuts pool before they convolve"),
    ("maxpool.0.", "a residual network with another stem"),
];

const CONVNEXT_UNLIKE: &[(&str, &str)] = &[("~.grn.", "a ConvNeXt V2, whose blocks normalise responses")];

/// Every layout that is read.
pub(super) const NAMES: &[Names] = &[
    // timm <https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/vision_transformer.py> and `eva.py`, whose names DINO, iBOT, MAE, MoCo v3,
    // I-JEPA, DeiT, DINOv2 (`models/vision_transformer.py`: chunks, register_tokens, w12) and DINOv3 (`storage_tokens`, w1, w2) share.
    Names {
        name: "timm ViT",
        family: Family::Vit,
        anchor: "patch_embed.proj.weight",
        also: "blocks.",
        renames: &[
            ("blocks.#.#.**", "blocks.$2.$3"),
            ("register_tokens", "reg_token"),
            ("storage_tokens", "reg_token"),
            ("blocks.#.gamma_1", "blocks.$1.ls1.gamma"),
            ("blocks.#.gamma_2", "blocks.$1.ls2.gamma"),
            ("blocks.#.attn.q_bias", "blocks.$1.attn.qkv.bias[0/3]"),
            ("blocks.#.attn.v_bias", "blocks.$1.attn.qkv.bias[2/3]"),
            ("blocks.#.mlp.w12.*", "blocks.$1.mlp.fc1.$2"),
            ("blocks.#.mlp.w1.*", "blocks.$1.mlp.fc1.$2[0/2]"),
            ("blocks.#.mlp.w2.*", "blocks.$1.mlp.fc1.$2[1/2]"),
            ("blocks.#.mlp.w3.*", "blocks.$1.mlp.fc2.$2"),
            ("blocks.#.mlp.fc1_g.*", "blocks.$1.mlp.fc1.$2[0/2]"),
            ("blocks.#.mlp.fc1_x.*", "blocks.$1.mlp.fc1.$2[1/2]"),
        ],
        outside: VIT_OUTSIDE,
        unlike: VIT_UNLIKE,
        eps: 1e-6,
    },
    // <https://github.com/huggingface/transformers/tree/main/src/transformers/models>: vit, vit_mae, vit_msn, ijepa, dinov2, dinov2_with_registers
    Names {
        name: "Hugging Face ViT",
        family: Family::Vit,
        anchor: "embeddings.patch_embeddings.projection.weight",
        also: "encoder.layer.",
        renames: &[
            ("embeddings.cls_token", "cls_token"),
            ("embeddings.register_tokens", "reg_token"),
            ("embeddings.mask_token", "mask_token"),
            ("embeddings.position_embeddings", "pos_embed"),
            ("embeddings.patch_embeddings.projection.*", "patch_embed.proj.$1"),
            ("encoder.layer.#.**", "blocks.$1.$2"),
            ("blocks.#.attention.attention.query.*", "blocks.$1.attn.qkv.$2[0/3]"),
            ("blocks.#.attention.attention.key.*", "blocks.$1.attn.qkv.$2[1/3]"),
            ("blocks.#.attention.attention.value.*", "blocks.$1.attn.qkv.$2[2/3]"),
            ("blocks.#.attention.output.dense.*", "blocks.$1.attn.proj.$2"),
            ("blocks.#.intermediate.dense.*", "blocks.$1.mlp.fc1.$2"),
            ("blocks.#.output.dense.*", "blocks.$1.mlp.fc2.$2"),
            ("blocks.#.mlp.weights_in.*", "blocks.$1.mlp.fc1.$2"),
            ("blocks.#.mlp.weights_out.*", "blocks.$1.mlp.fc2.$2"),
            ("blocks.#.layernorm_before.*", "blocks.$1.norm1.$2"),
            ("blocks.#.layernorm_after.*", "blocks.$1.norm2.$2"),
            ("blocks.#.layer_scale1.lambda1", "blocks.$1.ls1.gamma"),
            ("blocks.#.layer_scale2.lambda1", "blocks.$1.ls2.gamma"),
            ("layernorm.*", "norm.$1"),
        ],
        outside: VIT_OUTSIDE,
        unlike: VIT_UNLIKE,
        eps: 1e-12,
    },
    // .../models/dinov3_vit
    Names {
        name: "Hugging Face DINOv3",
        family: Family::Vit,
        anchor: "embeddings.patch_embeddings.weight",
        also: "layer.",
        renames: &[
            ("embeddings.cls_token", "cls_token"),
            ("embeddings.register_tokens", "reg_token"),
            ("embeddings.mask_token", "mask_token"),
            ("embeddings.patch_embeddings.*", "patch_embed.proj.$1"),
            ("layer.#.**", "blocks.$1.$2"),
            ("blocks.#.attention.q_proj.*", "blocks.$1.attn.qkv.$2[0/3]"),
            ("blocks.#.attention.k_proj.*", "blocks.$1.attn.qkv.$2[1/3]"),
            ("blocks.#.attention.v_proj.*", "blocks.$1.attn.qkv.$2[2/3]"),
            ("blocks.#.attention.o_proj.*", "blocks.$1.attn.proj.$2"),
            ("blocks.#.mlp.up_proj.*", "blocks.$1.mlp.fc1.$2[1/2]"),
            ("blocks.#.mlp.gate_proj.*", "blocks.$1.mlp.fc1.$2[0/2]"),
            ("blocks.#.mlp.down_proj.*", "blocks.$1.mlp.fc2.$2"),
            ("blocks.#.layer_scale1.lambda1", "blocks.$1.ls1.gamma"),
            ("blocks.#.layer_scale2.lambda1", "blocks.$1.ls2.gamma"),
        ],
        outside: VIT_OUTSIDE,
        unlike: VIT_UNLIKE,
        eps: 1e-5,
    },
    // <https://github.com/pytorch/vision/blob/main/torchvision/models/vision_transformer.py>; linear_1 and linear_2 are from before 0.14
    Names {
        name: "torchvision ViT",
        family: Family::Vit,
        anchor: "conv_proj.weight",
        also: "encoder.layers.encoder_layer_",
        renames: &[
            ("class_token", "cls_token"),
            ("conv_proj.*", "patch_embed.proj.$1"),
            ("encoder.pos_embedding", "pos_embed"),
            ("encoder.ln.*", "norm.$1"),
            ("encoder.layers.encoder_layer_#.**", "blocks.$1.$2"),
            ("blocks.#.ln_1.*", "blocks.$1.norm1.$2"),
            ("blocks.#.ln_2.*", "blocks.$1.norm2.$2"),
            ("blocks.#.self_attention.in_proj_weight", "blocks.$1.attn.qkv.weight"),
            ("blocks.#.self_attention.in_proj_bias", "blocks.$1.attn.qkv.bias"),
            ("blocks.#.self_attention.out_proj.*", "blocks.$1.attn.proj.$2"),
            ("blocks.#.mlp.0.*", "blocks.$1.mlp.fc1.$2"),
            ("blocks.#.mlp.3.*", "blocks.$1.mlp.fc2.$2"),
            ("blocks.#.mlp.linear_1.*", "blocks.$1.mlp.fc1.$2"),
            ("blocks.#.mlp.linear_2.*", "blocks.$1.mlp.fc2.$2"),
        ],
        outside: VIT_OUTSIDE,
        unlike: VIT_UNLIKE,
        eps: 1e-6,
    },
    // OpenAI's CLIP (<https://github.com/openai/CLIP/blob/main/clip/model.py>) and open_clip
    Names {
        name: "CLIP image tower",
        family: Family::Vit,
        anchor: "conv1.weight",
        also: "transformer.resblocks.",
        renames: &[
            ("class_embedding", "cls_token"),
            ("positional_embedding", "pos_embed"),
            ("conv1.*", "patch_embed.proj.$1"),
            ("ln_pre.*", "norm_pre.$1"),
            ("ln_post.*", "norm.$1"),
            ("transformer.resblocks.#.**", "blocks.$1.$2"),
            ("blocks.#.ln_1.*", "blocks.$1.norm1.$2"),
            ("blocks.#.ln_2.*", "blocks.$1.norm2.$2"),
            ("blocks.#.attn.in_proj_weight", "blocks.$1.attn.qkv.weight"),
            ("blocks.#.attn.in_proj_bias", "blocks.$1.attn.qkv.bias"),
            ("blocks.#.attn.out_proj.*", "blocks.$1.attn.proj.$2"),
            ("blocks.#.mlp.c_fc.*", "blocks.$1.mlp.fc1.$2"),
            ("blocks.#.mlp.c_proj.*", "blocks.$1.mlp.fc2.$2"),
            ("blocks.#.ls_1.gamma", "blocks.$1.ls1.gamma"),
            ("blocks.#.ls_2.gamma", "blocks.$1.ls2.gamma"),
        ],
        outside: &["proj"],
        unlike: VIT_UNLIKE,
        eps: 1e-5,
    },
    // .../models/clip, `vision_model.`
    Names {
        name: "Hugging Face CLIP image tower",
        family: Family::Vit,
        anchor: "embeddings.patch_embedding.weight",
        also: "encoder.layers.",
        renames: &[
            ("embeddings.class_embedding", "cls_token"),
            ("embeddings.position_embedding.weight", "pos_embed"),
            ("embeddings.patch_embedding.*", "patch_embed.proj.$1"),
            ("pre_layrnorm.*", "norm_pre.$1"),
            ("post_layernorm.*", "norm.$1"),
            ("encoder.layers.#.**", "blocks.$1.$2"),
            ("blocks.#.layer_norm1.*", "blocks.$1.norm1.$2"),
            ("blocks.#.layer_norm2.*", "blocks.$1.norm2.$2"),
            ("blocks.#.self_attn.q_proj.*", "blocks.$1.attn.qkv.$2[0/3]"),
            ("blocks.#.self_attn.k_proj.*", "blocks.$1.attn.qkv.$2[1/3]"),
            ("blocks.#.self_attn.v_proj.*", "blocks.$1.attn.qkv.$2[2/3]"),
            ("blocks.#.self_attn.out_proj.*", "blocks.$1.attn.proj.$2"),
        ],
        outside: &["embeddings.position_ids", "head."],
        unlike: VIT_UNLIKE,
        eps: 1e-5,
    },
    // <https://github.com/pytorch/vision/blob/main/torchvision/models/resnet.py>, and everyone who trained one
    Names {
        name: "torchvision ResNet",
        family: Family::ResNet,
        anchor: "conv1.weight",
        also: "layer1.0.conv1.",
        renames: &[
            ("layer1.#.shortcut.**", "layer1.$1.downsample.$2"),
            ("layer2.#.shortcut.**", "layer2.$1.downsample.$2"),
            ("layer3.#.shortcut.**", "layer3.$1.downsample.$2"),
            ("layer4.#.shortcut.**", "layer4.$1.downsample.$2"),
        ],
        outside: RESNET_OUTSIDE,
        unlike: RESNET_UNLIKE,
        eps: 1e-5,
    },
    // `nn.Sequential(*list(resnet.children())[:-1])`, as lightly's examples cut the head off
    Names {
        name: "torchvision ResNet as a sequence",
        family: Family::ResNet,
        anchor: "0.weight",
        also: "4.0.conv1.",
        renames: &[
            ("0.weight", "conv1.weight"),
            ("1.*", "bn1.$1"),
            ("4.**", "layer1.$1"),
            ("5.**", "layer2.$1"),
            ("6.**", "layer3.$1"),
            ("7.**", "layer4.$1"),
        ],
        outside: RESNET_OUTSIDE,
        unlike: RESNET_UNLIKE,
        eps: 1e-5,
    },
    // .../models/resnet
    Names {
        name: "Hugging Face ResNet",
        family: Family::ResNet,
        anchor: "embedder.embedder.convolution.weight",
        also: "encoder.stages.0.layers.0.",
        renames: &[
            ("embedder.embedder.convolution.*", "conv1.$1"),
            ("embedder.embedder.normalization.*", "bn1.$1"),
            ("encoder.stages.#.layers.#.**", "stage.$1.$2.$3"),
            ("stage.#.#.layer.0.convolution.*", "stage.$1.$2.conv1.$3"),
            ("stage.#.#.layer.1.convolution.*", "stage.$1.$2.conv2.$3"),
            ("stage.#.#.layer.2.convolution.*", "stage.$1.$2.conv3.$3"),
            ("stage.#.#.layer.0.normalization.*", "stage.$1.$2.bn1.$3"),
            ("stage.#.#.layer.1.normalization.*", "stage.$1.$2.bn2.$3"),
            ("stage.#.#.layer.2.normalization.*", "stage.$1.$2.bn3.$3"),
            ("stage.#.#.shortcut.convolution.*", "stage.$1.$2.downsample.0.$3"),
            ("stage.#.#.shortcut.normalization.*", "stage.$1.$2.downsample.1.$3"),
            ("stage.0.**", "layer1.$1"),
            ("stage.1.**", "layer2.$1"),
            ("stage.2.**", "layer3.$1"),
            ("stage.3.**", "layer4.$1"),
        ],
        outside: RESNET_OUTSIDE,
        unlike: RESNET_UNLIKE,
        eps: 1e-5,
    },
    // <https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/convnext.py>
    Names {
        name: "timm ConvNeXt",
        family: Family::ConvNext,
        anchor: "stem.0.weight",
        also: "stages.0.blocks.0.conv_dw.",
        renames: &[("norm_pre.*", "head.norm.$1")],
        outside: &["head.fc.", "head.weight", "head.bias"],
        unlike: CONVNEXT_UNLIKE,
        eps: 1e-6,
    },
    // <https://github.com/facebookresearch/ConvNeXt/blob/main/models/convnext.py>
    Names {
        name: "ConvNeXt of its authors",
        family: Family::ConvNext,
        anchor: "downsample_layers.0.0.weight",
        also: "stages.0.0.dwconv.",
        renames: &[
            ("downsample_layers.0.**", "stem.$1"),
            ("downsample_layers.#.**", "stages.$1.downsample.$2"),
            ("stages.#.#.**", "stages.$1.blocks.$2.$3"),
            ("stages.#.blocks.#.dwconv.*", "stages.$1.blocks.$2.conv_dw.$3"),
            ("stages.#.blocks.#.pwconv1.*", "stages.$1.blocks.$2.mlp.fc1.$3"),
            ("stages.#.blocks.#.pwconv2.*", "stages.$1.blocks.$2.mlp.fc2.$3"),
            ("norm.*", "head.norm.$1"),
        ],
        outside: &["head.weight", "head.bias", "norms.", "mask_token", "decoder"],
        unlike: CONVNEXT_UNLIKE,
        eps: 1e-6,
    },
    // <https://github.com/pytorch/vision/blob/main/torchvision/models/convnext.py>
    Names {
        name: "torchvision ConvNeXt",
        family: Family::ConvNext,
        anchor: "features.0.0.weight",
        also: "features.1.0.block.0.",
        renames: &[
            ("features.0.**", "stem.$1"),
            ("features.1.#.**", "stages.0.blocks.$1.$2"),
            ("features.3.#.**", "stages.1.blocks.$1.$2"),
            ("features.5.#.**", "stages.2.blocks.$1.$2"),
            ("features.7.#.**", "stages.3.blocks.$1.$2"),
            ("features.2.**", "stages.1.downsample.$1"),
            ("features.4.**", "stages.2.downsample.$1"),
            ("features.6.**", "stages.3.downsample.$1"),
            ("stages.#.blocks.#.block.0.*", "stages.$1.blocks.$2.conv_dw.$3"),
            ("stages.#.blocks.#.block.2.*", "stages.$1.blocks.$2.norm.$3"),
            ("stages.#.blocks.#.block.3.*", "stages.$1.blocks.$2.mlp.fc1.$3"),
            ("stages.#.blocks.#.block.5.*", "stages.$1.blocks.$2.mlp.fc2.$3"),
            ("stages.#.blocks.#.layer_scale", "stages.$1.blocks.$2.gamma"),
            ("classifier.0.*", "head.norm.$1"),
        ],
        outside: &["classifier."],
        unlike: CONVNEXT_UNLIKE,
        eps: 1e-6,
    },
    // .../models/convnext
    Names {
        name: "Hugging Face ConvNeXt",
        family: Family::ConvNext,
        anchor: "embeddings.patch_embeddings.weight",
        also: "encoder.stages.0.layers.0.dwconv.",
        renames: &[
            ("embeddings.patch_embeddings.*", "stem.0.$1"),
            ("embeddings.layernorm.*", "stem.1.$1"),
            ("encoder.stages.#.downsampling_layer.**", "stages.$1.downsample.$2"),
            ("encoder.stages.#.layers.#.**", "stages.$1.blocks.$2.$3"),
            ("stages.#.blocks.#.dwconv.*", "stages.$1.blocks.$2.conv_dw.$3"),
            ("stages.#.blocks.#.layernorm.*", "stages.$1.blocks.$2.norm.$3"),
            ("stages.#.blocks.#.pwconv1.*", "stages.$1.blocks.$2.mlp.fc1.$3"),
            ("stages.#.blocks.#.pwconv2.*", "stages.$1.blocks.$2.mlp.fc2.$3"),
            ("stages.#.blocks.#.layer_scale_parameter", "stages.$1.blocks.$2.gamma"),
            ("layernorm.*", "head.norm.$1"),
        ],
        outside: &["classifier."],
        unlike: CONVNEXT_UNLIKE,
        eps: 1e-6,
    },
];

/// A place in a file where a backbone may lie: what comes before its keys, less what says nothing ([`CONTAINERS`]).
#[derive(Debug)]
pub(super) struct Place {
    pub(super) path: &'static str,
    /// Who writes such files, and which of their networks it is.
    pub(super) name: &'static str,
}

const fn place(path: &'static str, name: &'static str) -> Place {
    Place { path, name }
}

/// Places, best first: what the authors evaluate, then its twin.
pub(super) const PLACES: &[Place] = &[
    place("teacher.backbone", "DINO, iBOT or DINOv2: the teacher"),
    place("teacher", "a teacher"),
    place("target_encoder", "I-JEPA: the target encoder"),
    place("base_encoder", "MoCo v3: the base encoder"),
    place("encoder_q", "MoCo v2: the query encoder"),
    place("online_encoder.net", "BYOL: the online encoder"),
    place("online_encoder", "BYOL: the online encoder"),
    place("online_network", "BYOL: the online network"),
    place("online_network.encoder", "BYOL: the online network"),
    place("online_network.backbone", "BYOL: the online network"),
    place("backbone", "lightly, solo-learn, Barlow Twins or VICReg: the backbone"),
    place("", "the network itself"),
    place("encoder", "SimSiam, SimMIM or solo-learn: the encoder"),
    place("vit", "Hugging Face: the backbone of a head"),
    place("dinov2", "Hugging Face: the backbone of a head"),
    place("dinov2_with_registers", "Hugging Face: the backbone of a head"),
    place("ijepa", "Hugging Face: the backbone of a head"),
    place("resnet", "the backbone of a head"),
    place("convnext", "Hugging Face: the backbone of a head"),
    place("visual", "CLIP: the image tower"),
    place("visual.trunk", "open_clip: the image tower, of timm"),
    place("vision_model", "Hugging Face CLIP: the image tower"),
    place("teacher_backbone", "lightly's DINO: the teacher"),
    place("student.backbone", "DINO, iBOT or DINOv2: the student"),
    place("student", "a student"),
    place("student_backbone", "lightly: the student"),
    place("momentum_encoder", "MoCo v3: the momentum encoder"),
    place("momentum_backbone", "solo-learn: the momentum backbone"),
    place("backbone_momentum", "lightly: the momentum backbone"),
    place("encoder_k", "MoCo v2: the key encoder"),
    place("target_encoder.net", "BYOL: the target encoder"),
    place("target_network", "BYOL: the target network"),
];

/// Parts of a place that say nothing: dictionaries around a state dict, wrappers for several devices and for the compiler.
pub(super) const CONTAINERS: &[&str] = &[
    "state_dict",
    "model",
    "module",
    "_orig_mod",
    "_forward_module",
    "model_state_dict",
    "model_state",
    "network",
    "net",
    "weights",
];

/// Keys (parts of them) of a method beside its backbone, and whose they are.
pub(super) const MARKS: &[(&str, &str)] = &[
    ("decoder_embed.weight", "MAE"),
    ("decoder.decoder_embed.weight", "MAE"),
    ("dino_loss/center", "DINO or iBOT"),
    ("predictor_embed.weight", "I-JEPA"),
    ("queue_ptr", "MoCo v2"),
    ("base_encoder.", "MoCo v3"),
    ("prototypes", "SwAV"),
    ("criterion.", "lightly"),
    ("register_tokens", "DINOv2 with registers"),
    ("storage_tokens", "DINOv3"),
    ("rope_embed.periods", "DINOv3"),
    ("projector.", "Barlow Twins or VICReg"),
];

/// Networks that are not read: the end of a key that tells them, and what they are.
pub(super) const UNSUPPORTED: &[(&str, &str)] = &[
    ("features.1.conv.0.0.weight", "a MobileNetV2"),
    ("features.1.block.0.0.weight", "a MobileNetV3 or EfficientNet of torchvision"),
    ("features.1.0.block.0.0.weight", "an EfficientNet of torchvision"),
    ("features.denseblock1.denselayer1.conv1.weight", "a DenseNet"),
    ("relative_position_bias_table", "a Swin transformer or BEiT"),
    ("attnpool.positional_embedding", "CLIP's residual network"),
    ("conv1.0.weight", "a residual network with a deep stem"),
    ("blocks.0.0.conv_dw.weight", "an EfficientNet or MobileNet of timm"),
    ("classifier.6.weight", "a VGG or AlexNet"),
    ("trunk_output.block1.block1-0.f.a.0.weight", "a RegNet"),
    ("stages.0.0.conv_rep.weight", "a RepVGG"),
    ("Mixed_5b.branch1x1.conv.weight", "an Inception network"),
    ("text_model.embeddings.token_embedding.weight", "a text model"),
    ("embeddings.word_embeddings.weight", "a text model"),
    ("model.embed_tokens.weight", "a language model"),
    ("wte.weight", "a language model"),
    ("lora_A.weight", "a LoRA adapter without its base model"),
];
