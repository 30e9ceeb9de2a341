"""A model of WikiText-103 at GPT-2 medium's size on one A100, in about six hours.

    python train.py config/a100_max.py

353,554,432 parameters; 1310.7M tokens, 11.11 epochs of WikiText-103.
Memory, computed: 23.6 GiB at a micro-batch of 16 without torch.compile, which needs less.
Time, computed: 377 minutes on one A100 at 45% MFU.
Goal: below a100_production's perplexity; eleven epochs overfit: dropout and patience. Not run on a GPU yet.
The guide with this shape calls it 355M and expects 8 hours, 55 GB, and a token perplexity below 500.
"""
out_dir = "out/a100_max"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 24
n_head = 16
n_embd = 1024
tied_head = True
dropout = 0.1875         # a multiple of 1/16, as cuDNN's attention requires

batch_size = 16
gradient_accumulation_steps = 4
max_steps = 20_000
patience = 6             # 3,000 steps, 1.7 epochs, without a better validation loss
optimizer = "muon"
learning_rate = 0.002
warmup_steps = 400
lr_schedule = "linear"   # patience may end the run at any step, so the rate falls throughout
weight_decay = 0.1

eval_interval = 500
save_interval = 500
