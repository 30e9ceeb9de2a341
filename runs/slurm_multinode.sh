#!/usr/bin/env bash
#SBATCH --job-name=nanorft
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=48
#SBATCH --mem=256G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Run a stage on several nodes, with torchrun on each and its rendezvous on the first. Copy it and edit the
# lines above.
#
#     sbatch runs/slurm_multinode.sh grpo.py config/grpo_a100x8.py
#     sbatch --nodes=4 runs/slurm_multinode.sh train.py config/a100_mega.py
#
# Two minutes before the time limit SLURM sends SIGUSR1: the stage saves and ends, and the job is requeued and
# resumes (train.py and grpo.py with --resume=auto, datagen.py from its own log). After scancel, which sends
# SIGTERM, it saves and ends alone.
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: sbatch runs/slurm_multinode.sh SCRIPT [CONFIG] [--key=value ...]" >&2
    exit 2
fi
nodes=${SLURM_JOB_NUM_NODES:?"submit this with sbatch"}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# the checkout in which sbatch was called, with its .venv if there is one
cd "$SLURM_SUBMIT_DIR"
[ ! -f .venv/bin/activate ] || source .venv/bin/activate
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# resubmitted jobs resume; so do the ranks after one has died, up to three times
resume=()
case $1 in train.py | grpo.py) resume=(--resume=auto) ;; esac
# seconds for ranks to finish a step and save; older versions of torchrun have 30 and no option
patience=()
! python -m torch.distributed.run --help | grep -q -- --shutdown-timeout || patience=(--shutdown-timeout=110)
srun --kill-on-bad-exit=1 python -m torch.distributed.run --max-restarts=3 ${patience[@]+"${patience[@]}"} \
    --nnodes="$nodes" --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_backend=c10d --rdzv_endpoint="$first:${RENDEZVOUS_PORT:-29500}" "$@" ${resume[@]+"${resume[@]}"} &
# This node's torchrun passes SIGTERM to its ranks, and these tell the others. Signalling the ranks alone would
# make torchrun restart them.
stopped=
launcher="^[^ ]*python[^ ]* -m torch.distributed.run .*--rdzv_id=$SLURM_JOB_ID "
stop() { pkill -TERM -u "$(id -u)" -f -- "$launcher" || true; }
trap 'stopped=yes; stop' USR1
trap stop TERM
job=$!
while :; do                                   # a signal interrupts wait before the job ends
    code=0; wait "$job" || code=$?
    kill -0 "$job" 2>/dev/null || break
done
[ -z "$stopped" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
