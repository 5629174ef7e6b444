"""Trains one of our recipes with lightly's building blocks and prints the kNN accuracy: the other side of `benches/accuracy/run.sh`.

    python benches/accuracy/lightly_side.py plan.toml DATA

`plan.toml` is what `autodidact pretrain` wrote: the same network, views, optimizer, schedule, batch and number of steps are built from it with
torch, torchvision and lightly. Like ours, batch norm takes its statistics over one micro-batch. DATA holds CIFAR-10's binary files.
"""

import copy
import math
import sys
import tomllib

import lightly
import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from lightly.loss import BarlowTwinsLoss, DINOLoss, NegativeCosineSimilarity, NTXentLoss
from lightly.models import modules as heads
from PIL import Image
from torch import nn
from torchvision.transforms import v2 as T

plan = tomllib.load(open(sys.argv[1], "rb"))
torch.manual_seed(plan["seed"])
(method, config), = plan["method"].items()
(backbone_kind, arch), = plan["backbone"].items()
(optimizer_kind, optim), = plan["optimizer"].items()
batch, micro = plan["batch"]["global"], plan["batch"]["micro"]
mean, std = plan["data"]["mean"], plan["data"]["std"]


# --- data -----------------------------------------------------------------------------------------------------------------------------

def read(names):
    raw = np.concatenate([np.fromfile(f"{sys.argv[2]}/{name}", np.uint8).reshape(-1, 3073) for name in names])
    return raw[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy(), raw[:, 0].astype(np.int64)


import os

train_names = sorted(name for name in os.listdir(sys.argv[2]) if name.startswith("data_batch"))
images, labels = read(train_names)
test_images, test_labels = read(["test_batch.bin"])
limit = plan["data"].get("limit")
if limit and limit < len(images):  # evenly spread, as ours
    pick = np.arange(limit) * len(images) // limit
    images, labels = images[pick], labels[pick]


def transform(view):
    size = view["size"]
    steps = []
    crop = view.get("crop")
    if crop is None:
        steps.append(T.Resize((size, size), antialias=True))
    else:
        scale, ratio = crop.get("scale", [0.08, 1.0]), crop.get("ratio", [3 / 4, 4 / 3])
        interpolation = T.InterpolationMode(crop.get("interpolation", "bilinear"))
        steps.append(T.RandomResizedCrop(size, scale=scale, ratio=ratio, interpolation=interpolation, antialias=True))
    steps.append(T.RandomHorizontalFlip(view.get("flip", 0.0)))
    if jitter := view.get("jitter"):
        color = T.ColorJitter(*(jitter[name] for name in ("brightness", "contrast", "saturation", "hue")))
        steps.append(T.RandomApply([color], jitter["prob"]))
    steps.append(T.RandomGrayscale(view.get("grayscale", 0.0)))
    if view.get("blur"):
        sys.exit("blur is not compared: sizes and kernels differ between libraries")
    if solarize := view.get("solarize"):
        steps.append(T.RandomSolarize(solarize.get("threshold", 128), solarize["prob"]))
    return T.Compose([*steps, T.ToImage(), T.ToDtype(torch.float32, scale=True), T.Normalize(mean, std)])


views = [transform(view) for view in plan["views"] for _ in range(view.get("count", 1))]
sizes = [view["size"] for view in plan["views"] for _ in range(view.get("count", 1))]


class Views(torch.utils.data.Dataset):
    def __len__(self):
        return len(images)

    def __getitem__(self, index):
        image = Image.fromarray(images[index])
        return [view(image) for view in views]


# --- networks -------------------------------------------------------------------------------------------------------------------------

def resnet():
    assert arch["depth"] == 18, "only ResNet-18 is compared"
    width = round(64 * arch["width"])
    net = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [2, 2, 2, 2], width_per_group=64)
    net.inplanes = width
    net.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
    net.bn1 = nn.BatchNorm2d(width)
    net.maxpool = nn.Identity()
    for stage in range(4):
        layer = net._make_layer(torchvision.models.resnet.BasicBlock, width << stage, 2, stride=1 if stage == 0 else 2)
        setattr(net, f"layer{stage + 1}", layer)
    net.fc = nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net, width * 8


def ramp(value, step):
    """A number that moves: our RampConfig."""
    if not isinstance(value, dict):
        return value
    per_epoch = value.get("each", "step") == "epoch"
    at = step // steps_per_epoch if per_epoch else step
    length = value["epochs"] * (1 if per_epoch else steps_per_epoch) if "epochs" in value else (
        math.ceil(total / steps_per_epoch) if per_epoch else total)
    length -= per_epoch
    if at >= length:
        return value["end"]
    way = at / length if value.get("shape", "cosine") == "linear" else (1 - math.cos(math.pi * at / length)) / 2
    return value["start"] + (value["end"] - value["start"]) * way


