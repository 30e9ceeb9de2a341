"""GRPO of Qwen2.5-0.5B-Instruct on GSM8K with one GPU, in the form of verl's examples.

    python grpo.py config/gsm8k_qwen05b_grpo.py
    python eval.py --compare Qwen/Qwen2.5-0.5B-Instruct out/gsm8k_qwen05b --task=gsm8k_hashes \\
        --num_questions=1319 --max_new_tokens=512 --few_shot=0

494,032,768 parameters, 3,228.0 MFLOP a token at 1,024 positions.
Memory, computed: 17.8 GiB a card with micro-batches of 16,384 tokens and 256 slots, without CUDA's own:

    python -m runs.grpo_memory qwen2.5-0.5b 80 1 512 config/gsm8k_qwen05b_grpo.py

verl's documentation reports test accuracy of 49.6% before, 54.3% after GRPO with LoRA and 56.7% after PPO for
this model. Its public log of PPO on one GPU has 1.3% before, 45.8% after 30 of 435 steps of four updates,
53.1% after 100, 57.9% at best and 55.4% as the mean of the last twenty evaluations (the page of
`python -m doctor.page` shades them). Not run here. Compare rates first, in three runs of --max_steps=30 with
--learning_rate=1e-6, 2e-6 and 5e-6; then train with --seed=0, 1 and 2, each into an --out_dir of its own.
"""
init_from = "Qwen/Qwen2.5-0.5B-Instruct"
out_dir = "out/gsm8k_qwen05b"
task = "gsm8k_hashes"
few_shot = 0                             # as verl; a model from the hub gets four worked examples otherwise

prompts_per_step = 64
k_samples = 8
mini_batches = 4
skip_solved = 1
max_prompt_tokens = 512
max_new_tokens = 512
slots = 256
tokens_per_micro_batch = 16384
max_steps = 210                          # two passes over the 6,700 training questions, 840 updates

learning_rate = 2e-6
warmup_steps = 10
gradient_checkpointing = True
eval_interval = 30
save_interval = 50
