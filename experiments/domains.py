"""Six domains at once: mixed batches, one domain a step, and PCGrad (docs/domains.md).

    bash runs/domains.sh
    python compare.py experiments/domains.py
"""
start = "out/domains/rft"
out_dir = "out/domains_compared"
command = "grpo.py config/six_domains_cpu.py --eval_interval=0"
arms = {
    "one domain a step": "--mixing=round_robin",
    "pcgrad": "--surgery=pcgrad",
}
controls = "start,again,placebo"
questions = 1200
num_samples = 4
seeds = 5
