#!/usr/bin/env bash
# The reference of the record game (docs/records.md): from random weights to 70% exact samples on unit
# conversion, on two cores. A record is a faster copy. Takes --seed= and --out_dir=; the folder `model` there
# is the result.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/speedrun_reference seed=0 python=${PYTHON:-python3}
"$python" -c "from importlib.util import find_spec; exit(not find_spec('torch'))" || python=.venv/bin/python
for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#*=} ;; --seed=*) seed=${argument#*=} ;;
        *) echo "error: speedrun.sh takes --out_dir= and --seed=, not $argument." >&2; exit 2 ;;
    esac
done
common="--seed=$seed --device=cpu --overwrite"
in_two() { env OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone --nproc_per_node=2 "$@"; }

"$python" train.py config/quickstart.py --out_dir="$out/base" --data_dir="$out" \
    $common
in_two datagen.py --init_from="$out/base" --task=unit_conversion --output="$out/rft.json" \
    --max_new_tokens=144 --num_questions=2000 --oversample=8 --keep_per_question=1 --stop_early \
    --temperature=1 $common
"$python" train.py config/rft.py --init_from="$out/base" --dataset="$out/rft.json" --out_dir="$out/model" \
    $common
