"""TinyZero's experiment (Pan et al. 2025): reinforcement learning of a 3B base model on Countdown with think
and answer tags, without fine-tuning.

    torchrun --nproc_per_node=2 grpo.py config/countdown_tinyzero_grpo.py
    python grpo.py config/countdown_tinyzero_grpo.py --task=countdown_think:rows.jsonl --init_from=...

The questions are those of its data set (tasks/countdown_think.py). TinyZero trains with PPO on two cards; its
README reports that the 3B model learns to search and to verify its answers and that a 0.5B model does not
learn to reason, without accuracies. This uses GRPO, without a critic, and no worked examples, so that the
search is learnt from the reward alone. Not run.
"""
init_from = "Qwen/Qwen2.5-3B"
out_dir = "out/countdown_tinyzero"
task = "countdown_think"

parallel = "fsdp"
prompts_per_step = 64
k_samples = 8
few_shot = 0
max_new_tokens = 1024
slots = 128
tokens_per_micro_batch = 8192
max_steps = 300

learning_rate = 1e-6
warmup_steps = 10
beta = 0.001
gradient_checkpointing = True
eval_interval = 50
save_interval = 50
