"""Peak resident memory and time of a step, by what is kept for the backward pass: `batch.memory` and `batch.activation_checkpointing`.

    cargo build && python benches/memory.py target/debug/autodidact [key=value ...]

SimCLR with a ViT-S/16 at 224 px on the embedded images, one rank, 16 images: as one micro-batch for activation checkpointing, as eight for gradient caching. Losses are
compared: all choices must give the same. Linux (`ru_maxrss` in KiB).
"""

import json
import os
import subprocess
import sys
import tempfile
import time

RECIPE = """
[data]
source = "sample"
limit = 64
[[views]]
count = 2
size = 224
crop = {}
[backbone.vit]
dim = 384
depth = 12
heads = 6
patch = 16
[method.simclr]
hidden = 512
out = 128
[batch]
global = 16
micro = 16
[optimizer.adamw]
[schedule]
steps = 2
lr = 1e-3
[eval]
skip = true
"""

CASES = [
    ("one micro-batch", ["batch.activation_checkpointing=none"]),
    ("one micro-batch", ["batch.activation_checkpointing=every:3"]),
    ("one micro-batch", ["batch.activation_checkpointing=block"]),
    ("eight micro-batches", ["batch.micro=2", "batch.memory=keep"]),
    ("eight micro-batches", ["batch.micro=2", "batch.memory=cache"]),
    ("eight micro-batches", ["batch.micro=2", "batch.memory=cache", "batch.activation_checkpointing=block"]),
]


def run(program, options, folder):
    """Runs two steps; returns peak MiB, seconds of the second step, and losses."""
    recipe = os.path.join(folder, "recipe.toml")
    with open(recipe, "w") as file:
        file.write(RECIPE)
    command = [program, "pretrain", recipe, "--ranks", "1", "--run-dir", os.path.join(folder, "run"), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    text = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)}: {text}")
    with open(os.path.join(folder, "run", "metrics.jsonl")) as file:
        steps = [json.loads(line) for line in file]
    return usage.ru_maxrss / 1024, steps[1]["time_s"] - steps[0]["time_s"], [step["loss"] for step in steps]


def main():
    program, overrides = sys.argv[1], sys.argv[2:]
    print("| | options | peak, MiB | step, s |\n|---|---|---|---|")
    losses = {}
    for what, options in CASES:
        with tempfile.TemporaryDirectory() as folder:
            peak, seconds, found = run(program, options + overrides, folder)
        short = ", ".join(option.removeprefix("batch.") for option in options if "micro" not in option)
        print(f"| {what} | {short} | {peak:.0f} | {seconds:.1f} |", flush=True)
        if losses.setdefault(what, found) != found:
            sys.exit(f"{short}: losses {found}, others {losses[what]}")


main()
