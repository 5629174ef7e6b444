"""Fine-tunes the vision transformer of one of our runs with timm's building blocks and prints the top-1 accuracy: the other side of `finetune.sh`.

    python benches/accuracy/timm_side.py RUN DATA

RUN is the folder of a run of `autodidact finetune` with `init`, whose `plan.toml` has the settings and whose `init.safetensors` has the weights to start from. The same
labelled images, crops, number of steps and schedule; timm's network, parameter groups with layer decay, AdamW, mixup and CutMix, random erasing, losses and scheduler.
Mixing is, as ours, within a micro-batch. The order of the images and all other draws are not ours. DATA holds CIFAR-10's binary files.
"""

import os
import sys
import tomllib

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torchvision.transforms import v2 as T

run, folder = sys.argv[1:]
plan = tomllib.load(open(f"{run}/plan.toml", "rb"))
torch.manual_seed(plan["seed"])
np.random.seed(plan["seed"])  # timm's Mixup
config, arch, optim = plan["method"]["classify"], plan["backbone"]["vit"], plan["optimizer"]["adamw"]
data, schedule, (view,) = plan["data"], plan["schedule"], plan["views"]
batch, micro = plan["batch"]["global"], plan["batch"]["micro"]
left = [("method.classify.lora", config.get("lora")), ("method.classify.train", config["train"] != "full"),
        ("method.classify.head_epochs", config.get("head_epochs")), ("class weights", config.get("class_weights") or config.get("balance_classes")),
        ("data.limit", data.get("limit")), ("data.validation", data.get("validation")), ("[ema]", plan.get("ema")), ("[[parameters]]", plan.get("parameters")),
        ("decay_all", optim.get("decay_all")), ("weight_decay_end", schedule.get("weight_decay_end")), ("clip_each_norm", schedule.get("clip_each_norm")),
        *((name, view.get(name)) for name in ("jitter", "grayscale", "blur", "solarize", "rand_augment"))]
for name, given in left:
    if given:
        sys.exit(f"{name} is not compared")


# --- the labelled images ----------------------------------------------------------------------------------------------------------------

def rotate(x, n):
    return (x >> n | x << 32 - n) & 0xFFFFFFFF


def blake3(message):
    """BLAKE3 of at most 64 bytes, as words: one block that begins and ends its chunk and is the root."""
    iv = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
    words = np.frombuffer(message.ljust(64, b"\0"), "<u4").tolist()
    v = [*iv, *iv[:4], 0, 0, len(message), 1 | 2 | 8]

    def mix(a, b, c, d, x, y):
        for word, (r, s) in ((x, (16, 12)), (y, (8, 7))):
            v[a] = (v[a] + v[b] + word) & 0xFFFFFFFF
            v[d] = rotate(v[d] ^ v[a], r)
            v[c] = (v[c] + v[d]) & 0xFFFFFFFF
            v[b] = rotate(v[b] ^ v[c], s)

    for _ in range(7):
        for i in range(4):
            mix(i, 4 + i, 8 + i, 12 + i, words[2 * i], words[2 * i + 1])
        for i in range(4):
            mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, words[8 + 2 * i], words[9 + 2 * i])
        words = [words[i] for i in (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)]
    return [v[i] ^ v[i + 8] for i in range(8)]


def chacha8(key):
    """The 64-bit numbers of ChaCha with eight rounds, a counter of 64 bits and no nonce."""
    counter = 0
    while True:
        start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *key, counter & 0xFFFFFFFF, counter >> 32, 0, 0]
        v = start.copy()

        def quarter(a, b, c, d):
            for r, s in ((16, 12), (8, 7)):
                v[a] = (v[a] + v[b]) & 0xFFFFFFFF
                v[d] = rotate(v[d] ^ v[a], 32 - r)
                v[c] = (v[c] + v[d]) & 0xFFFFFFFF
                v[b] = rotate(v[b] ^ v[c], 32 - s)

        for _ in range(4):
            for i in range(4):
                quarter(i, 4 + i, 8 + i, 12 + i)
            for i in range(4):
                quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        out = [(a + b) & 0xFFFFFFFF for a, b in zip(v, start)]
        yield from (out[i] | out[i + 1] << 32 for i in range(0, 16, 2))
        counter += 1


def chosen(labels, fraction, seed):
    """The images that `data.label_fraction` keeps (src/data/portion.rs, src/rng.rs)."""
    kept = []
    for label in range(10):
        images = np.flatnonzero(labels == label).tolist()
        key = b"autodidact rng v1\0" + seed.to_bytes(8, "little") + b"labels\0\0" + label.to_bytes(8, "little")
        numbers = chacha8(blake3(key))
        for last in range(len(images) - 1, 0, -1):
            bound = last + 1
            while (product := next(numbers) * bound) & (1 << 64) - 1 < (1 << 64) % bound:
                pass
            other = product >> 64
            images[last], images[other] = images[other], images[last]
        kept += images[: max(1, int(len(images) * fraction + 0.5))]
    return sorted(kept)


