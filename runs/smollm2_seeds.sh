#!/usr/bin/env bash
# runs/smollm2.sh with seeds 0, 1 and 2 side by side on one GPU, in folders 0, 1 and 2 of --out_dir=. Other
# options are passed on.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/smollm2_seeds options=() model=
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;;
        --seed=*) echo "error: smollm2_seeds.sh runs seeds 0 to 2: for one, run smollm2.sh." >&2; exit 2 ;;
        --model=*) model=${argument#*=} ;;
        *) options+=("$argument") ;;
    esac
done
also="matplotlib transformers gguf"; source runs/setup.sh
[ -n "$model" ] || model=$("$python" -m runs.smollm2 model)          # downloaded once
mkdir -p "$out"
trap 'trap - INT TERM; kill 0' INT TERM      # background processes of a script ignore Ctrl-C
processes=()
for seed in 0 1 2; do
    PYTHON=$python bash runs/smollm2.sh --seed=$seed --model="$model" --out_dir="$out/$seed" \
        ${options[@]+"${options[@]}"} > "$out/$seed.log" 2>&1 &
    processes+=($!)
done
echo "Seeds 0 to 2 run; what they print is in $out/0.log to 2.log."
code=0
for seed in 0 1 2; do
    wait "${processes[seed]}" ||
        { code=1; echo "error: seed $seed failed: $(tail -n 1 "$out/$seed.log")" >&2; }
done
exit $code
