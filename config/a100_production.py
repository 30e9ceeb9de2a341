"""A 200M-parameter model of WikiText-103 on one A100, in about an hour.

    python train.py config/a100_production.py

202,533,376 parameters; 409.6M tokens, 3.47 epochs of WikiText-103.
Memory, computed: 15.4 GiB at a micro-batch of 20 without torch.compile, which needs less.
Time, computed: 66 minutes on one A100 at 45% MFU.
Goal: a token perplexity of at most 22. Not run on a GPU yet.
The guide with this shape calls it 175M and expects 3 hours, 35 GB, and a token perplexity below 600.
"""
out_dir = "out/a100_production"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 12
n_head = 16
n_embd = 1024
tied_head = True
dropout = 0.125          # for 3.5 epochs; cuDNN's attention requires a multiple of 1/16

batch_size = 20
gradient_accumulation_steps = 2
max_steps = 10_000
optimizer = "muon"
learning_rate = 0.003
warmup_steps = 200
lr_schedule = "wsd"
cooldown = 0.5
weight_decay = 0.1

eval_interval = 500
save_interval = 500
