"""TinyZero's experiment (Pan et al. 2025): reinforcement learning alone, from a base model of 3B, on
Countdown with think and answer tags.

    torchrun --nproc_per_node=2 grpo.py config/countdown_tinyzero_grpo.py
    python grpo.py config/countdown_tinyzero_grpo.py --task=countdown_think:rows.jsonl --init_from=...

The questions are those of its data set (tasks/countdown_think.py). It trains with PPO on two cards, and
reports that the 3B model comes to search and to check itself, and that one of 0.5B does not learn to reason
(its README; no share of right answers stands there). Here it is GRPO, without a critic. Nothing is shown
before a question: how to search is what is to be learnt. Not run.
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
