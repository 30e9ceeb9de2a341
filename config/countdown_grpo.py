"""The last rung of Countdown: reinforcement learning on the verifier's grade, 80 steps of 256 searches.

    python grpo.py config/countdown_grpo.py --init_from=out/countdown/rft

A search may be twice as long as a teacher's may be. What is learnt is to go on where teachers give up, to use
that room, and to search better in it.
"""
init_from = "out/countdown/rft"
out_dir = "out/countdown/grpo"
task = "countdown_search"
num_questions = 2560                     # which 80 steps ask once each
max_new_tokens = 773                     # with the longest question, the 800 positions that the model has

temperature = 1.0
mini_batches = 2                         # steps on each rollout: a point ahead, at no cost (docs/notes.md)
learning_rate = 5e-4
lr_schedule = "linear"                   # steps are noisy: the last ones average over them
warmup_steps = 10
max_steps = 80
log_interval = 1
eval_interval = 80       # before and after
eval_questions = 200
