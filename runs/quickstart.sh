#!/usr/bin/env bash
# Sets up what is missing, trains a small GPT on generated text, and shows what it writes. No data to download, no GPU.
# Arguments go to train.py.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/quickstart
for argument in "$@"; do case $argument in --out_dir=*) out=${argument#*=} ;; esac; done
source runs/setup.sh

"$python" train.py --out_dir="$out" --overwrite "$@"

echo; echo "Four samples:"
"$python" sample.py "$out" --num_samples=4 --prompt="Question: "
