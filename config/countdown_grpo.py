"""The last stage of Countdown: GRPO on the verifier's grade, 80 steps of 256 searches.

    python grpo.py config/countdown_grpo.py --init_from=out/countdown/rft

A search may be twice as long as the teachers' limit. The model learns to continue where teachers give up, to
use the additional length, and to search better.
"""
init_from = "out/countdown/rft"
out_dir = "out/countdown/grpo"
task = "countdown_search"
num_questions = 2560                     # one pass in 80 steps
max_new_tokens = 773                     # 800 positions minus the longest question

temperature = 1.0
mini_batches = 2                         # optimizer steps a rollout: +1 point at no cost (docs/notes.md)
learning_rate = 5e-4
lr_schedule = "linear"                   # steps are noisy: small last steps average them
warmup_steps = 10
max_steps = 80
log_interval = 1
eval_interval = 80       # before and after
eval_questions = 200
