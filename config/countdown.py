"""The first rung of Countdown on two cores: a byte-level model from scratch on searches that teachers wrote,
47 in a hundred of them in vain.

    bash runs/countdown.sh                   this, and the rungs that follow
    python train.py config/countdown.py

1,116,160 parameters. A document has 190 bytes on average and 400 at most; the model has room for 800, which
reinforcement learning will use.
"""
dataset = "task:countdown_search"
out_dir = "out/countdown/base"
block_size = 800

n_layer = 6              # what is looked up, computed and compared in one line takes turns
n_head = 4
n_kv_head = 1
batch_size = 10          # steps are what it needs
max_steps = 2000
eval_interval = 500
save_interval = 500
log_interval = 50
