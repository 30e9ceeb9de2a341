#!/usr/bin/env bash
# Countdown on two cores (39 to 43 minutes on Zen 5): pretrain a small GPT on teachers' searches, fine-tune it
# on its own verified searches, train it with GRPO, evaluate it on problems that no teacher solves
# (docs/countdown.md). Finished stages are not repeated; a folder is resumed with the options that it was
# started with. Takes --out_dir=, --data_dir=, --seed=, --base_steps=, --grpo_steps=, --asked= (questions of
# rejection sampling), --num_questions= (of split test; default 500 or all), --task= (countdown_search:3 is
# easier) and --size=large: a larger model and four numbers up to 99, for a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/countdown data=data seed=0 base= grpo= asked=3600 questions= task=countdown_search
files=config/countdown size= prompts=32 rate=
case " $* " in *" --size=large "*)
    out=out/countdown_large asked=10000 task=countdown_search:4,99,1024,200000
    files=config/countdown_large size=--size=large prompts=64 rate=--learning_rate=3e-4 ;;
esac
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;; --data_dir=*) data=${argument#*=} ;;
        --task=*) task=${argument#*=} ;; --seed=*) seed=${argument#*=} ;;
        --base_steps=*) base=${argument#*=} ;; --grpo_steps=*) grpo=${argument#*=} ;;
        --asked=*) asked=${argument#*=} ;; --num_questions=*) questions=${argument#*=} ;;
        --size=large) ;;
        *)  echo "error: countdown.sh takes --out_dir=, --data_dir=, --seed=, --base_steps=, --grpo_steps=," \
                "--asked=, --num_questions=, --task= and --size=large, not $argument." >&2
            exit 2 ;;
    esac
done
source runs/ladder.sh
[ -n "$out" ] && [ -n "$data" ] || refuse "--out_dir or --data_dir is empty (an unset variable?): name one."
for number in "$base" "$grpo" "$asked" "$questions" "1$seed"; do
    [[ $number =~ ^([1-9][0-9]*)?$ ]] ||
        refuse "Seed, steps and questions should be whole numbers, all but the seed at least 1: correct them."
done
flags="--task=$task --seed=$seed --base_steps=$base --grpo_steps=$grpo --asked=$asked"
flags="$flags --num_questions=$questions${size:+ $size}"
refuse_foreign_files "this pipeline's" flags greedy.txt sampled.txt again.txt greedy.jsonl sampled.jsonl \
    again.jsonl teachers.json traces.txt summary.json summary.png
refuse_other_options "$flags"
also="matplotlib"; source runs/setup.sh
mkdir -p "$out"
touch "$out/seconds"
"$python" -m runs.countdown --teachers="$out/teachers.json" --task="$task" \
    ${questions:+--num_questions="$questions"}
echo "$flags" > "$out/flags"

context=$("$python" -c "import sys
from tasks import countdown_search
print(2 * countdown_search.sizes(sys.argv[1].partition(':')[2] or None)[2])" "$task")
# twice the teachers' bytes; the longest question has 27
ask="--task=$task --max_new_tokens=$((context - 27))"
use_all_cores 1,2,4,8                         # for training too

evaluate() {                             # evaluate NAME MODELS AND FLAGS...: writes NAME.txt and NAME.jsonl
    local file=$out/$1; shift
    $per_core eval.py --compare "$@" $ask ${questions:+--num_questions="$questions"} --output="$file.jsonl" \
        --json > "$file.txt"
    grep -v '^{' "$file.txt"
}
models=("$out/base" "$out/rft" "$out/grpo")
stage base $per_core train.py "$files.py" --dataset="task:$task" --block_size="$context" \
    --out_dir="$out/base" --data_dir="$data" --seed="$seed" $device --resume=auto ${base:+--max_steps="$base"}
# another seed than GRPO's, which shares one question in six
stage datagen $per_core datagen.py --init_from="$out/base" $ask --output="$out/rft.json" \
    --seed=$((1000 + 10#$seed)) --num_questions="$asked" --oversample=4 --keep_per_question=1 --stop_early \
    --temperature=1
stage rft "$python" train.py config/countdown_rft.py --init_from="$out/base" --dataset="$out/rft.json" \
    --out_dir="$out/rft" --seed="$seed" $device --resume=auto $rate
stage grpo $per_core grpo.py "${files}_grpo.py" $ask --init_from="$out/rft" --out_dir="$out/grpo" \
    --seed="$seed" --resume=auto \
    ${grpo:+--max_steps="$grpo" --num_questions=$((prompts * grpo)) --eval_interval="$grpo"}
stage greedy evaluate greedy "${models[@]}"
stage sampled evaluate sampled "${models[@]}" --num_samples=8 --temperature=1
# these answers select the problems that the base fails; the sampled ones then compare the models on them
stage again evaluate again "$out/base" --num_samples=8 --temperature=1 --seed=1
"$python" -m runs.countdown "$out"
echo; echo "Three models, side by side (all in $out/traces.txt):"
sed -n 1,25p "$out/traces.txt"
