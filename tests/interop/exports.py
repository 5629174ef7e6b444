"""Exports small networks of each family and compares what timm, transformers, torchvision and ONNX Runtime make of them with `autodidact embed`.

    python tests/interop/exports.py [--binary target/debug/autodidact] [--only NAME]

needs torch, timm, transformers, torchvision, onnx, onnxruntime, safetensors, numpy and pillow. Every network is trained for a few steps, so that no tensor is what it was
drawn as; then `embed` writes the features of eight images, `export` a folder, and the code in the folder's README.md computes the same features, or the scores that the
head in the checkpoint gives them. ONNX files go through `onnx.checker`, and run with one, three and eight images at a time. Networks that a library made go the other way:
`embed` reads its weights. Exit code 1 when a difference is larger than 1e-5.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import numpy as np
import onnx
import torch
from PIL import Image

LIMIT = 1e-5
ROOT = pathlib.Path(__file__).resolve().parents[2]

VIT = "[vit]\npatch = 8\ndim = 48\ndepth = 3\nheads = 4\n"
# name, size of the images, `[backbone]` table, formats, method
FAMILIES = [
    ("vit", 32, VIT, ["timm", "hf", "torchvision"], "simclr"),
    ("vit-mean", 32, VIT + 'pool = "mean"\n', ["timm", "hf"], "simclr"),
    ("vit-mae", 32, VIT + 'position = "sincos"\ninit = "xavier"\n', ["timm", "hf", "torchvision"], "mae"),
    ("vit-clip", 32, VIT + "pre_norm = true\nnorm_eps = 1e-5\n", ["timm"], "simclr"),
    ("vit-eps-1e-5", 32, VIT + "norm_eps = 1e-5\n", ["timm", "hf", "torchvision"], "simclr"),
    ("vit-fc-norm", 32, VIT + 'pool = "mean"\nfc_norm = true\nqk_norm = true\nmlp_ratio = 2.6\n', ["timm"], "simclr"),
    ("vit-no-class", 32, VIT + 'pool = "mean"\nclass_token = false\nqkv_bias = false\n', ["timm"], "simclr"),
    ("vit-no-key-bias", 32, VIT + "key_bias = false\n", ["timm", "hf", "torchvision"], "simclr"),
    ("vit-dino", 32, VIT + "drop_path = 0.1\n", ["timm", "hf", "torchvision"], "dino"),
    ("dinov2", 32, VIT + "layer_scale = 0.1\n", ["timm", "hf"], "simclr"),
    ("dinov2-reg", 32, VIT + "layer_scale = 0.1\nregisters = 3\n", ["timm", "hf"], "simclr"),
    ("dinov2-reg-pos", 32, VIT + "registers = 2\nprefix_positions = true\npool = \"mean\"\n", ["timm", "hf"], "simclr"),
    ("dinov2-swiglu", 32, VIT + 'layer_scale = 0.1\nregisters = 2\nmlp = "swiglu"\n', ["timm", "hf"], "simclr"),
    ("dinov3", 32, VIT + 'layer_scale = 0.1\nregisters = 2\nposition = "rope"\nkey_bias = false\nnorm_eps = 1e-5\n', ["timm", "hf"], "simclr"),
    ("dinov3-swiglu", 32, VIT + 'registers = 2\nposition = "rope"\nmlp = "swiglu"\npool = "mean"\n', ["timm", "hf"], "simclr"),
    ("dinov3-geglu", 32, VIT + 'layer_scale = 0.1\nregisters = 2\nposition = "rope"\nmlp = "geglu"\n', ["hf"], "simclr"),
    ("dinov3-no-bias", 32, VIT + 'qkv_bias = false\nregisters = 1\nposition = "rope"\n', ["timm", "hf"], "simclr"),
    ("dinov3-no-reg", 32, VIT + 'layer_scale = 0.1\nposition = "rope"\n', ["timm", "hf"], "simclr"),
    ("resnet18", 64, "[resnet]\ndepth = 18\n", ["timm", "hf", "torchvision"], "simclr"),
    ("resnet50", 64, "[resnet]\ndepth = 50\n", ["timm", "hf", "torchvision"], "simclr"),
    ("resnet50-quarter", 64, "[resnet]\ndepth = 50\nwidth = 0.25\n", ["hf"], "simclr"),
    ("resnet18-quarter", 64, "[resnet]\ndepth = 18\nwidth = 0.25\n", ["hf"], "simclr"),
    ("convnext", 64, "[convnext]\ndepths = [1, 1, 2, 1]\ndims = [16, 24, 32, 48]\nlayer_scale = 0.1\n", ["timm", "hf", "torchvision"], "simclr"),
    ("convnext-patch2", 32, "[convnext]\ndepths = [1, 1, 2, 1]\ndims = [16, 16, 32, 48]\npatch = 2\nkernel = 5\nlayer_scale = 0.1\n", ["timm"], "simclr"),
    ("convnext-patch1", 32, "[convnext]\ndepths = [1, 1, 2, 1]\ndims = [16, 24, 32, 48]\npatch = 1\nlayer_scale = 0\n", ["timm", "hf"], "simclr"),
    # what only ONNX expresses
    ("vit-geglu", 32, VIT + 'mlp = "geglu"\nqk_norm = true\npre_norm = true\nregisters = 2\nlayer_scale = 0.1\nnorm_eps = 1e-12\n', [], "simclr"),
    ("dinov3-qk-norm", 32, VIT + 'position = "rope"\nmlp = "geglu"\nqk_norm = true\nclass_token = false\npool = "mean"\nfc_norm = true\nrope_base = 20\n', [], "simclr"),
    ("vit-mae-mean", 32, VIT + 'position = "sincos"\npool = "mean"\nregisters = 1\nprefix_positions = true\nqkv_bias = false\nmlp = "swiglu"\n', [], "mae"),
    ("convnext-patch8", 64, "[convnext]\ndepths = [1, 2, 1, 1]\ndims = [8, 12, 16, 24]\npatch = 8\nkernel = 3\nlayer_scale = 0.1\n", [], "simclr"),
    ("convnext-odd", 44, "[convnext]\ndepths = [1, 1, 1, 1]\ndims = [16, 24, 32, 48]\nkernel = 7\nlayer_scale = 0.1\n", [], "simclr"),
    ("resnet18-cifar", 32, '[resnet]\ndepth = 18\nwidth = 0.5\nstem = "cifar"\n', [], "simclr"),
]

# classifiers: name, size of the images, `[backbone]` table, formats, `[method.classify]` and other tables, programs that refuse and their words
CLASSIFIERS = [
    ("vit", 32, VIT, ["timm", "hf", "torchvision"], "head_std = 0.3", {}),
    ("vit-mean", 32, VIT + 'pool = "mean"\n', ["timm", "hf"], "head_std = 0.3\n[ema]\nmomentum = 0.5", {"torchvision": "the mean of the patches"}),
    ("vit-linear", 32, VIT, ["timm", "hf", "torchvision"], 'train = "linear"', {}),
    ("vit-lora", 32, VIT, ["timm", "hf", "torchvision"], "head_norm = true\nlora = { rank = 4 }", {}),
    ("vit-no-class", 32, VIT + 'pool = "mean"\nclass_token = false\nfc_norm = true\n', ["timm"], "head_std = 0.3", {"hf": "without class token"}),
    ("dinov2", 32, VIT + "layer_scale = 0.1\n", ["timm", "hf"], "head_std = 0.3\nhead_norm = true", {"torchvision": "LayerScale"}),
    ("dinov2-reg-mean", 32, VIT + 'registers = 3\npool = "mean"\n', ["timm", "hf"], "head_std = 0.3", {"torchvision": "the mean of the patches"}),
    ("dinov3", 32, VIT + 'layer_scale = 0.1\nregisters = 2\nposition = "rope"\n', ["timm"], "head_std = 0.3", {"hf": "a classifier with rotary positions"}),
    ("resnet18", 64, "[resnet]\ndepth = 18\n", ["timm", "hf", "torchvision"], "head_std = 0.03", {}),
    ("resnet50-norm", 64, "[resnet]\ndepth = 50\n", ["timm", "hf", "torchvision"], "head_std = 0.02\nhead_norm = true", {}),
    ("resnet18-cifar", 32, '[resnet]\ndepth = 18\nwidth = 0.5\nstem = "cifar"\n', [], "head_std = 0.02\nhead_norm = true", {"timm": "the 3 x 3 stem"}),
    ("convnext", 64, "[convnext]\ndepths = [1, 1, 2, 1]\ndims = [16, 24, 32, 48]\nlayer_scale = 0.1\n", ["timm", "hf", "torchvision"], "head_std = 0.3", {}),
    ("convnext-early", 32, "[convnext]\ndepths = [1, 1, 1, 1]\ndims = [16, 24, 32, 48]\npatch = 1\nlayer_scale = 0\n", ["timm", "hf"], "head_norm = true\n[early_stopping]\npatience = 1\nevery_epochs = 0.25", {"torchvision": "patches of 1 px"}),
]

# what cannot be expressed: name, table, format, words of the refusal
REFUSED = [
    ("resnet-cifar", "[resnet]\ndepth = 18\nstem = \"cifar\"\n", ["timm", "hf", "torchvision"], "cannot express the 3 x 3 stem"),
]

RECIPE = """
[data]
source = "sample"
limit = 64
[[views]]
count = {count}
size = {size}
crop = {{}}
[backbone.{backbone}
[method.{method}]
{options}
[batch]
global = 16
micro = 8
[optimizer.adamw]
[schedule]
steps = 3
lr = 0.003
warmup_epochs = 0
[ema]
momentum = 0.5
[eval]
skip = true
"""
FINETUNE = """
[data]
source = "sample"
limit = 64
{validation}
[[views]]
size = {size}
[backbone.{backbone}
[batch]
global = 16
micro = 8
[optimizer.adamw]
[schedule]
steps = 4
lr = 0.003
warmup_epochs = 0
[eval.test]
source = "sample"
[method.classify]
{options}
"""
OPTIONS = {
    "simclr": "hidden = 16\nout = 8",
    "mae": "decoder_dim = 16\ndecoder_depth = 1\ndecoder_heads = 2",
    "dino": "prototypes = 32\nhidden = 16\nbottleneck = 8",
}


def call(binary, *words):
    done = subprocess.run([binary, *map(str, words)], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def must(binary, *words):
    code, out, err = call(binary, *words)
    if code != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: {err.strip()}")
    return out


def pictures(folder, size):
    """Eight images of exactly the network's size, which are used as they are."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(size)
    arrays = []
    for index in range(8):
        coarse = generator.integers(0, 256, (size // 4, size // 4, 3), dtype=np.uint8)
        image = np.asarray(Image.fromarray(coarse).resize((size, size), Image.BICUBIC))
        Image.fromarray(image).save(folder / f"{index}.png")
        arrays.append(image)
    pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (pixels - mean[:, None, None]) / std[:, None, None]


def of_card(folder, images, target=None, output="features", batch=None):
    """Runs the code of the model card."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL).group(1)
    names, before = {}, os.getcwd()
    os.chdir(folder)
    try:
        with torch.no_grad():
            exec(compile(code, str(folder / "README.md"), "exec"), names)
            if target == "onnx":
                return np.concatenate([names[output](part.numpy()) for part in images.split(batch or len(images))])
            return names[output](images).numpy()
    finally:
        os.chdir(before)


def compare(rows, name, target, ours, theirs):
    same = ours.shape == theirs.shape
    error = float(np.abs(ours - theirs).max()) if same else float("inf")
    scale = float(np.abs(ours).max())
    rows.append((name, target, error, scale, error <= LIMIT))
    print(f"{name:<26} {target:<19} {error:9.2e}  {scale:8.3f}  {'ok' if error <= LIMIT else 'FAILED'}", flush=True)


def prepared(folder, target, paths):
    """Images as the library's own preprocessing makes them from the configuration that was exported."""
    opened = [Image.open(path).convert("RGB") for path in paths]
    if target == "hf":
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(folder)(opened, return_tensors="pt")["pixel_values"]
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=False)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    return torch.stack([transform(image) for image in opened])


def embed(binary, place, checkpoint, images, *options):
    output = place / "features.npy"
    must(binary, "embed", checkpoint, images, "--output", output, "--force", *options)
    return np.load(output)


def trained(binary, place, name, size, table, method):
    run = place / "run"
    count = 1 if method == "mae" else 2
    head, rest = table.split("\n", 1)
    text = RECIPE.format(count=count, size=size, backbone=head.lstrip("[") + "\n" + rest, method=method, options=OPTIONS[method])
    (place / f"{name}.toml").write_text(text)
    must(binary, "pretrain", place / f"{name}.toml", "--run-dir", run, "--device", "cpu")
    return run


def ours(binary, rows, work, only):
    for name, size, table, formats, method in FAMILIES:
        if only and only != name:
            continue
        place = work / name
        place.mkdir()
        images = pictures(place / "images", size)
        run = trained(binary, place, name, size, table, method)
        features = embed(binary, place, run, place / "images")
        which = ["eval", "student", "teacher"] if method == "dino" else ["eval"]
        for one in which:
            expected = features if one == "eval" else embed(binary, place, run, place / "images", "--which", one)
            for target in formats:
                folder = place / f"{target}-{one}"
                must(binary, "export", run, "--format", target, "--which", one, "--output", folder)
                label = target if one == "eval" else f"{target}/{one}"
                compare(rows, name, label, expected, of_card(folder, images))
                # below 64 px images are not cropped: the library's own preprocessing gives the same numbers
                if target in ("timm", "hf") and size < 64 and one == "eval":
                    own = prepared(folder, target, sorted((place / "images").iterdir()))
                    compare(rows, name, f"{target} images", images.numpy(), own.numpy())
                # and back: our own reader
                again = embed(binary, place, folder, place / "images")
                if not np.array_equal(again, expected) and target != "hf":
                    rows.append((name, f"{target} read back", float("inf"), 0.0, False))
                    print(f"{name:<18} {target} read back by embed: other bits, {np.abs(again - expected).max():.2e}")
                elif target == "hf":
                    compare(rows, name, "hf read back", expected, again)
        onnx_of(binary, rows, name, place, run, images, features)
        if name in ("dinov3-swiglu", "convnext"):  # of another size than they were trained with
            other = pictures(place / "others", 2 * size)
            expected = embed(binary, place, run, place / "others", "--size", 2 * size)
            onnx_of(binary, rows, name, place, run, other, expected, "--size", 2 * size)
        folder = place / "plain"
        must(binary, "export", run, "--format", "safetensors", "--output", folder)
        again = embed(binary, place, folder, place / "images")
        if not np.array_equal(again, features):
            rows.append((name, "safetensors", float("inf"), 0.0, False))
            print(f"{name:<18} safetensors read back by embed: other bits, {np.abs(again - features).max():.2e}")


def onnx_of(binary, rows, name, place, run, images, expected, *options, output="features"):
    """Exports to ONNX, checks the file, and runs it with batches of different sizes."""
    folder = place / f"onnx-{output}{images.shape[-1]}"
    must(binary, "export", run, "--format", "onnx", "--output", folder, *options)
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    [port] = model.graph.output
    sides = [side.dim_param or side.dim_value for side in port.type.tensor_type.shape.dim]
    if port.name != output or sides != ["batch", expected.shape[1]]:
        raise RuntimeError(f"{name}: {port}")
    for batch in (1, 3, 8):
        compare(rows, name, f"onnx, {batch} at once", expected, of_card(folder, images, "onnx", output, batch))
    return model


def scores_of_checkpoint(run, features):
    """Scores of the classes, from the head as the run has it, in float64."""
    from safetensors.numpy import load_file

    best = run / "best.safetensors"
    checkpoint = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    average = checkpoint / "ema.safetensors"
    file = best if best.exists() else average if average.exists() else checkpoint / "model.safetensors"
    tensors = {name: tensor.astype(np.float64) for name, tensor in load_file(file).items() if name.startswith("head")}
    if "head_norm.running_mean" in tensors:
        features = (features - tensors["head_norm.running_mean"]) / np.sqrt(tensors["head_norm.running_var"] + 1e-5)
    return features @ tensors["head.weight"].T + tensors["head.bias"]


def classifiers(binary, rows, work, only):
    """Runs of `finetune`, exported with their heads."""
    for name, size, table, formats, options, refused in CLASSIFIERS:
        label = f"{name} (classes)"
        if only and only != label:
            continue
        place = work / label
        place.mkdir()
        images = pictures(place / "images", size)
        run = place / "run"
        head, rest = table.split("\n", 1)
        validation = "validation = 0.5" if "early_stopping" in options else ""
        text = FINETUNE.format(size=size, backbone=head.lstrip("[") + "\n" + rest, options=options, validation=validation)
        (place / "recipe.toml").write_text(text)
        must(binary, "finetune", place / "recipe.toml", "--run-dir", run, "--device", "cpu")
        features = embed(binary, place, run, place / "images")
        expected = scores_of_checkpoint(run, features)
        # our own scores: the accuracy that the run measured
        tests = embed(binary, place, run, "sample", "--split", "test")
        labels = np.load(place / "features.labels.npy")
        measured = json.loads((run / "summary.json").read_text())["classification"]
        accuracy = float((scores_of_checkpoint(run, tests).argmax(1) == labels).mean())
        good = abs(accuracy - measured["top1"]) < 1e-9 and measured["images"] == len(labels)
        rows.append((label, "accuracy", 0.0, 0.0, good))
        if not good:
            print(f"{label}: accuracy {accuracy} here, {measured['top1']} in the run")
        for target in formats:
            folder = place / target
            must(binary, "export", run, "--format", target, "--output", folder)
            compare(rows, label, target, expected, of_card(folder, images, target, "logits"))
            names = class_names(folder, target)
            again = embed(binary, place, folder, place / "images")
            compare(rows, label, f"{target} read back", features, again)
            must(binary, "export", run, "--format", target, "--backbone-only", "--output", place / f"{target}-features")
            compare(rows, label, f"{target} features", features, of_card(place / f"{target}-features", images))
            if names != json.loads((folder / "config.json").read_text()).get("label_names", names) or len(names) != expected.shape[1]:
                raise RuntimeError(f"{label}, {target}: classes {names}")
        model = onnx_of(binary, rows, label, place, run, images, expected, output="logits")
        told = {entry.key: entry.value for entry in model.metadata_props}
        if len(json.loads(told["class_names"])) != expected.shape[1]:
            raise RuntimeError(f"{label}: {told}")
        must(binary, "export", run, "--format", "safetensors", "--output", place / "plain")
        from safetensors.numpy import load_file

        state = load_file(place / "plain" / "model.safetensors")
        compare(rows, label, "safetensors", expected, features @ state["head.weight"].T + state["head.bias"])
        again = embed(binary, place, place / "plain", place / "images")
        if not np.array_equal(again, features):
            raise RuntimeError(f"{label}: safetensors read back: {np.abs(again - features).max():.2e}")
        for target, words in refused.items():
            code, _, err = call(binary, "export", run, "--format", target, "--output", place / f"no-{target}")
            good = code == 2 and words in err and "hint: " in err
            rows.append((label, target, 0.0, 0.0, good))
            print(f"{label:<26} {target:<19} {'refused' if good else 'FAILED: ' + err.strip()}")


def class_names(folder, target):
    """Names of the classes as the library has them, in the order of its scores."""
    if target == "hf":
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        assert config.label2id == {name: index for index, name in config.id2label.items()}
        return [config.id2label[index] for index in range(config.num_labels)]
    if target == "timm":
        import timm

        model = timm.create_model(f"local-dir:{folder}", pretrained=False)
        return list(model.pretrained_cfg["label_names"])
    return json.loads((folder / "config.json").read_text())["label_names"]


def refusals(binary, rows, work):
    for name, table, formats, words in REFUSED:
        place = work / name
        place.mkdir()
        run = trained(binary, place, name, 32, table, "simclr")
        for target in formats:
            code, _, err = call(binary, "export", run, "--format", target, "--output", place / target)
            good = code == 2 and words in err and "hint: " in err and not (place / target).exists()
            rows.append((name, target, 0.0, 0.0, good))
            print(f"{name:<26} {target:<19} {'refused' if good else 'FAILED: ' + err.strip()}")
        # the road that is left, as docs/export.md has it: torchvision's network with another beginning
        import torchvision
        from safetensors.torch import load_file

        images = pictures(place / "images", 32)
        must(binary, "export", run, "--format", "safetensors", "--output", place / "plain")
        model = torchvision.models.resnet18()
        model.conv1 = torch.nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = model.fc = torch.nn.Identity()
        model.load_state_dict(load_file(place / "plain" / "model.safetensors"))
        with torch.no_grad():
            compare(rows, name, "safetensors", embed(binary, place, run, place / "images"), model.eval()(images).numpy())


def theirs(binary, rows, work, only):
    """Networks that a library made, read by `embed`."""
    import timm
    import torchvision
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    small = dict(embed_dim=48, depth=2, num_heads=4, img_size=32, patch_size=8)
    hf = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
    cases = [
        ("timm vit", timm.create_model("vit_small_patch16_224", num_classes=0, **small), 32),
        ("timm dinov2", timm.create_model("vit_small_patch14_reg4_dinov2", num_classes=0, **small), 32),
        ("timm resnet18", timm.create_model("resnet18", num_classes=0), 64),
        ("hf vit", transformers.ViTModel(transformers.ViTConfig(intermediate_size=96, **hf)), 32),
        ("hf dinov2", transformers.Dinov2Model(transformers.Dinov2Config(use_swiglu_ffn=True, **hf)), 32),
        ("hf dinov3", transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(intermediate_size=96, num_register_tokens=2, **hf)), 32),
        ("hf resnet", transformers.ResNetModel(transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 1, 1])), 64),
        ("hf convnext", transformers.ConvNextModel(transformers.ConvNextConfig(hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1])), 64),
        ("torchvision r50", torchvision.models.resnet50(weights=None, zero_init_residual=True), 64),
    ]
    for name, model, size in cases:
        if only and only != name:
            continue
        place = work / name.replace(" ", "-")
        place.mkdir()
        images = pictures(place / "images", size)
        # no norm or scale stays the identity. Convolutions stay as drawn, and branches small: an untrained deep network amplifies rounding, so that torch's
        # own float32 is 2e-5 and more from its float64
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() != 4:
                    parameter.add_(0.05 * torch.randn_like(parameter))
            model.train()
            for _ in range(20):  # running statistics of these images
                model(images)
        model.eval()
        options = []
        with torch.no_grad():
            if name.startswith("hf"):
                model.save_pretrained(place / "model")
                out = model(pixel_values=images)
                convolutional = out.last_hidden_state.dim() == 4
                expected = out.pooler_output.flatten(1) if convolutional else out.last_hidden_state[:, 0]
                source = place / "model"
            elif name.startswith("timm"):
                source = place / "model.safetensors"
                save_file(model.state_dict(), source)
                options = ["--heads", "4"] if "resnet" not in name else []
                expected = model(images)
            else:
                source = place / "weights.pth"
                torch.save(model.state_dict(), source)
                model.fc = torch.nn.Identity()
                expected = model(images)
        features = embed(binary, place, source, place / "images", "--size", size, *options)
        compare(rows, name, "read", features, expected.numpy())
        onnx_of(binary, rows, name, place, source, images, features, "--size", size, *options)
        for target in ["timm", "hf"]:
            folder = place / f"to-{target}"
            code, _, err = call(binary, "export", source, "--format", target, "--output", folder, "--size", size, *options)
            refusal = next((line for line in err.splitlines() if "cannot express" in line), None)
            if code == 2 and refusal:
                print(f"{name:<18} to {target}: {refusal}")
                continue
            if code != 0:
                raise RuntimeError(err)
            compare(rows, name, f"to {target}", features, of_card(folder, images))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target" / "debug" / "autodidact")
    parser.add_argument("--only", help="one network")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'network':<26} {'target':<19} {'max diff':>9}  {'max |x|':>8}")
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        ours(args.binary, rows, work, args.only)
        classifiers(args.binary, rows, work, args.only)
        theirs(args.binary, rows, work, args.only)
        if not args.only:
            refusals(args.binary, rows, work)
    failed = [row for row in rows if not row[4]]
    worst = max((row for row in rows if row[4]), key=lambda row: row[2], default=None)
    if worst:
        print(f"\n{len(rows)} comparisons, {len(failed)} failed; largest difference {worst[2]:.2e} ({worst[0]}, {worst[1]}), limit {LIMIT:.0e}")
    sys.exit(1 if failed or not rows else 0)


if __name__ == "__main__":
    main()
