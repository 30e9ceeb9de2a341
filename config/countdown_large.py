"""Pretraining for Countdown on one GPU, with problems of Stream of Search's size: four numbers up to 99.

    bash runs/countdown.sh --size=large      this and the following stages
    python train.py config/countdown_large.py

14,409,088 parameters; 131.1M tokens, 2.63 epochs of 200,000 searches of 249 bytes on average, 26% of which
fail.
Memory, computed: 7.9 GiB at a micro-batch of 32 without torch.compile, which needs less.
Time, computed: 3.8 minutes on one A100 at 30% MFU.
Not run on a GPU yet. The paper trains 250M parameters on 500,000 searches, 57% of which succeed.
"""
dataset = "task:countdown_search:4,99,1024,200000"
out_dir = "out/countdown_large/base"
block_size = 2048        # twice the longest document, as in config/countdown.py

n_layer = 8
n_head = 6
n_embd = 384

batch_size = 32
max_steps = 2000
optimizer = "muon"
learning_rate = 0.005    # as config/tinystories.py, of the same shape
warmup_steps = 50
lr_schedule = "wsd"
cooldown = 0.5

eval_interval = 500
save_interval = 500
log_interval = 50