class SimClr(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, dim = resnet()
        self.head = heads.SimCLRProjectionHead(dim, config["hidden"], config["out"], config["layers"])
        self.criterion = NTXentLoss(config["temperature"])

    def encode(self, views):
        return self.head(self.backbone(torch.cat(views))).chunk(2)

    def loss(self, outputs, step):
        return self.criterion(*outputs)


class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, dim = resnet()
        self.projector = heads.BYOLProjectionHead(dim, config["hidden"], config["out"])
        self.predictor = heads.BYOLPredictionHead(config["out"], config["hidden"], config["out"])
        self.teacher = nn.ModuleList([copy.deepcopy(self.backbone), copy.deepcopy(self.projector)]).requires_grad_(False)
        self.criterion = NegativeCosineSimilarity()

    def encode(self, views):
        outputs = []
        for view in views:
            outputs.append(self.predictor(self.projector(self.backbone(view))))
        with torch.no_grad():
            outputs += [self.teacher[1](self.teacher[0](view)) for view in views]
        return outputs

    def loss(self, outputs, step):
        p0, p1, z0, z1 = outputs
        return 4 + 2 * (self.criterion(p0, z1) + self.criterion(p1, z0))

    def after(self, step):
        momentum = ramp(config["momentum"], step)
        for teacher, student in zip(self.teacher.parameters(), [*self.backbone.parameters(), *self.projector.parameters()]):
            teacher.lerp_(student.detach(), 1 - momentum)


class Barlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, dim = resnet()
        self.head = heads.BarlowTwinsProjectionHead(dim, config["hidden"], config["out"])
        self.criterion = BarlowTwinsLoss(config["lambda"])

    def encode(self, views):
        return [self.head(self.backbone(view)) for view in views]

    def loss(self, outputs, step):
        return self.criterion(*outputs)


class Mae(nn.Module):
    def __init__(self):
        super().__init__()
        import timm

        kinds = {"tiny": (192, 3, 12), "small": (384, 6, 12)}
        dim, head_count, depth = kinds.get(arch.get("size"), (None, None, None))
        dim, head_count, depth = arch.get("dim", dim), arch.get("heads", head_count), arch.get("depth", depth)
        vit = timm.models.VisionTransformer(
            img_size=sizes[0], patch_size=arch["patch"], embed_dim=dim, depth=depth, num_heads=head_count, num_classes=0,
            global_pool="avg", fc_norm=False)
        self.backbone = heads.MaskedVisionTransformerTIMM(vit, pos_embed_initialization="sincos")
        self.patches = (sizes[0] // arch["patch"]) ** 2
        self.decoder = heads.MAEDecoderTIMM(
            num_patches=self.patches, patch_size=arch["patch"], embed_dim=dim, decoder_embed_dim=config["decoder_dim"],
            decoder_depth=config["decoder_depth"], decoder_num_heads=config["decoder_heads"])

    def encode(self, views):
        from lightly.models import utils

        length = self.patches + 1
        keep, mask = utils.random_token_mask((len(views[0]), length), config["mask_ratio"], device="cpu")
        encoded = self.backbone.encode(images=views[0], idx_keep=keep)
        decoded = self.decoder.embed(encoded)
        full = utils.repeat_token(self.decoder.mask_token, (len(views[0]), length))
        full = utils.set_at_index(full, keep, decoded.type_as(full))
        decoded = self.decoder.decode(full)
        predictions = self.decoder.predict(utils.get_at_index(decoded, mask))
        targets = utils.get_at_index(utils.patchify(views[0], arch["patch"]), mask - 1)
        if config["norm_pix"]:
            targets = (targets - targets.mean(-1, keepdim=True)) / (targets.var(-1, keepdim=True) + 1e-6).sqrt()
        return [predictions, targets]

    def loss(self, outputs, step):
        return F.mse_loss(*outputs)

    def features(self, x):
        return self.backbone.vit.forward_features(x)[:, 1:].mean(1)


class Dino(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, dim = resnet()
        head = dict(hidden_dim=config["hidden"], bottleneck_dim=config["bottleneck"], output_dim=config["prototypes"])
        self.head = heads.DINOProjectionHead(dim, **head)
        twin = heads.DINOProjectionHead(dim, **head)  # deepcopy does not take torch's weight norm
        twin.load_state_dict(self.head.state_dict())
        self.teacher = nn.ModuleList([copy.deepcopy(self.backbone), twin]).requires_grad_(False)
        self.criterion = DINOLoss(
            config["prototypes"], student_temp=config["student_temperature"], center_momentum=config["center_momentum"])
        self.globals = sum(size == max(sizes) for size in sizes)

    def encode(self, views):
        groups = [views[: self.globals], views[self.globals :]]
        student = [out for group in groups if group for out in self.head(self.backbone(torch.cat(group))).chunk(len(group))]
        with torch.no_grad():
            teacher = self.teacher[1](self.teacher[0](torch.cat(groups[0]))).chunk(len(groups[0]))
        return [*student, *teacher]

    def loss(self, outputs, step):
        student, teacher = outputs[: len(views)], outputs[len(views) :]
        return self.criterion(list(teacher), list(student), teacher_temp=ramp(config["teacher_temperature"], step))

    def before_update(self, step):
        """The prototypes stay as they are at first: no gradient, so neither step nor decay."""
        freeze = config.get("freeze_steps") or config.get("freeze_epochs", 0) * steps_per_epoch
        if step < freeze:
            for parameter in self.head.last_layer.parameters():
                parameter.grad = None

    def after(self, step):
        momentum = ramp(config["momentum"], step)
        for teacher, student in zip(self.teacher.parameters(), [*self.backbone.parameters(), *self.head.parameters()]):
            teacher.lerp_(student.detach(), 1 - momentum)


# --- training -------------------------------------------------------------------------------------------------------------------------

schedule = plan["schedule"]
steps_per_epoch = len(images) // batch
total = schedule.get("steps") or round(schedule["epochs"] * steps_per_epoch)
factor = {"none": 1, "linear": batch / 256, "sqrt": math.sqrt(batch)}[schedule.get("lr_scaling", "none")]
peak, floor = schedule["lr"] * factor, schedule.get("min_lr", 0.0) * factor
warmup = round(schedule.get("warmup_epochs", 0) * steps_per_epoch)


def lr_at(step):
    if step < warmup:
        return peak * step / warmup
    return floor + (peak - floor) * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1))) / 2


