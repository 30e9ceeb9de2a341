"""The first rung of Countdown on two cores: a byte-level model from scratch on searches that teachers wrote,
two in five of them in vain.

    bash runs/countdown.sh                   this, and the rungs that follow
    python train.py config/countdown.py

1,116,160 parameters. A document has 219 bytes on average and 640 at most. Windows of 640 cut a third of
them, so that 27% of the bytes are learnt without their question.
"""
dataset = "task:countdown_search"
out_dir = "out/countdown/base"
block_size = 640

n_layer = 6              # what is looked up, computed and compared in one line takes turns
n_head = 4
n_kv_head = 1
batch_size = 12          # steps are what it needs
max_steps = 2400
eval_interval = 500
save_interval = 500
log_interval = 50
