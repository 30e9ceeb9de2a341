"""GRPO of a 1.5B model on GSM8K with eight A100 80 GB.

    torchrun --nproc_per_node=8 grpo.py config/grpo_a100x8.py
    sbatch --nodes=1 runs/slurm_multinode.sh grpo.py config/grpo_a100x8.py
    python -m runs.grpo_memory qwen2.5-1.5b 80 8 768 config/grpo_a100x8.py

The batch of the eight-A100 guide: 128 questions of at most 256 tokens, 4 completions of at most 512 each,
three epochs. Its criteria are actor MFU above 40% (perf/mfu/actor in metrics.jsonl), more than 1,000 tokens/s
a card (perf/throughput), and three epochs in six hours (epoch_s is the seconds of one).
Memory, computed: 38.1 GiB a card. Not run on a GPU yet.
"""
init_from = "Qwen/Qwen2.5-1.5B-Instruct"
out_dir = "out/grpo_a100x8"
task = "gsm8k"

prompts_per_step = 128
k_samples = 4
max_prompt_tokens = 768                  # 256 for the question, as in the guide, the rest for worked examples
max_new_tokens = 512
few_shot = 2
tokens_per_micro_batch = 32768
max_steps = 158                          # three passes over the 6,700 training questions

learning_rate = 1e-6
warmup_steps = 10
gradient_checkpointing = True
eval_interval = 25
save_interval = 50
