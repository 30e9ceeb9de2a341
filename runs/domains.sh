#!/usr/bin/env bash
# Six domains in one model, on two cores: a small GPT from scratch on worked examples of all six, of which three in ten are wrong; its own
# verified solutions; reinforcement learning on all six at once. docs/domains.md has what came out.
#
#     bash runs/domains.sh                                     the ladder
#     bash runs/domains.sh --seeds="0 1 2" --pcgrad --single   the experiment: with gradient surgery too, for each seed, and a
#                                                              run of a sixth of the steps for each domain alone
# What is done already is not done again. Takes --out_dir=, --data_dir=, --seed= (of what all runs of reinforcement learning
# begin with), --base_steps= and --grpo_steps= too.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/domains data=data seed=0 seeds=0 base= steps=180 pcgrad= single=
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;; --data_dir=*) data=${argument#*=} ;; --seeds=*) seeds=${argument#*=} ;;
        --seed=*) seed=${argument#*=} ;;
        --base_steps=*) base=--max_steps=${argument#*=} ;; --grpo_steps=*) steps=${argument#*=} ;;
        --pcgrad) pcgrad=yes ;; --single) single=yes ;;
        *) echo "error: domains.sh takes --out_dir=, --data_dir=, --seed=, --seeds=, --base_steps=, --grpo_steps=, --pcgrad and --single, not $argument." >&2; exit 2 ;;
    esac
done
also="matplotlib"; source runs/setup.sh
domains="math:0 code:0 logic:0 simulation:0 table:0 science:0"
mixture=${domains// /+}
ask="--task=$mixture --max_new_tokens=144"
mkdir -p "$out"

source runs/ladder.sh
spread 1,2,4

learn() {                                # learn NAME FLAGS...: reinforcement learning from the tuned model, whatever stopped it before
    local name=$1; shift
    once "$name" "$out/$name/checkpoints/step_$(printf %08d "$last")" \
        $each_core grpo.py config/six_domains_cpu.py --init_from="$out/rft" --out_dir="$out/$name" --max_steps="$last" --eval_interval="$last" \
        --resume=auto "$@"
}
compare() {                              # compare NAME MODELS...: all on the same test questions, each against the first; greedy, and sampled
    local name=$1; shift
    local file=$out/$name
    once "${name}_greedy" "$file.greedy.json" with_json "$file.greedy.json" $each_core eval.py --compare "${@/#/$out/}" $ask --num_questions=1200 --json
    once "${name}_sampled" "$file.sampled.json" with_json "$file.sampled.json" $each_core eval.py --compare "${@/#/$out/}" $ask --num_questions=1200 --json \
        --num_samples=4 --temperature=1
}
with_json() { local file=$1; shift; "$@" | tee "$file.log" | grep -v '^{'; grep '^{' "$file.log" > "$file.tmp"; mv "$file.tmp" "$file"; rm "$file.log"; }

finish base "$python" train.py config/six_domains_base.py --out_dir="$out/base" --data_dir="$data" --seed="$seed" --resume=auto $base
once datagen "$out/rft.json" \
    $each_core datagen.py --init_from="$out/base" $ask --output="$out/rft.json" --seed="$seed" \
    --num_questions=3600 --oversample=8 --keep_per_question=1 --stop_early --temperature=1
finish rft "$python" train.py config/rft.py --init_from="$out/base" --dataset="$out/rft.json" --out_dir="$out/rft" --seed="$seed" --resume=auto \
    --num_epochs=1.5
for seed in $seeds; do
    last=$steps
    learn "mixed$seed" --seed="$seed"
    [ -z "$pcgrad" ] || learn "pcgrad$seed" --seed="$seed" --surgery=pcgrad
done
last=$((steps / 6))
if [ -n "$single" ]; then
    for domain in $domains; do
        learn "${domain%:*}" --task="$domain" --num_questions=1200 --warmup_steps=2
    done
    compare single rft ${domains//:0/}
fi
compare ladder base rft "mixed${seeds%% *}"
if [ -n "$pcgrad" ]; then
    for seed in $seeds; do
        compare "seed$seed" "mixed$seed" "pcgrad$seed" rft
    done
fi
"$python" -m studies.domains "$out"
