#!/usr/bin/env bash
#SBATCH --job-name=nanorft
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=48
#SBATCH --mem=256G
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
# A stage on several nodes: torchrun on each, which meet on the first. Copy it, and change the lines above.
#
#     sbatch runs/slurm_multinode.sh grpo.py config/grpo_a100x8.py
#     sbatch --nodes=4 runs/slurm_multinode.sh train.py config/a100_production.py
#
# Two minutes before the time is up SLURM sends SIGTERM, upon which the stage saves and ends; the job is then queued again and goes on
# from its checkpoint (train.py and grpo.py with --resume=auto, datagen.py by itself).
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: sbatch runs/slurm_multinode.sh SCRIPT [CONFIG] [--key=value ...]" >&2
    exit 2
fi
nodes=${SLURM_JOB_NUM_NODES:?"submit this with sbatch"}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The checkout in which sbatch was called, with its .venv if there is one.
cd "$SLURM_SUBMIT_DIR"
[ ! -f .venv/bin/activate ] || source .venv/bin/activate
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# A job that is queued or submitted again goes on from its checkpoint; so do ranks of which one has died, three times.
resume=()
case $1 in train.py | grpo.py) resume=(--resume=auto) ;; esac
# Seconds that ranks may take to finish a step and to save: torchrun gives them 30, and older versions know no other number.
patience=()
! python -m torch.distributed.run --help | grep -q -- --shutdown-timeout || patience=(--shutdown-timeout=110)
srun --kill-on-bad-exit=1 python -m torch.distributed.run --max-restarts=3 ${patience[@]+"${patience[@]}"} --nnodes="$nodes" --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$first:${RENDEZVOUS_PORT:-29500}" "$@" ${resume[@]+"${resume[@]}"} &
# The signal goes to this node's torchrun, which hands it to its ranks, and these tell the others; ranks that ended on their own it would
# start again.
stopped=
trap 'stopped=yes; pkill -TERM -u "$(id -u)" -f -- "^[^ ]*python[^ ]* -m torch.distributed.run .*--rdzv_id=$SLURM_JOB_ID " || true' TERM
job=$!
while :; do                                   # a wait ends with the signal, before the job does
    code=0; wait "$job" || code=$?
    kill -0 "$job" 2>/dev/null || break
done
[ -z "$stopped" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
