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
# downloads the model once; if it can't, the runs say so
[ -n "$model" ] || "$python" -m runs.smollm2 model > /dev/null 2>&1 || true
mkdir -p "$out"
processes=()
end() {                                      # end CODE: a script's background processes ignore Ctrl-C
    trap "" INT TERM
    for process in "${processes[@]}"; do
        pkill -P "$process" || true
        kill "$process" || true
    done 2> /dev/null
    wait
    exit "$1"
}
trap "end 130" INT
trap "end 143" TERM
for seed in 0 1 2; do
    # a trapped signal waits for the stage, which saves its step
    PYTHON=$python bash -c 'trap "exit 143" TERM; source runs/smollm2.sh' runs/smollm2.sh --seed=$seed \
        ${model:+--model="$model"} --out_dir="$out/$seed" ${options[@]+"${options[@]}"} > "$out/$seed.log" 2>&1 &
    processes+=($!)
done
echo "Seeds 0 to 2 run; what they print is in $out/0.log to 2.log."
code=0
for seed in 0 1 2; do
    wait "${processes[seed]}" ||
        { code=1; echo "error: seed $seed failed: $(tail -n 1 "$out/$seed.log")" >&2; }
done
exit $code
