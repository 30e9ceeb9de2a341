#!/usr/bin/env bash
# Six domains in one model on two cores: pretrain a small GPT on worked examples of all six, three in ten
# wrong; fine-tune it on its own verified solutions; train it with GRPO on all six at once; evaluate each model
# on 1,200 unseen questions. Results: docs/domains.md. experiments/domains.py and gain_domains.py begin with
# the fine-tuned model.
#
# Finished stages are not repeated. Takes --out_dir=, --data_dir=, --seed=, --base_steps= and --grpo_steps=.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/domains data=data seed=0 base= grpo=
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;; --data_dir=*) data=${argument#*=} ;;
        --seed=*) seed=${argument#*=} ;;
        --base_steps=*) base=--max_steps=${argument#*=} ;;
        --grpo_steps=*) grpo="--max_steps=${argument#*=} --eval_interval=${argument#*=}" ;;
        *)  echo "error: domains.sh takes --out_dir=, --data_dir=, --seed=, --base_steps= and --grpo_steps=," \
                "not $argument." >&2
            exit 2 ;;
    esac
done
source runs/ladder.sh
flags="--seed=$seed${base:+ $base}${grpo:+ $grpo}"
refuse_other_options "$flags"
source runs/setup.sh
ask="--task=math:0+code:0+logic:0+simulation:0+table:0+science:0 --max_new_tokens=144"
mkdir -p "$out"
echo "$flags" > "$out/flags"

use_all_cores 1,2,4

evaluate() {                             # evaluate NAME FLAGS...: all models on the same questions
    local file=$out/$1.txt; shift
    $per_core eval.py --compare "$out/base" "$out/rft" "$out/mixed" $ask --num_questions=1200 "$@" > "$file"
}
stage base "$python" train.py config/six_domains_base.py --out_dir="$out/base" --data_dir="$data" \
    --seed="$seed" --resume=auto $base
stage datagen \
    $per_core datagen.py --init_from="$out/base" $ask --output="$out/rft.json" --seed="$seed" \
    --num_questions=3600 --oversample=8 --keep_per_question=1 --stop_early --temperature=1
stage rft "$python" train.py config/rft.py --init_from="$out/base" --dataset="$out/rft.json" \
    --out_dir="$out/rft" --seed="$seed" --resume=auto --num_epochs=1.5
stage mixed $per_core grpo.py config/six_domains_cpu.py --init_from="$out/rft" --out_dir="$out/mixed" \
    --seed="$seed" --resume=auto $device $grpo
stage greedy evaluate greedy
stage sampled evaluate sampled --num_samples=4 --temperature=1
cat "$out/greedy.txt" "$out/sampled.txt"
