"""Reinforcement learning of a small model on a task's own questions: GRPO with the defaults of grpo.py.

    python grpo.py config/grpo.py --init_from=out/rft --task=unit_conversion

For a model of a million parameters; one of a few hundred million wants a learning rate near 1e-6, or 1e-5 with --lora_rank=16.
"""
init_from = "out/rft"
out_dir = "out/grpo"
task = "unit_conversion"
max_new_tokens = 144
