"""The second stage of Countdown: fine-tune the model on its own searches that found the target.

    python train.py config/countdown_rft.py --init_from=out/countdown/base --dataset=out/countdown/rft.json

1.5 epochs, as in the quickstart: GRPO gains as much as further epochs would.
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
