"""A model of WikiText-103 at GPT-2 small's size on one A100, for experiments.

    python train.py config/a100_fast.py
    python train.py config/a100_fast.py --dataset=FOLDER        # your own text, or no network

123,588,864 parameters; 98.3M tokens, 0.83 epochs of WikiText-103.
Memory, computed: 15.1 GiB at a micro-batch of 32 without torch.compile, which needs less.
Time, computed: 10 minutes on one A100 at 45% MFU.
Goal: a token perplexity of at most 40. Not run on a GPU yet.
The guide with this shape calls it 85M and expects 45 minutes, 20 GB, and a token perplexity below 800.
"""
out_dir = "out/a100_fast"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 768
tied_head = True         # 39M weights less to learn from 118M tokens

batch_size = 32
max_steps = 3000
optimizer = "muon"
learning_rate = 0.004    # chosen as docs/notes.md describes
warmup_steps = 100
lr_schedule = "wsd"
cooldown = 0.5
weight_decay = 0.1       # no dropout: nothing is seen twice

eval_interval = 250
save_interval = 500
