"""config/a100_fast.py for a free notebook's T4 (16 GB, no bf16): fp16, loss scaling, smaller micro-batches.

    python train.py config/t4_fp16.py

123,588,864 parameters; 98.3M tokens, 0.83 epochs of WikiText-103.
Memory, computed: 7.0 GiB at a micro-batch of 8 without torch.compile, which needs less.
Time, computed: 97 minutes on one T4 at 22% MFU: its memory is slow for its tensor cores.
Goal: a token perplexity of at most 40. Not run on a GPU yet.
"""
out_dir = "out/t4_fp16"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 768
tied_head = True         # 39M weights less to learn from 118M tokens

dtype = "fp16"
batch_size = 8
gradient_accumulation_steps = 4
max_steps = 3000
optimizer = "muon"
learning_rate = 0.004    # chosen as docs/notes.md describes
warmup_steps = 100
lr_schedule = "wsd"
cooldown = 0.5
weight_decay = 0.1       # no dropout: nothing is seen twice

eval_interval = 250
save_interval = 100      # free machines may be reclaimed
