"""The OKADFA guide's third shape with all of its parts: kernel attention, feedback, orthogonality.

    python train.py config/okadfa_max.py
    python train.py config/okadfa_max.py --dataset=FOLDER       # your own text, or no network

353,947,648 parameters; 1310.7M tokens, 11.11 epochs of WikiText-103.
Memory, computed: 41.3 GiB at a micro-batch of 8, before compiling, which keeps less.
Time, computed: 392 minutes on one A100, if it runs at 45% MFU.
The same steps as a100_max.py's, the model to compare it with, in smaller micro-batches: random features are kept in fp32
for the backward pass. Expect a higher perplexity than without these parts (docs/okadfa.md). The guide expects one below 500.
Not run on a GPU yet.
"""
out_dir = "out/okadfa_max"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 24
n_head = 16
n_embd = 1024
tied_head = True
dropout = 0.1875

mixer = "favor"          # attention by positive random features, linear in the length
mixer_features = 256     # of each head
backward = "feedback"    # the error at the top drives each block through a fixed random matrix
orthogonality = 0.01     # of attention's projections
orthogonality_warmup = 1000

batch_size = 8
gradient_accumulation_steps = 8
max_steps = 20_000
patience = 6             # 3,000 steps, 1.7 epochs, without a better validation loss
optimizer = "muon"
learning_rate = 0.002
warmup_steps = 400
lr_schedule = "linear"   # the run may end anywhere, so the rate falls all the way
weight_decay = 0.1

eval_interval = 500
save_interval = 500
