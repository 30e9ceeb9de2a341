"""GRPO of a 124M model on chess with two RTX 4090s.

    python train.py --init_from=gpt2 --dataset=task:chess_world --optimizer=adamw --learning_rate=3e-4 \\
        --max_steps=3000 --out_dir=out/chess_124m
    torchrun --nproc_per_node=2 grpo.py config/grpo_4090x2.py --init_from=out/chess_124m
    python -m runs.grpo_memory gpt2 24 2 91 config/grpo_4090x2.py

The settings of the RookWorld plan: 8 prompts x 8 samples on each card, bf16, four reward workers,
torch.compile, a KL term with the reference model offloaded to CPU memory. The plan's targets, for 8 x 8 on
two cards, are 4 to 5 s a step and less than 3 GB a card. Memory, computed: 6.8 GiB a card, of which weights,
gradients and moments alone take 1.9. --tokens_per_micro_batch=1024 takes 4.4 GiB; --slots=16 with
--gradient_checkpointing --tokens_per_micro_batch=256, also 3.1 GiB, which with --optimizer=muon are 2.8.
Not run on a GPU yet.
"""
init_from = "out/chess_124m"
out_dir = "out/grpo_4090x2"
task = "chess_world"
num_questions = 8000

prompts_per_step = 16                    # both cards together
k_samples = 8
max_new_tokens = 144
tokens_per_micro_batch = 8192
max_steps = 1000

beta = 0.01
offload_reference = True
learning_rate = 1e-5
warmup_steps = 20
weight_decay = 0.01

dtype = "bf16"
compile = True
reward_workers = 4
save_interval = 100
