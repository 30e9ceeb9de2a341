#!/usr/bin/env bash
# Install missing packages, then run the pipeline: pretrain a small GPT on worked examples, three in ten
# wrong; sample many solutions a question; fine-tune on verified ones; train with GRPO; evaluate each model on
# 500 unseen questions. Takes --out_dir=, --data_dir= and --seed=, and for a trial --base_steps=, --asked=
# (questions of rejection sampling), --grpo_steps= and --num_questions= (of the test split).
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/quickstart data=data seed=0 base= asked=2000 grpo= questions=500
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;; --data_dir=*) data=${argument#*=} ;;
        --seed=*) seed=${argument#*=} ;;
        --base_steps=*) base=--max_steps=${argument#*=} ;; --asked=*) asked=${argument#*=} ;;
        --grpo_steps=*) grpo=--max_steps=${argument#*=} ;; --num_questions=*) questions=${argument#*=} ;;
        *)  echo "error: quickstart.sh takes --out_dir=, --data_dir=, --seed=, --base_steps=, --asked=," \
                "--grpo_steps= and --num_questions=, not $argument." >&2
            exit 2 ;;
    esac
done
source runs/ladder.sh
[ -n "$out" ] && [ -n "$data" ] || refuse "--out_dir or --data_dir is empty (an unset variable?): name one."
refuse_foreign_files "the quickstart's" greedy.txt sampled.txt summary.json summary.png report.html
also="matplotlib"; source runs/setup.sh
ask="--task=unit_conversion --max_new_tokens=144"
mkdir -p "$out"
rm -f "$out/greedy.txt" "$out/sampled.txt" "$out/summary.json" "$out/summary.png" "$out/report.html"; : > "$out/seconds"

use_all_cores 1,2,4,8

compare() {                              # compare FILE FLAGS...: all models on the test questions
    local file=$1; shift
    $per_core eval.py --compare "$out/base" "$out/rft" "$out/grpo" $ask --num_questions="$questions" --json \
        "$@" > "$file" &&
        grep -v '^{' "$file"
}
timed base "$python" train.py config/quickstart.py --out_dir="$out/base" --data_dir="$data" --seed="$seed" \
    --overwrite --log_interval=50 $base
timed datagen $per_core datagen.py --init_from="$out/base" $ask --output="$out/rft.json" --seed="$seed" \
    --overwrite --num_questions="$asked" --oversample=8 --keep_per_question=1 --stop_early --temperature=1
# 1.5 epochs: GRPO gains as much as further epochs would, and learns more while the model's answers still
# differ
timed rft "$python" train.py config/rft.py --init_from="$out/base" --dataset="$out/rft.json" \
    --out_dir="$out/rft" --seed="$seed" --overwrite --num_epochs=1.5
timed grpo $per_core grpo.py config/grpo.py $ask --init_from="$out/rft" --out_dir="$out/grpo" --seed="$seed" \
    --overwrite $grpo
timed evaluation compare "$out/greedy.txt"
timed evaluation compare "$out/sampled.txt" --num_samples=8 --temperature=1
"$python" -m runs.summary "$out"
echo
for stage in base rft grpo; do "$python" -m doctor.plot "$out/$stage" --expected=quickstart_$stage; done
page=$("$python" -m doctor.page "$out")
echo "What the models say: $page"

echo; echo "A completion of the last model:"
"$python" sample.py "$out/grpo" --prompt="Question: How many gram are there per 6 kg?
" --temperature=0
say_next
