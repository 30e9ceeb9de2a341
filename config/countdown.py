"""Pretraining for Countdown on two cores: a byte-level model from scratch on teachers' searches, 47% of which
fail.

    bash runs/countdown.sh                   this and the following stages
    python train.py config/countdown.py

1,116,160 parameters. A document has 190 bytes on average and at most 400; the context of 800 leaves room for
longer searches in reinforcement learning.
"""
dataset = "task:countdown_search"
out_dir = "out/countdown/base"
block_size = 800

n_layer = 6              # a line needs sequential lookup, arithmetic and comparison
n_head = 4
n_kv_head = 1
batch_size = 10          # small: the model needs many steps
max_steps = 2000
eval_interval = 500
save_interval = 500
log_interval = 50
