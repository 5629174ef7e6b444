#!/usr/bin/env bash
# Fine-tunes a vision transformer with autodidact and with timm on the same labelled CIFAR-10 images, three seeds each, and prints both accuracies.
#
#     benches/accuracy/finetune.sh PYTHON DATA INIT RECIPE [key=value ...]
#
# PYTHON has torch, torchvision, timm and safetensors; DATA holds CIFAR-10's binary files; INIT is the run folder that both start from. AUTODIDACT names a
# program that is built already, SEEDS other seeds. Example, some minutes a seed:
#
#     benches/accuracy/finetune.sh python3 ~/cifar-10-batches-bin runs/mae-vit recipes/cifar10/finetune-vit.toml data.label_fraction=0.1 schedule.epochs=30
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1 data=$2 init=$3 recipe=$4
shift 4
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
[ -n "${AUTODIDACT:-}" ] || cargo build --quiet
autodidact() { if [ -n "${AUTODIDACT:-}" ]; then "$AUTODIDACT" "$@"; else cargo run --quiet -- "$@"; fi; }
for seed in ${SEEDS:-0 1 2}; do
  run=$runs/$seed
  autodidact finetune "$recipe" "data.path=$data" "init=$init" "seed=$seed" --run-dir "$run" "$@" >"$run.txt" 2>"$run.log"
  echo "seed $seed, autodidact: $(grep -E '^top-1' "$run.txt" | tr -s ' ')"
  echo "seed $seed, $("$python" benches/accuracy/timm_side.py "$run" "$data" 2>"$run.timm.log")"
done
