"""The OKADFA guide's recommended shape with all of its parts: kernel attention, feedback, orthogonality.

    python train.py config/okadfa_production.py
    python train.py config/okadfa_production.py --dataset=FOLDER       # your own text, or no network

202,729,984 parameters; 409.6M tokens, 3.47 epochs of WikiText-103.
Memory, computed: 26.5 GiB at a micro-batch of 10, before compiling, which keeps less.
Time, computed: 69 minutes on one A100, if it runs at 45% MFU.
The same steps as a100_production.py's, the model to compare it with, in smaller micro-batches: random features are kept in fp32
for the backward pass. Expect a higher perplexity than without these parts (docs/okadfa.md). The guide expects one below 600.
Not run on a GPU yet.
"""
out_dir = "out/okadfa_production"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 12
n_head = 16
n_embd = 1024
tied_head = True
dropout = 0.125          # three and a half epochs

mixer = "favor"          # attention by positive random features, linear in the length
mixer_features = 256     # of each head
backward = "feedback"    # the error at the top drives each block through a fixed random matrix
orthogonality = 0.01     # of attention's projections
orthogonality_warmup = 1000

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
