"""GPT-2 small with nanoGPT's shape, recipe and data, to compare speed and loss step by step.

    python train.py config/gpt2_124m.py --dataset=nanoGPT/data/openwebtext      # with train.bin and val.bin
    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py --dataset=...

124,392,960 parameters; 294912.0M tokens.
Memory, computed: 7.5 GiB at a micro-batch of 12 without torch.compile, which needs less.
Time, computed: 30099 minutes on one A100 at 45% MFU; an eighth of it on eight.
nanoGPT's README reports a loss of about 2.85 after four days on eight A100s. Timed on an H100 (G1).
"""
out_dir = "out/gpt2_124m"
dataset = "data/openwebtext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 768
norm = "layernorm"       # with biases, unlike nanoGPT's default: 19,200 more weights
position = "learned"
qk_norm = False
mlp = "gelu"
tied_head = True

batch_size = 12
gradient_accumulation_steps = 40
max_steps = 600_000
optimizer = "adamw"
learning_rate = 6e-4
min_lr = 6e-5
warmup_steps = 2000
lr_schedule = "cosine"
weight_decay = 0.1

eval_interval = 1000
eval_tokens = 2_400_000
save_interval = 1000
