"""Writes small checkpoints with the libraries that own their layouts, and the features that those libraries compute.

    pip install torch torchvision timm transformers safetensors lightly
    python tests/interop/make_checkpoints.py peers
    GOLDEN_DIR=peers cargo test golden_checkpoints

Each network is random, tiny, saved as its library saves it, and run in double precision on two images. The cases have the form of the golden kind
`checkpoints`, so the same runner reads them: the backbone must be found, load whole, and give the same tokens or pooled features.
"""

import argparse
import json
import sys
from collections import OrderedDict
from pathlib import Path

import timm
import torch
import torchvision
import transformers as hf
from safetensors.torch import save_file

ROOT = Path(sys.argv[1]) / "checkpoints"
IMAGE, PATCH, DIM, HEADS = 32, 8, 32, 2
torch.manual_seed(0)
X = torch.randn(2, 3, IMAGE, IMAGE, dtype=torch.float64)
NAMES = []


def randomise(model):
    """Moves every parameter and statistic away from its initial value, so that none can be forgotten."""
    generator = torch.Generator().manual_seed(1)
    for name, value in list(model.named_parameters()) + list(model.named_buffers()):
        if value.dtype.is_floating_point and "position_ids" not in name and "periods" not in name and "inv_freq" not in name:
            noise = torch.randn(value.shape, generator=generator)
            value.data.copy_(noise.abs() * 0.5 + 0.5 if name.endswith("running_var") else value.float() * 0.5 + noise * 0.1)
    return model.eval()


def write(name, what, path, outputs, heads=HEADS, image=IMAGE):
    args = {"num_heads": heads, "img_size": image}
    tensors = {"x": X.float(), **{f"out.{key}": value.float().contiguous() for key, value in outputs.items()}}
    manifest = {
        "what": what,
        "args": args,
        # single precision here, double there: relative to the largest value
        "tolerance": {"rel": 1e-4, "abs": 1e-4 * max(1.0, *[value.abs().max().item() for value in outputs.values()])},
        "file": f"checkpoints/{path}",
        "layout": {"container": None},
    }
    (ROOT / f"{name}.json").write_text(json.dumps(manifest, indent=1))
    save_file(tensors, ROOT / f"{name}.safetensors")
    NAMES.append(name)


def features(model, forward):
    with torch.no_grad():
        out = forward(model.double(), X)
    model.float()
    return out


def torch_case(name, what, model, forward, wrap=lambda state: state, legacy=False, **options):
    outputs = features(randomise(model), forward)
    torch.save(wrap(model.state_dict()), ROOT / f"{name}.pth", _use_new_zipfile_serialization=not legacy)
    write(name, what, f"{name}.pth", outputs, **options)


def hf_case(name, model, forward, **options):
    outputs = features(randomise(model), forward)
    model.save_pretrained(ROOT / name)
    write(name, f"transformers {type(model).__name__}", name, outputs, **options)


def tokens(model, x):
    return {"tokens": model.forward_features(x)}


def timm_vit(**options):
    base = {"img_size": IMAGE, "patch_size": PATCH, "embed_dim": DIM, "depth": 2, "num_heads": HEADS, "num_classes": 5, "mlp_ratio": 2}
    return timm.models.vision_transformer.VisionTransformer(**{**base, **options})


def prefixed(prefix):
    return lambda state: OrderedDict((prefix + key, value) for key, value in state.items())


def trained(model):
    """A checkpoint with what training leaves in it: arguments, optimizer, numbers of NumPy."""
    import numpy

    optimizer = torch.optim.AdamW(model.parameters())
    sum(value.square().sum() for value in model.parameters()).backward()
    optimizer.step()
    return lambda state: {
        "epoch": 7,
        "best": numpy.float64(0.5),
        "args": argparse.Namespace(arch="vit_small", lr=0.1, output_dir=Path("out")),
        "optimizer": optimizer.state_dict(),
        "model": prefixed("module.")(state),
        "loss": torch.tensor(1.0),
    }


def timm_cases():
    torch_case("timm_vit", "timm ViT", timm_vit(), tokens)
    torch_case("timm_vit_legacy", "timm ViT in the old format", timm_vit(), tokens, legacy=True)
    torch_case("timm_vit_no_cls", "without class token", timm_vit(class_token=False, global_pool="avg"), tokens)
    torch_case("timm_vit_reg", "registers", timm_vit(reg_tokens=3, no_embed_class=True, init_values=0.1), tokens)
    torch_case("timm_vit_qknorm", "norms of queries and keys", timm_vit(qk_norm=True), tokens)
    torch_case("timm_vit_prenorm", "norm before blocks", timm_vit(pre_norm=True), tokens)
    torch_case("timm_vit_nobias", "no qkv bias", timm_vit(qkv_bias=False), tokens)
    torch_case("timm_vit_noembed", "no position of the class token", timm_vit(no_embed_class=True), tokens)
    swiglu = timm_vit(mlp_layer=timm.layers.GluMlp, act_layer=torch.nn.SiLU, mlp_ratio=4)
    for block in swiglu.blocks:
        block.mlp.gate_last = False
    torch_case("timm_vit_swiglu", "SwiGLU", swiglu, tokens)
    model = timm_vit()
    randomise(model)
    torch_case("training", "a training checkpoint with optimizer and arguments", model, tokens, wrap=trained(model))
    pooled = lambda model, x: {"pooled": model.forward_features(x).mean((2, 3))}
    resnet = lambda block, layers: timm.models.resnet.ResNet(block, layers, channels=(8, 16, 24, 32), num_classes=3, stem_width=8)
    for name, block in [("basic", timm.models.resnet.BasicBlock), ("bottleneck", timm.models.resnet.Bottleneck)]:
        try:
            model = resnet(block, [1, 1, 1, 1])
        except TypeError:
            model = timm.create_model("resnet18" if name == "basic" else "resnet50", num_classes=3)
        torch_case(f"timm_resnet_{name}", "timm ResNet", model, pooled)
    convnext = timm.models.convnext.ConvNeXt(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), num_classes=3)
    torch_case("timm_convnext", "timm ConvNeXt", convnext, lambda m, x: {"pooled": m.forward_head(m.forward_features(x), pre_logits=True)})
    eva = timm.create_model(
        "vit_small_patch16_dinov3", pretrained=False, img_size=IMAGE, patch_size=PATCH, embed_dim=DIM, depth=2, num_heads=HEADS, num_classes=0
    )
    torch_case("timm_dinov3", "timm DINOv3", eva, tokens)


