"""GPT-2's largest shape on eight cards with FSDP, at 20 tokens a parameter.

    torchrun --nproc_per_node=8 train.py config/gpt2_1b5.py --dataset=nanoGPT/data/openwebtext
    sbatch runs/slurm_multinode.sh train.py config/gpt2_1b5.py --parallel=hybrid --dataset=... # several nodes

1,556,995,200 parameters, 10,274.0 MFLOP a token; 31457.3M tokens.
Memory, computed: 27.8 GiB a card at a micro-batch of 8 on eight cards, uncompiled; on one it is 47.5.
Time, computed: 38366 minutes on one A100 at 45% MFU; an eighth of it on eight.
The learning rate is that of GPT-3 1.3B (its paper, table 2.1). Not run yet; tests run it on small models.
"""
out_dir = "out/gpt2_1b5"
dataset = "data/openwebtext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 48
n_head = 25
n_embd = 1600
norm = "layernorm"
position = "learned"
qk_norm = False
mlp = "gelu_tanh"
tied_head = True

parallel = "fsdp"
batch_size = 8
gradient_accumulation_steps = 64
max_steps = 60_000
optimizer = "adamw"
learning_rate = 2e-4
min_lr = 2e-5
warmup_steps = 1000
lr_schedule = "cosine"
weight_decay = 0.1

eval_interval = 1000
eval_tokens = 2_400_000
save_interval = 1000
