"""PyTorch's side of benches/step.rs: reads a number of steps from each line of stdin, runs them, answers with the seconds of each."""

import sys
import time

import timm
import torch
import torchvision
from torch import nn

name, layout, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(threads)
torch.manual_seed(0)
outputs = 128


def vit(size, patch, **sizes):
    return timm.models.VisionTransformer(img_size=size, patch_size=patch, num_classes=outputs, **sizes)


def cifar_resnet18():
    model = torchvision.models.resnet18(num_classes=outputs)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


model, size, batch = {
    "vit-ti4-32": (lambda: vit(32, 4, embed_dim=192, depth=12, num_heads=3), 32, 64),
    "resnet18-32": (cifar_resnet18, 32, 64),
    "vit-s16-224": (lambda: vit(224, 16, embed_dim=384, depth=12, num_heads=6), 224, 16),
    "resnet50-224": (lambda: torchvision.models.resnet50(num_classes=outputs), 224, 16),
    "vit-b16-224": (lambda: vit(224, 16, embed_dim=768, depth=12, num_heads=12), 224, 8),
    "convnext-t-224": (lambda: timm.create_model("convnext_tiny", num_classes=outputs), 224, 16),
}[name]
model = model().train()
images = torch.randn(batch, 3, size, size)
if layout == "channels_last":
    model = model.to(memory_format=torch.channels_last)
    images = images.contiguous(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

for line in sys.stdin:
    seconds = []
    for _ in range(int(line)):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    print(*seconds, flush=True)
