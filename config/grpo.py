"""GRPO of a small model on a task's own questions, the quickstart's last stage: 100 steps of 256 completions.

    python grpo.py config/grpo.py --init_from=out/rft --task=unit_conversion

For a million parameters. A larger model, or adapters, take --learning_rate=none: the default
(docs/training.md).
"""
init_from = "out/rft"
out_dir = "out/grpo"
task = "unit_conversion"
num_questions = 3200                     # each asked once: answers to repeated questions are memorised
max_new_tokens = 144

temperature = 1.3                        # at 1 a group's samples soon agree (docs/notes.md)
learning_rate = 5e-4
lr_schedule = "linear"                   # steps are noisy: small last steps average them
warmup_steps = 10
max_steps = 100

eval_interval = 100                      # before and after
