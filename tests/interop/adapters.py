"""Loads an adapter that `finetune` wrote with PEFT and compares the probabilities with those of `predict`.

    pip install torch timm peft safetensors numpy pillow
    cargo build && python tests/interop/adapters.py

Pretrains a small vision transformer for a few steps, fine-tunes it with LoRA on all linear layers, exports the network that it started from to timm, and lets PEFT add the
adapter and the head. Prints the largest difference of a probability, and fails above 1e-5.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import timm
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file

PROGRAM = Path(__file__).resolve().parents[2] / "target/debug/autodidact"
LIMIT = 1e-5
NETWORK = """
[[views]]
size = 32
crop = {}
[backbone.vit]
dim = 48
depth = 3
heads = 3
patch = 8
"""
REST = """
[batch]
global = 32
micro = 16
[optimizer.adamw]
[schedule]
steps = 12
lr = 0.02
[eval]
skip = true
"""


def run(*words):
    done = subprocess.run([PROGRAM, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr}")


with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    data = '[data]\nsource = "sample"\nlimit = 256\n'
    (folder / "mae.toml").write_text(data + NETWORK + "[method.mae]\ndecoder_dim = 24\ndecoder_depth = 1\ndecoder_heads = 2\n" + REST)
    lora = 'lora = { rank = 4, alpha = 12, targets = ["qkv", "proj", "fc1", "fc2"] }\n'
    (folder / "lora.toml").write_text(data + NETWORK + "[method.classify]\n" + lora + REST)
    run("pretrain", folder / "mae.toml", "--run-dir", folder / "mae")
    run("finetune", folder / "lora.toml", f"init={folder / 'mae'}", "--run-dir", folder / "lora")
    run("export", folder / "mae", "--format", "timm", "--output", folder / "timm")

    generator = np.random.default_rng(0)
    (folder / "images").mkdir()
    pixels = generator.integers(0, 256, (16, 32, 32, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"images/{index:02}.png")
    run("predict", folder / "lora", folder / "images", "--top", 100, "--output", folder / "ours.jsonl")
    config = json.loads((folder / "timm/config.json").read_text())["pretrained_cfg"]
    normal = (torch.from_numpy(pixels / 255.0).permute(0, 3, 1, 2).float() - torch.tensor(config["mean"])[:, None, None]) / torch.tensor(config["std"])[:, None, None]

    state = load_file(folder / "timm/model.safetensors")
    adapter = load_file(folder / "lora/adapter/adapter_model.safetensors")
    classes = adapter["base_model.model.head.weight"].shape[0]
    model = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=classes)
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert sorted(missing) == ["head.bias", "head.weight"], missing
    with torch.no_grad():
        before = model.eval()(normal).softmax(1)
        model = PeftModel.from_pretrained(model, folder / "lora/adapter").eval()
        after = model(normal).softmax(1)

    plan = (folder / "lora/plan.toml").read_text()
    names = json.loads("[" + plan.split("classes = [", 1)[1].split("]", 1)[0].strip().rstrip(",") + "]")
    ours = torch.zeros(len(pixels), classes)
    for row, line in enumerate((folder / "ours.jsonl").read_text().splitlines()):
        for entry in json.loads(line)["top"]:
            ours[row, names.index(entry["class"])] = entry["probability"]
    worst = (ours - after).abs().max().item()
    changed = (before - after).abs().max().item()
    print(f"{len(pixels)} images, {classes} classes: probabilities differ by {worst:.1e} at most; without the adapter by {changed:.1e}")
    if not worst <= LIMIT or changed < 1e-3:
        sys.exit(1)
