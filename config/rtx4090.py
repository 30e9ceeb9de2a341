"""config/a100_production.py for a card with 24 GB: the same steps, in smaller micro-batches.

    python train.py config/rtx4090.py

202,533,376 parameters; 409.6M tokens, 3.47 epochs of WikiText-103.
Memory, computed: 10.2 GiB at a micro-batch of 10 without torch.compile, which needs less.
Time, computed: 126 minutes on one RTX 4090 at 45% MFU.
Goal: a token perplexity of at most 22. Not run on a GPU yet.
"""
out_dir = "out/rtx4090"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 12
n_head = 16
n_embd = 1024
tied_head = True
dropout = 0.125          # for 3.5 epochs; cuDNN's attention requires a multiple of 1/16

batch_size = 10
gradient_accumulation_steps = 4
max_steps = 10_000
optimizer = "muon"
learning_rate = 0.003
warmup_steps = 200
lr_schedule = "wsd"
cooldown = 0.5
weight_decay = 0.1

eval_interval = 500
save_interval = 500
