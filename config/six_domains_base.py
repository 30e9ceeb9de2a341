"""Pretraining on six domains on two cores: a byte-level model of worked examples, three in ten wrong.

    bash runs/domains.sh                     this, rejection sampling, fine-tuning and GRPO on all six
    python train.py config/six_domains_base.py

804,224 parameters; 13.7 minutes on two cores (docs/domains.md).
"""
dataset = "task:math:0+code:0+logic:0+simulation:0+table:0+science:0"
out_dir = "out/domains/base"

n_head = 4
n_kv_head = 2            # two lookups at once
batch_size = 8           # small: the model needs many steps
max_steps = 3600
eval_interval = 1200
save_interval = 600
log_interval = 100
