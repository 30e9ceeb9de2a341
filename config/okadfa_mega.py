"""The OKADFA guide's largest shape with all of its parts: kernel attention, feedback, orthogonality.

    python train.py config/okadfa_mega.py
    python train.py config/okadfa_mega.py --dataset=FOLDER       # your own text, or no network

772,865,792 parameters; 1966.1M tokens, 16.66 epochs of WikiText-103.
Memory, computed: 45.0 GiB at a micro-batch of 4, before compiling, which keeps less.
Time, computed: 1261 minutes on one A100, if it runs at 45% MFU.
The same steps as a100_mega.py's, the model to compare it with, in smaller micro-batches: random features are kept in fp32
for the backward pass. Expect a higher perplexity than without these parts (docs/okadfa.md). The guide expects one below 450.
Not run on a GPU yet.
"""
out_dir = "out/okadfa_mega"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 36
n_head = 20
n_embd = 1280
tied_head = True
dropout = 0.25

mixer = "favor"          # attention by positive random features, linear in the length
mixer_features = 256     # of each head
backward = "feedback"    # the error at the top drives each block through a fixed random matrix
orthogonality = 0.01     # of attention's projections
orthogonality_warmup = 1000

batch_size = 4
gradient_accumulation_steps = 16
max_steps = 30_000
patience = 6             # 3,000 steps, 1.7 epochs, without a better validation loss
optimizer = "muon"
learning_rate = 0.0015
warmup_steps = 600
lr_schedule = "linear"
weight_decay = 0.1

eval_interval = 500
save_interval = 500
