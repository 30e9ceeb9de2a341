#!/usr/bin/env bash
# Submits the two runs of the six domains side by side, each on a node of eight GPUs: mixed, and with gradient surgery. Flags are handed
# to both, in place of what the two files say.
#
#     bash runs/slurm_domains.sh
#     bash runs/slurm_domains.sh --init_from=Qwen/Qwen2.5-3B-Instruct --parallel=fsdp
set -euo pipefail
cd "$(dirname "$0")/.."
command -v sbatch > /dev/null || { echo "error: There is no sbatch here: run this where SLURM is, or the two configs with torchrun." >&2; exit 2; }
for argument in "$@"; do
    case $argument in
        --out_dir=*) echo "error: Both runs would write to $argument: leave it out, each has its own." >&2; exit 2 ;;
    esac
done
for method in mixed pcgrad; do
    sbatch --job-name="domains-$method" --output="domains_${method}_%j.out" --nodes=1 runs/slurm_multinode.sh grpo.py "config/six_domains_$method.py" "$@"
done
