#!/usr/bin/env bash
# Submit the two six-domain runs, mixed and with PCGrad, each on a node of eight GPUs and with the given
# options.
#
#     bash runs/slurm_domains.sh
#     bash runs/slurm_domains.sh --init_from=Qwen/Qwen2.5-3B-Instruct --parallel=fsdp
set -euo pipefail
cd "$(dirname "$0")/.."
command -v sbatch > /dev/null || {
    echo "error: There is no sbatch here: use a machine with SLURM, or run grpo.py with torchrun." >&2
    exit 2
}
for argument in "$@"; do
    case $argument in
        --out_dir=*) echo "error: Both runs would write to $argument: leave it out." >&2; exit 2 ;;
    esac
done
submit() {                                       # submit NAME OPTIONS...
    local name=$1; shift
    sbatch --job-name="domains-$name" --output="domains_${name}_%j.out" --nodes=1 \
        runs/slurm_multinode.sh grpo.py config/six_domains_mixed.py "$@"
}
submit mixed "$@"
submit pcgrad --surgery=pcgrad --surgery_buffers=bf16 --out_dir=out/six_domains_pcgrad "$@"
