#!/usr/bin/env bash
# SmolLM2-135M-Instruct through the whole pipeline, on unit conversion: fine-tune it on worked examples, sample
# and verify, fine-tune on its own verified answers, train with GRPO, and evaluate the four models on the same
# test questions (docs/models.md). A finished stage is not repeated; a folder is resumed with the options that
# it was started with. Takes --out_dir=, --seed=, --model= (any that --init_from takes), --task=
# (unit_conversion:2, or :PATH of a folder with train.json), and for a trial --sft_steps=, --asked= (questions
# of rejection sampling), --grpo_steps= and --num_questions= (of the test split).
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/smollm2 seed=0 model= task=unit_conversion sft= asked= grpo= questions=
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;; --seed=*) seed=${argument#*=} ;; --model=*) model=${argument#*=} ;;
        --task=*) task=${argument#*=} ;; --sft_steps=*) sft=${argument#*=} ;; --asked=*) asked=${argument#*=} ;;
        --grpo_steps=*) grpo=${argument#*=} ;; --num_questions=*) questions=${argument#*=} ;;
        *)  echo "error: smollm2.sh takes --out_dir=, --seed=, --model=, --task=, --sft_steps=, --asked=," \
                "--grpo_steps= and --num_questions=, not $argument." >&2
            exit 2 ;;
    esac
done
source runs/ladder.sh
[ -n "$out" ] || refuse "--out_dir is empty (an unset variable?): name one."
also="matplotlib transformers gguf"; source runs/setup.sh
if "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    : "${grpo:=100}"
    batch="--batch_size=32" oversample=10 samples=8 tokens=128
    rollout="--prompts_per_step=32 --k_samples=16"
else
    # One worked solution in six has more than 80 tokens; few steps don't teach these.
    : "${grpo:=24}"
    batch="--batch_size=8" oversample=5 samples=2 tokens=80
    rollout="--prompts_per_step=24 --k_samples=8 --learning_rate=3e-4"     # few steps: above the default, 2e-4
fi
: "${sft:=64}" "${asked:=1000}" "${questions:=500}"
# a resume takes the model that the run began with, whether or not the hub answers now
[ -n "$model" ] || [ ! -f "$out/flags" ] || model=$(sed -n 's/.* --model=\(.*\) --task=.*/\1/p' "$out/flags")
[ -n "$model" ] || model=$("$python" -m runs.smollm2 model)
flags="--seed=$seed --model=$model --task=$task --sft_steps=$sft --asked=$asked --grpo_steps=$grpo"
flags="$flags --num_questions=$questions"
refuse_foreign_files "this pipeline's" flags greedy.txt sampled.txt summary.json summary.png report.html
refuse_other_options "$flags"
mkdir -p "$out"
touch "$out/seconds"
echo "$flags" > "$out/flags"

ask=("--task=$task" --max_new_tokens=$tokens)
# On a GPU, compiling takes longer than these steps.
adapters="--lora_rank=16 --compile=false --optimizer=adamw --seed=$seed --log_interval=4 --resume=auto"
evaluate() {                             # evaluate NAME FLAGS...: all models on the test questions
    local name=$1; shift
    "$python" eval.py --compare "$model" "$out/sft" "$out/rft" "$out/grpo" "${ask[@]}" --few_shot=0 \
        --num_questions="$questions" --json "$@" > "$out/$name.txt"
    grep -v '^{' "$out/$name.txt"
}
# worked examples exist at a level; a path has questions and answers only
examples=${task%%:*}; case $task in *:[123]) examples=$task ;; esac
stage sft "$python" train.py --init_from="$model" --dataset="examples:$examples" --out_dir="$out/sft" $adapters \
    --batch_size=8 --max_steps="$sft" --block_size=256 --lr_schedule=linear --warmup_steps=5
stage datagen "$python" datagen.py --init_from="$out/sft" "${ask[@]}" --output="$out/rft.json" --seed="$seed" \
    --num_questions="$asked" --oversample=$oversample --keep_per_question=1 --stop_early=true \
    --temperature=0.8
stage rft "$python" train.py --init_from="$out/sft" --dataset="$out/rft.json" --out_dir="$out/rft" $adapters \
    $batch --num_epochs=1 --block_size=256 --learning_rate=5e-4 --lr_schedule=cosine --warmup_steps=5
stage grpo "$python" grpo.py --init_from="$out/rft" "${ask[@]}" --out_dir="$out/grpo" --seed="$seed" \
    --resume=auto --lora_rank=16 $rollout --max_steps="$grpo" --lr_schedule=linear --temperature=1.2 --eval_interval=0 \
    --save_interval=8
stage greedy evaluate greedy
stage sampled evaluate sampled --num_samples=$samples --temperature=1
"$python" -m runs.summary "$out"
page=$("$python" -m doctor.page "$out")
echo "What the models say: $page"
echo; echo "A completion of the last model:"
"$python" sample.py "$out/grpo" --task="$task" --temperature=0 --prompt="How many gram are there per 6 kg?"
say_next
