"""The first rung of the six domains on two cores: a byte-level model from scratch, on worked examples of all six, three in ten wrong.

    bash runs/domains.sh                     this, rejection sampling, fine-tuning, reinforcement learning on all six
    python train.py config/six_domains_base.py

771,456 parameters.
"""
dataset = "task:math+code+logic+simulation+table+science"
out_dir = "out/domains/base"

n_head = 4
n_kv_head = 1
max_steps = 1500
log_interval = 50
