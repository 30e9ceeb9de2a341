"""A model of WikiText-103 at GPT-2 large's size on one A100, in a day or until it stops improving.

    python train.py config/a100_mega.py
    torchrun --nproc_per_node=8 train.py config/a100_mega.py    # the same run on eight

772,275,968 parameters; 1966.1M tokens, 16.66 epochs of WikiText-103.
Memory, computed: 28.2 GiB at a micro-batch of 8 without torch.compile, which needs less.
Time, computed: 1214 minutes on one A100 at 45% MFU.
Goal: below a100_max's perplexity, if regularisation suffices. Not run on a GPU yet.
The guide with this shape calls it 750M and expects 12 hours, 70 GB, and a token perplexity below 450; at an
A100's peak of 312 TFLOP/s the arithmetic alone takes nine hours.
"""
out_dir = "out/a100_mega"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 36
n_head = 20
n_embd = 1280
tied_head = True
dropout = 0.25

batch_size = 8
gradient_accumulation_steps = 8
max_steps = 30_000
patience = 6             # 3,000 steps, 1.7 epochs, without a better validation loss
optimizer = "muon"
learning_rate = 0.0015
warmup_steps = 600
lr_schedule = "linear"
weight_decay = 0.1

eval_interval = 500
save_interval = 500
