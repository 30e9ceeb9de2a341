"""The last stage of Countdown on one GPU: config/countdown_grpo.py with twice the completions a step and a
fifth of its learning rate, for a model of thirteen times its size. Not run on a GPU yet.

    python grpo.py config/countdown_large_grpo.py --init_from=out/countdown_large/rft
"""
init_from = "out/countdown_large/rft"
out_dir = "out/countdown_large/grpo"
task = "countdown_search:4,99,1024,200000"
num_questions = 3840                     # one pass in 60 steps
max_new_tokens = 2021                    # 2048 positions minus the longest question

prompts_per_step = 64                    # x k_samples of 8
temperature = 1.0
mini_batches = 2
learning_rate = 1e-4
lr_schedule = "linear"
warmup_steps = 6
max_steps = 60
log_interval = 1
eval_interval = 60       # before and after
eval_questions = 200
