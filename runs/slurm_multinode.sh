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
# from its checkpoint (train.py and grpo.py with --init_from=resume, datagen.py by itself).
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

# A job that is queued again goes on from its checkpoint, or begins again if it had none yet.
resume=()
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ "$1" != datagen.py ]; then
    out=$(printf '%s\n' "$@" | sed -n 's/^--out_dir=//p' | tail -n 1)
    [ -n "$out" ] || out=$(cat /dev/null $(printf '%s\n' "$@" | grep '^config/.*\.py$') | sed -n 's/^out_dir = "\(.*\)".*/\1/p' | tail -n 1)
    if [ -z "$out" ] || compgen -G "$out/checkpoints/step_*" > /dev/null; then resume=(--init_from=resume); else resume=(--overwrite); fi
fi
srun --kill-on-bad-exit=1 python -m torch.distributed.run --nnodes="$nodes" --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$first:${RENDEZVOUS_PORT:-29500}" "$@" ${resume[@]+"${resume[@]}"} &
# The signal goes to the ranks themselves: torchrun would give them 30 seconds, and a step may take longer. One rank tells the others.
stopped=
trap 'stopped=yes; pkill -TERM -u "$(id -u)" -f -- "-u $1" || true' TERM
job=$!
while :; do                                   # a wait ends with the signal, before the job does
    code=0; wait "$job" || code=$?
    kill -0 "$job" 2>/dev/null || break
done
[ -z "$stopped" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
