#!/usr/bin/env bash
# Trains a recipe with autodidact and with lightly on the same CIFAR-10 images, three seeds each, and prints both kNN accuracies.
#
#     benches/accuracy/run.sh PYTHON DATA RECIPE [key=value ...]
#
# PYTHON has torch, torchvision, timm and lightly; DATA holds CIFAR-10's binary files; RECIPE is one of recipes/cifar10/ for simclr, byol, barlow,
# dino (with a resnet) or mae. Example, some minutes a seed:
#
#     benches/accuracy/run.sh python3 ~/cifar-10-batches-bin recipes/cifar10/simclr-resnet18.toml schedule.epochs=4
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1 data=$2 recipe=$3
shift 3
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
cargo build --quiet
for seed in ${SEEDS:-0 1 2}; do
  run=$runs/$seed
  cargo run --quiet -- pretrain "$recipe" "data.path=$data" "seed=$seed" --run-dir "$run" "$@" >"$run.txt" 2>"$run.log"
  echo "seed $seed, autodidact: $(grep -E '^(loss|kNN top-1)' "$run.txt" | tr -s ' ' | paste -sd ';')"
  echo "seed $seed, $("$python" benches/accuracy/lightly_side.py "$run/plan.toml" "$data" 2>"$run.lightly.log")"
done
