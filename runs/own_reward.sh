#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct on a reward of three lines, in five minutes on two cores: GRPO on twenty
# questions, then the answers to ten other questions before and after. Takes --model= (any that --init_from
# takes), --out_dir= and --seed=. A second call takes the reward and the questions as you have edited them.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/own_reward model= seed=0
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;; --model=*) model=${argument#*=} ;; --seed=*) seed=${argument#*=} ;;
        *) echo "error: own_reward.sh takes --out_dir=, --model= and --seed=, not $argument." >&2; exit 2 ;;
    esac
done
source runs/ladder.sh
also="transformers gguf"; source runs/setup.sh
[ -n "$model" ] || model=$("$python" -m runs.smollm2 model)
refuse_foreign_files "this script's" short.py questions.jsonl held_out.jsonl
mkdir -p "$out"
touch "$out/seconds"                         # marks the folder as this script's

write_new() { if [ -e "$1" ]; then cat > /dev/null; else cat > "$1"; fi; }
write_new "$out/short.py" <<'END'
def reward(question, completion):
    """Half for the right name, half more for saying little else."""
    right = question["answer"] in completion
    return 0.5 * right + 0.5 * (right and len(completion) < 60)
END
ask() {                                  # ask COUNTRY CAPITAL...: write questions, one per line
    while [ $# -gt 0 ]; do
        echo "{\"prompt\": \"What is the capital of $1?\", \"answer\": \"$2\"}"; shift 2
    done
}
ask France Paris Italy Rome Spain Madrid Japan Tokyo Germany Berlin China Beijing Egypt Cairo Greece Athens \
    Russia Moscow Portugal Lisbon Austria Vienna Poland Warsaw Sweden Stockholm Norway Oslo Ireland Dublin \
    Cuba Havana Peru Lima Kenya Nairobi Iran Tehran Thailand Bangkok | write_new "$out/questions.jsonl"
ask "the United Kingdom" London Canada Ottawa Finland Helsinki Denmark Copenhagen Hungary Budapest Belgium \
    Brussels "South Korea" Seoul Chile Santiago Argentina "Buenos Aires" Iraq Baghdad |
    write_new "$out/held_out.jsonl"

task=("--task=$out/short.py" --max_new_tokens=48)
"$python" grpo.py --init_from="$model" "${task[@]}" --dataset="$out/questions.jsonl" --out_dir="$out/run" \
    --overwrite --seed="$seed" --lora_rank=16 --prompts_per_step=8 --k_samples=6 --max_steps=6 \
    --eval_interval=0 --save_interval=6
"$python" eval.py --compare "$model" "$out/run" "${task[@]}" --dataset="$out/held_out.jsonl" --few_shot=0 \
    --num_samples=4 --temperature=1 --seed="$seed" --output="$out/answers.jsonl"
"$python" -m runs.smollm2 answers "$out/answers.jsonl"
page=$("$python" -m doctor.page "$out" --change)
echo "What the model says: $page"
say_next