def torchvision_cases():
    pooled = lambda model, x: {"pooled": torch.nn.Sequential(*list(model.children())[:-1])(x).flatten(1)}
    for name in ["resnet18", "resnet50"]:
        torch_case(f"tv_{name}", f"torchvision {name}", getattr(torchvision.models, name)(num_classes=3), pooled)
    wrap = lambda state: {"state_dict": prefixed("backbone.")(state), "epoch": 3}
    sequence = torch.nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])
    torch_case("lightly_sequence", "ResNet as a sequence, as in lightly's examples", sequence, lambda m, x: {"pooled": m(x).flatten(1)}, wrap=wrap)

    def vit(model, x):
        x = model._process_input(x)
        return {"tokens": model.encoder(torch.cat([model.class_token.expand(x.shape[0], -1, -1), x], 1))}

    vision = torchvision.models.VisionTransformer(IMAGE, PATCH, 2, HEADS, DIM, 2 * DIM, num_classes=3)
    torch_case("tv_vit", "torchvision ViT", vision, vit)
    convnext = torchvision.models.convnext_tiny(num_classes=3)
    torch_case("tv_convnext", "torchvision ConvNeXt", convnext, lambda m, x: {"pooled": m.classifier[:2](m.avgpool(m.features(x)))[:, :, ]})


def hf_cases():
    small = dict(hidden_size=DIM, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=64, image_size=IMAGE, patch_size=PATCH)
    last = lambda model, x: {"tokens": model(x).last_hidden_state}
    hf_case("hf_vit", hf.ViTModel(hf.ViTConfig(**small)), last)
    hf_case("hf_vit_head", hf.ViTForImageClassification(hf.ViTConfig(**small)), lambda m, x: {"tokens": m.vit(x).last_hidden_state})
    hf_case("hf_msn", hf.ViTMSNModel(hf.ViTMSNConfig(**small)), last)
    hf_case("hf_ijepa", hf.IJepaModel(hf.IJepaConfig(**small)), last)

    def mae(model, x):
        noise = torch.arange((IMAGE // PATCH) ** 2).expand(x.shape[0], -1).double()  # nothing masked, order kept
        return {"tokens": model.vit(x, noise=noise).last_hidden_state}

    config = hf.ViTMAEConfig(**small, mask_ratio=0.0, decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32)
    hf_case("hf_mae", hf.ViTMAEForPreTraining(config), mae)
    dino = {key: value for key, value in small.items() if key != "intermediate_size"}
    hf_case("hf_dinov2", hf.Dinov2Model(hf.Dinov2Config(**dino, mlp_ratio=2)), last)
    hf_case("hf_dinov2_swiglu", hf.Dinov2Model(hf.Dinov2Config(**dino, use_swiglu_ffn=True)), last)
    hf_case("hf_dinov2_reg", hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**dino, mlp_ratio=2, num_register_tokens=3)), last)
    for gated, act in [(False, "gelu"), (True, "silu")]:
        config = hf.DINOv3ViTConfig(**small, use_gated_mlp=gated, hidden_act=act, num_register_tokens=2)
        hf_case(f"hf_dinov3{'_gated' if gated else ''}", hf.DINOv3ViTModel(config), last)
    sizes = dict(embedding_size=8, hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1])
    pooled = lambda model, x: {"pooled": model(x).pooler_output.flatten(1)}
    hf_case("hf_resnet_basic", hf.ResNetModel(hf.ResNetConfig(**{**sizes, "embedding_size": 16}, layer_type="basic")), pooled)
    hf_case("hf_resnet_bottleneck", hf.ResNetForImageClassification(hf.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 2, 1], layer_type="bottleneck")), lambda m, x: {"pooled": m.resnet(x).pooler_output.flatten(1)})
    hf_case("hf_convnext", hf.ConvNextModel(hf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])), pooled)

    def clip(model, x):
        body = getattr(model, "vision_model", model)
        return {"tokens": body.post_layernorm(body(x).last_hidden_state)}

    vision = dict(small, hidden_act="gelu")
    hf_case("hf_clip", hf.CLIPVisionModel(hf.CLIPVisionConfig(**vision)), clip)
    whole = hf.CLIPModel(hf.CLIPConfig(vision_config=vision, text_config=dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)))
    hf_case("hf_clip_whole", whole, lambda m, x: clip(m, x))


def main():
    ROOT.mkdir(parents=True, exist_ok=True)
    failed = []
    for cases in [timm_cases, torchvision_cases, hf_cases]:
        try:
            cases()
        except Exception as error:  # a version of a library without one of the networks
            failed.append(f"{cases.__name__} after {NAMES[-1:]}: {type(error).__name__}: {error}")
    print(len(NAMES), "cases in", ROOT)
    print("\n".join(failed))


main()
