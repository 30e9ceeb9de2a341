"""GRPO of a 3B model on GSM8K with eight A100s: FSDP for training, a bf16 copy on each card for sampling.

    torchrun --nproc_per_node=8 grpo.py config/grpo_3b_a100x8.py

3,085,938,688 parameters, 19,420.2 MFLOP a token at 1,024 positions.
Memory, computed: 27.7 GiB a card with micro-batches of 16,384 tokens and 128 slots; on one card it is 65.9.
Not run yet; tests run the same steps on small models.
"""
init_from = "Qwen/Qwen2.5-3B-Instruct"
out_dir = "out/grpo_3b_a100x8"
task = "gsm8k"

parallel = "fsdp"
prompts_per_step = 128
k_samples = 8
max_prompt_tokens = 768
max_new_tokens = 512
few_shot = 2
slots = 128
tokens_per_micro_batch = 16384
max_steps = 158                          # three passes over the 6,700 training questions

learning_rate = 1e-6
warmup_steps = 10
gradient_checkpointing = True
eval_interval = 25
save_interval = 50
