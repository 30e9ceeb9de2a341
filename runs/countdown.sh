#!/usr/bin/env bash
# Countdown, from scratch, on two cores: a small GPT on searches that teachers wrote; its own verified searches; reinforcement learning
# on the verifier's grade; and what of it is beyond the teachers. docs/countdown.md has what came out. No data to download, no GPU.
#
#     bash runs/countdown.sh                   39 to 43 minutes on two Zen 5 cores
# What is done already is not done again. Takes --out_dir=, --data_dir=, --seed=, --base_steps=, --grpo_steps=, --asked= (questions of
# rejection sampling), --num_questions= (of the test; without it 500, or as many as there are) and --task= (countdown_search:3 is easier).
# A folder goes on with the flags that it was begun with.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/countdown data=data seed=0 base= grpo= asked=3600 questions= task=countdown_search
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;; --data_dir=*) data=${argument#*=} ;; --seed=*) seed=${argument#*=} ;;
        --base_steps=*) base=${argument#*=} ;; --grpo_steps=*) grpo=${argument#*=} ;;
        --asked=*) asked=${argument#*=} ;; --num_questions=*) questions=${argument#*=} ;; --task=*) task=${argument#*=} ;;
        *) echo "error: countdown.sh takes --out_dir=, --data_dir=, --seed=, --base_steps=, --grpo_steps=, --asked=, --num_questions= and --task=, not $argument; train.py --help lists the knobs of training." >&2; exit 2 ;;
    esac
done
source runs/ladder.sh
[ -n "$out" ] && [ -n "$data" ] || refuse "--out_dir or --data_dir is empty (is a variable not set?): name one."
for number in "$base" "$grpo" "$asked" "$questions" "1$seed"; do
    [[ $number =~ ^([1-9][0-9]*)?$ ]] || refuse "A seed, or a number of steps or questions, is none: give whole numbers, of steps and questions at least 1."
done
flags="--task=$task --seed=$seed --base_steps=$base --grpo_steps=$grpo --asked=$asked --num_questions=$questions"
ours_or_none "this ladder's" flags greedy.txt sampled.txt again.txt greedy.jsonl sampled.jsonl again.jsonl teachers.json traces.txt summary.json summary.png
[ ! -e "$out/flags" ] || [ "$(cat "$out/flags")" = "$flags" ] ||
    refuse "$out was begun with other flags, $(cat "$out/flags"): give these, or another --out_dir=."
also="matplotlib"; source runs/setup.sh
mkdir -p "$out"
touch "$out/seconds"
"$python" -m studies.countdown --teachers="$out/teachers.json" --task="$task" ${questions:+--num_questions="$questions"}
echo "$flags" > "$out/flags"

room=$("$python" -c "import sys; from tasks import countdown_search as c; print(2 * c.sizes(sys.argv[1].partition(':')[2] or None)[2])" "$task")
ask="--task=$task --max_new_tokens=$((room - 27))"            # with the longest question, twice the bytes that the teachers had
spread 1,2,4,8                                # training too

answer() {                               # answer NAME MODELS AND FLAGS...: the test questions; all answers in NAME.jsonl
    local file=$out/$1; shift
    $each_core eval.py --compare "$@" $ask ${questions:+--num_questions="$questions"} --output="$file.jsonl" --json > "$file.txt"
    grep -v '^{' "$file.txt"
}
models="$out/base $out/rft $out/grpo"
finish base $each_core train.py config/countdown.py --dataset="task:$task" --block_size="$room" --out_dir="$out/base" --data_dir="$data" \
    --seed="$seed" $device --resume=auto ${base:+--max_steps="$base"}
# Drawn by another seed than the questions of reinforcement learning: one in six of them is asked there too.
finish datagen $each_core datagen.py --init_from="$out/base" $ask --output="$out/rft.json" --seed=$((1000 + seed)) \
    --num_questions="$asked" --oversample=4 --keep_per_question=1 --stop_early --temperature=1
finish rft "$python" train.py config/countdown_rft.py --init_from="$out/base" --dataset="$out/rft.json" --out_dir="$out/rft" --seed="$seed" $device --resume=auto
finish grpo $each_core grpo.py config/countdown_grpo.py $ask --init_from="$out/rft" --out_dir="$out/grpo" --seed="$seed" --resume=auto \
    ${grpo:+--max_steps="$grpo" --num_questions=$((32 * grpo)) --eval_interval="$grpo"}                     # 32 a step, each once
finish greedy answer greedy $models
finish sampled answer sampled $models --num_samples=8 --temperature=1
# By these answers of the base it is said what it does not solve in 8 tries; by the others, how often each model solves that.
finish again answer again "$out/base" --num_samples=8 --temperature=1 --seed=1
"$python" -m studies.countdown "$out"
echo; echo "Three models, side by side (all in $out/traces.txt):"
sed -n 1,25p "$out/traces.txt"
