"""A character-level model of a small text on a laptop's CPU, in seconds.

    python train.py config/cpu_small.py --dataset=input.txt

609,024 parameters. Reaches the 1.886 nats a character of nanoGPT's CPU recipe on tinyshakespeare (4 layers,
128 wide, 2,000 steps of 12 x 64) after 230k instead of 1.5M characters: rotary positions and Muon save most
of the steps, bf16 and few large operations the rest. Times: docs/benchmarks.md.
"""
out_dir = "out/cpu_small"
tokenizer = "bytes"
block_size = 64

n_layer = 4
n_head = 2               # two heads of 64 are cheaper than four of 32 at the same loss (docs/notes.md)
n_embd = 128
mlp_hidden = 256         # half the usual width: faster, and no worse at equal steps (docs/notes.md)
norm = "layernorm"       # unlike RMSNorm, has fused CPU kernels for forward and backward

batch_size = 24
max_steps = 150
learning_rate = 0.02
warmup_steps = 3
lr_schedule = "wsd"
cooldown = 0.5
optimizer = "muon"
muon_momentum = 0.9

eval_interval = 1000     # only at the end: a pass over the validation text takes as long as many steps
save_interval = 1000
log_interval = 25
