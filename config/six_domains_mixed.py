"""GRPO of a 1.5B model on math, code, logic, simulation, table and science at once, with eight A100 80 GB.

    torchrun --nproc_per_node=8 grpo.py config/six_domains_mixed.py
    bash runs/slurm_domains.sh               this and the same with PCGrad, as two jobs
    python -m runs.grpo_memory qwen2.5-1.5b 80 8 768 config/six_domains_mixed.py

The batch of the eight-A100 guide: 128 questions of at most 256 tokens, 4 completions of at most 512 each, a
checkpoint every 500 steps. The questions are generated, synthetic replacements of GURU's (docs/domains.md);
if you have GURU's files, pass one for each domain: --task=guru:FILE+guru:FILE. Needs `pip install
reasoning-gym`.
Memory, computed: 38.1 GiB a card. With --surgery=pcgrad --surgery_buffers=bf16 the six gradients take another
18.5 GB a card; in fp32 they would be 37, with --parallel=fsdp 4.6. Not run on a GPU yet.
"""
init_from = "Qwen/Qwen2.5-1.5B-Instruct"
out_dir = "out/six_domains_mixed"
task = {"gym:math": 1, "gym:code": 1, "gym:logic": 1, "gym:simulation": 1, "table:2": 1, "science:2": 1}
num_questions = 60_000

prompts_per_step = 128
k_samples = 4
max_prompt_tokens = 768                  # 256 for the question, the rest for worked examples
max_new_tokens = 512
few_shot = 2
tokens_per_micro_batch = 32768
max_steps = 1500

learning_rate = 1e-6
warmup_steps = 10
gradient_checkpointing = True
eval_interval = 100
eval_questions = 600
save_interval = 500
