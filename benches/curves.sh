#!/usr/bin/env bash
# Trains the same recipe with our operations and with burn's own, three seeds each, and prints the last loss and the kNN accuracy of every run:
# both must end at the same accuracy within noise.
#
#     benches/curves.sh DIR [key=value ...]        DIR holds the CIFAR-10 binary files
set -euo pipefail
cd "$(dirname "$0")/.."
data=$1
shift
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
cargo build --quiet
for seed in 0 1 2; do
  for plain in false true; do
    cargo run --quiet -- pretrain recipes/cifar10/simclr-resnet18.toml "data.path=$data" "seed=$seed" "ops.plain=$plain" \
      --run-dir "$runs/$seed-$plain" "$@" >"$runs/$seed-$plain.txt" 2>"$runs/$seed-$plain.log"
    echo "seed $seed, ops.plain = $plain: $(grep -E '^(loss|kNN top-1|training)' "$runs/$seed-$plain.txt" | tr -s ' ' | paste -sd ';')"
  done
done