net = {"simclr": SimClr, "byol": Byol, "barlow": Barlow, "mae": Mae, "dino": Dino}[method]()
net.train()
trained = [p for p in net.parameters() if p.requires_grad]
if "weight_decay_end" in schedule or optim.get("decay_all"):
    sys.exit("a weight decay that moves, or of every parameter, is not compared")
groups = [
    {"params": [p for p in trained if p.ndim > 1], "weight_decay": optim.get("weight_decay", 0.0)},
    {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
]
if optimizer_kind == "sgd":
    optimizer = torch.optim.SGD(groups, lr=peak, momentum=optim.get("momentum", 0.9), nesterov=optim.get("nesterov", False))
elif optimizer_kind == "adamw":
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=optim.get("betas", [0.9, 0.999]))
else:
    sys.exit(f"the optimizer {optimizer_kind} is not compared")

loader = torch.utils.data.DataLoader(Views(), batch, shuffle=True, drop_last=True, num_workers=0)
step, last = 0, 0.0
while step < total:
    for parts in loader:
        if step == total:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        chunks = [net.encode([part[at : at + micro] for part in parts]) for at in range(0, batch, micro)]
        loss = net.loss([torch.cat(outputs) for outputs in zip(*chunks)], step)
        optimizer.zero_grad()
        loss.backward()
        if limit_norm := schedule.get("clip_norm"):
            nn.utils.clip_grad_norm_(trained, limit_norm)
        if limit_norm := schedule.get("clip_each_norm"):
            for parameter in trained:
                if parameter.grad is not None:
                    nn.utils.clip_grad_norm_(parameter, limit_norm)
        if hasattr(net, "before_update"):
            net.before_update(step)
        optimizer.step()
        if hasattr(net, "after"):
            net.after(step)
        step, last = step + 1, loss.item()
        if step % 50 == 0:
            print(f"step {step}/{total} loss {last:.4f}", file=sys.stderr, flush=True)


# --- kNN ------------------------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def features(array):
    net.eval()
    encode = getattr(net, "features", net.backbone)
    plain = T.Compose([T.ToImage(), T.ToDtype(torch.float32, scale=True), T.Normalize(mean, std)])
    rows = [encode(torch.stack([plain(Image.fromarray(image)) for image in array[at : at + 256]])) for at in range(0, len(array), 256)]
    return F.normalize(torch.cat(rows), dim=1)


evaluation = plan.get("eval", {})
k, temperature = evaluation.get("k", 20), evaluation.get("temperature", 0.07)
draw = np.random.default_rng(0)
bank = draw.permutation(len(images))[: evaluation.get("max_train", 10_000)]
queries = draw.permutation(len(test_images))[: evaluation.get("max_test", 2_000)]
similarity = features(test_images[queries]) @ features(images[bank]).T
weights, nearest = similarity.topk(k, dim=1)
votes = torch.zeros(len(queries), 10).scatter_add_(1, torch.from_numpy(labels[bank])[nearest], (weights / temperature).exp())
top1 = (votes.argmax(1).numpy() == test_labels[queries]).mean()
print(f"lightly {lightly.__version__}: loss {last:.4f}; kNN top-1 {100 * top1:.1f} %")
