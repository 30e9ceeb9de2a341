"""The smallest shape of the OKADFA guide with all of its parts: kernel attention, feedback, orthogonality.

    python train.py config/okadfa_fast.py
    python train.py config/okadfa_fast.py --dataset=FOLDER       # your own text, or no network

123,785,472 parameters; 98.3M tokens, 0.83 epochs of WikiText-103.
Memory, computed: 28.9 GiB at a micro-batch of 16, before compiling, which keeps less.
Time, computed: 10.3 minutes on one A100, if it runs at 45% MFU.
The same steps as a100_fast.py's, the model to compare it with, in smaller micro-batches: random features are kept in fp32
for the backward pass. Expect a higher perplexity than without these parts (docs/okadfa.md). The guide expects one below 800.
Not run on a GPU yet.
"""
out_dir = "out/okadfa_fast"
dataset = "wikitext"
tokenizer = "gpt2"
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 768
tied_head = True         # 39M weights less to learn from 118M tokens

mixer = "favor"          # attention by positive random features, linear in the length
mixer_features = 256     # of each head
backward = "feedback"    # the error at the top drives each block through a fixed random matrix
orthogonality = 0.01     # of attention's projections
orthogonality_warmup = 1000

batch_size = 16
gradient_accumulation_steps = 2
max_steps = 3000
optimizer = "muon"
learning_rate = 0.004    # a100_fast.py's; not tuned for feedback
warmup_steps = 100
lr_schedule = "wsd"
cooldown = 0.5
weight_decay = 0.1       # no dropout: nothing is seen twice

eval_interval = 250
save_interval = 500
