#!/usr/bin/env bash
# Six domains in one model on two cores: pretrain a small GPT on worked examples of all six, three in ten
# wrong; fine-tune it on its own verified solutions; train it with GRPO on all six at once. Results:
# docs/domains.md.
#
#     bash runs/domains.sh                                     the pipeline
#     bash runs/domains.sh --seeds="0 1 2" --pcgrad --single   the experiment: GRPO with and without PCGrad
#                                                              for each seed, and shorter on each domain alone
#
# Finished stages are not repeated. Also takes --out_dir=, --data_dir=, --seed= (of pretraining and
# fine-tuning), --base_steps= and --grpo_steps=.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/domains data=data seed=0 seeds=0 base= steps=180 pcgrad= single=
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;; --data_dir=*) data=${argument#*=} ;;
        --seed=*) seed=${argument#*=} ;; --seeds=*) seeds=${argument#*=} ;;
        --base_steps=*) base=--max_steps=${argument#*=} ;; --grpo_steps=*) steps=${argument#*=} ;;
        --pcgrad) pcgrad=yes ;; --single) single=yes ;;
        *)  echo "error: domains.sh takes --out_dir=, --data_dir=, --seed=, --seeds=, --base_steps=," \
                "--grpo_steps=, --pcgrad and --single, not $argument." >&2
            exit 2 ;;
    esac
done
source runs/setup.sh
domains="math:0 code:0 logic:0 simulation:0 table:0 science:0"
mixture=${domains// /+}
ask="--task=$mixture --max_new_tokens=144"
mkdir -p "$out"

source runs/ladder.sh
use_all_cores 1,2,4

train_grpo() {                           # train_grpo NAME FLAGS...: from the fine-tuned model, $last steps
    local name=$1; shift
    unless_exists "$name" "$out/$name/checkpoints/step_$(printf %08d "$last")" \
        $per_core grpo.py config/six_domains_cpu.py --init_from="$out/rft" --out_dir="$out/$name" \
        --max_steps="$last" --eval_interval="$last" --resume=auto "$@"
}
compare() {                              # compare NAME MODELS...: with the first, greedy and sampled
    local name=$1; shift
    local file=$out/$name evaluate="$per_core eval.py $ask --num_questions=1200 --json"
    unless_exists "${name}_greedy" "$file.greedy.json" \
        with_json "$file.greedy.json" $evaluate --compare "${@/#/$out/}"
    unless_exists "${name}_sampled" "$file.sampled.json" \
        with_json "$file.sampled.json" $evaluate --compare "${@/#/$out/}" --num_samples=4 --temperature=1
}
with_json() {                            # with_json FILE COMMAND...: move the JSON line of its output to FILE
    local file=$1; shift
    "$@" | tee "$file.log" | grep -v '^{'
    grep '^{' "$file.log" > "$file.tmp"
    mv "$file.tmp" "$file"
    rm "$file.log"
}

stage base "$python" train.py config/six_domains_base.py --out_dir="$out/base" --data_dir="$data" \
    --seed="$seed" --resume=auto $base
unless_exists datagen "$out/rft.json" \
    $per_core datagen.py --init_from="$out/base" $ask --output="$out/rft.json" --seed="$seed" \
    --num_questions=3600 --oversample=8 --keep_per_question=1 --stop_early --temperature=1
stage rft "$python" train.py config/rft.py --init_from="$out/base" --dataset="$out/rft.json" \
    --out_dir="$out/rft" --seed="$seed" --resume=auto --num_epochs=1.5
for seed in $seeds; do
    last=$steps
    train_grpo "mixed$seed" --seed="$seed"
    [ -z "$pcgrad" ] || train_grpo "pcgrad$seed" --seed="$seed" --surgery=pcgrad
done
last=$((steps / 6))
if [ -n "$single" ]; then
    for domain in $domains; do
        train_grpo "${domain%:*}" --task="$domain" --num_questions=1200 --warmup_steps=2
    done
    compare single rft ${domains//:0/}
fi
compare ladder base rft "mixed${seeds%% *}"
if [ -n "$pcgrad" ]; then
    for seed in $seeds; do
        compare "seed$seed" "mixed$seed" "pcgrad$seed" rft
    done
fi
"$python" -m runs.domains "$out"
