"""The second rung of Countdown: a model learns from those of its own searches that came upon the target.

    python train.py config/countdown_rft.py --init_from=out/countdown/base --dataset=out/countdown/rft.json

One pass and a half, as in the quickstart: what more would add, the last rung adds as well.
"""
init_from = "out/countdown/base"
dataset = "out/countdown/rft.json"
out_dir = "out/countdown/rft"

batch_size = 32
gradient_accumulation_steps = 2          # 64 searches a step
num_epochs = 1.5
optimizer = "adamw"
learning_rate = 1e-3
lr_schedule = "cosine"
warmup_steps = None                      # a tenth of the steps, at most 50
log_interval = 10
keep_last = 2
