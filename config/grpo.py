"""Reinforcement learning of a small model on a task's own questions: the quickstart's last rung, 100 steps of 256 answers.

    python grpo.py config/grpo.py --init_from=out/rft --task=unit_conversion

For a model of a million parameters; one of a few hundred million wants a learning rate near 1e-6, or 1e-5 with --lora_rank=16.
"""
init_from = "out/rft"
out_dir = "out/grpo"
task = "unit_conversion"
num_questions = 3200                     # each asked once: of questions that come again it learns the answers by heart
max_new_tokens = 144

temperature = 1.3                        # at 1 the samples of a group soon agree, and what the model could do already suffers (docs/notes.md)
learning_rate = 5e-4
lr_schedule = "linear"                   # steps are noisy: the last ones average over them
warmup_steps = 10
max_steps = 100

eval_interval = 100                      # before and after