def read(names):
    raw = np.concatenate([np.fromfile(f"{folder}/{name}", np.uint8).reshape(-1, 3073) for name in names])
    return raw[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy(), raw[:, 0].astype(np.int64)


images, labels = read(sorted(name for name in os.listdir(folder) if name.startswith("data_batch")))
test_images, test_labels = read(["test_batch.bin"])
if fraction := data.get("label_fraction"):
    pick = chosen(labels, fraction, plan["seed"])
    images, labels = images[pick], labels[pick]

steps = []
if crop := view.get("crop"):
    interpolation = T.InterpolationMode(crop["interpolation"])
    steps.append(T.RandomResizedCrop(view["size"], scale=crop["scale"], ratio=crop["ratio"], interpolation=interpolation, antialias=True))
to_tensor = [T.ToImage(), T.ToDtype(torch.float32, scale=True), T.Normalize(data["mean"], data["std"])]
augment = T.Compose([*steps, T.RandomHorizontalFlip(view.get("flip", 0.0)), *to_tensor])
plain = T.Compose(to_tensor)
erase = None
if e := view.get("erase"):
    erase = RandomErasing(e["prob"], e["area"][0], e["area"][1], e["aspect"], mode=e["mode"], min_count=e["count"], max_count=e["count"], device="cpu")

# --- network and optimizer --------------------------------------------------------------------------------------------------------------

if arch["pool"] != "mean" or arch["fc_norm"] or arch.get("layer_scale") or arch["registers"] or arch["position"] not in ("sincos", "learned"):
    sys.exit("only plain vision transformers with the mean of their patches are compared")
net = timm.models.VisionTransformer(
    img_size=view["size"], patch_size=arch["patch"], embed_dim=arch["dim"], depth=arch["depth"], num_heads=arch["heads"], mlp_ratio=arch["mlp_ratio"],
    num_classes=len(config["classes"]), global_pool="avg", fc_norm=False, drop_path_rate=arch["drop_path"])
start = {name.removeprefix("backbone."): tensor for name, tensor in load_file(f"{run}/init.safetensors").items()}
torch.nn.init.trunc_normal_(net.head.weight, std=config["head_std"])
torch.nn.init.zeros_(net.head.bias)
odd = net.load_state_dict(start, strict=False)
assert set(odd.missing_keys) <= {"head.weight", "head.bias", "pos_embed"} and not odd.unexpected_keys, odd
if arch["position"] == "sincos":
    net.pos_embed.requires_grad = False
    if "pos_embed" in odd.missing_keys:
        sys.exit("init.safetensors has no position embedding")

steps_per_epoch = len(images) // batch
total = schedule.get("steps") or round(schedule["epochs"] * steps_per_epoch)
factor = {"none": 1, "linear": batch / 256, "sqrt": batch**0.5}[schedule["lr_scaling"]]
warmup = round(schedule["warmup_epochs"] * steps_per_epoch)
optimizer = create_optimizer_v2(
    net, "adamw", lr=schedule["lr"] * factor, weight_decay=optim["weight_decay"], betas=tuple(optim["betas"]), eps=optim["eps"],
    layer_decay=config.get("layer_decay"))
scheduler = CosineLRScheduler(
    optimizer, total - warmup, lr_min=schedule["min_lr"] * factor, warmup_t=warmup, warmup_lr_init=0.0, warmup_prefix=True, t_in_epochs=False)

mix, smoothing = config["mix"], config["label_smoothing"]
mixup = None
if (mix["mixup"] > 0 or mix["cutmix"] > 0) and mix["prob"] > 0:
    mixup = Mixup(mix["mixup"], mix["cutmix"], prob=mix["prob"], switch_prob=mix["switch_prob"], mode=mix["mode"], label_smoothing=smoothing,
                  num_classes=len(config["classes"]))
criterion = SoftTargetCrossEntropy() if mixup else LabelSmoothingCrossEntropy(smoothing)

# --- training ---------------------------------------------------------------------------------------------------------------------------

net.train()
for step in range(total):
    if step % steps_per_epoch == 0:
        order = torch.randperm(len(images)).tolist()
    scheduler.step_update(step)
    optimizer.zero_grad()
    at, loss = step % steps_per_epoch * batch, 0.0
    for first in range(at, at + batch, micro):
        chunk = order[first : first + micro]
        x = torch.stack([augment(Image.fromarray(images[i])) for i in chunk])
        y = torch.from_numpy(labels[chunk])
        if erase:
            x = erase(x)
        if mixup:
            x, y = mixup(x, y)
        part = criterion(net(x), y) * (micro / batch)
        part.backward()
        loss += part.item()
    if limit := schedule.get("clip_norm"):
        torch.nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], limit)
    optimizer.step()
    if (step + 1) % 50 == 0:
        print(f"step {step + 1}/{total} loss {loss:.4f}", file=sys.stderr, flush=True)

net.eval()
right = 0
with torch.no_grad():
    for first in range(0, len(test_images), 500):
        x = torch.stack([plain(Image.fromarray(image)) for image in test_images[first : first + 500]])
        right += (net(x).argmax(1).numpy() == test_labels[first : first + 500]).sum()
print(f"timm {timm.__version__}: {total} steps, last loss {loss:.4f}; top-1 {100 * right / len(test_images):.2f} % of {len(test_images)}")
