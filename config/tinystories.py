"""A byte-level model of TinyStories on one GPU, scored in bits per byte, so that no tokenizer is in the way.

    python train.py config/tinystories.py                          # the text comes from the Hugging Face hub
    python train.py config/tinystories.py --dataset=FOLDER         # with train.txt and valid.txt

14,409,088 parameters; 1048.6M tokens, about half of the text.
Memory, computed: 7.9 GiB at a micro-batch of 128, before compiling, which keeps less.
Time, computed: 19.5 minutes on one A100, if it runs at 30% MFU.
Not run on a GPU yet. docs/benchmarks.md has others' figures: 0.71 bits a byte with 55M parameters, 1.07 with 1.1M.
"""
out_dir = "out/tinystories"
dataset = "roneneldan/TinyStories"
tokenizer = "bytes"
block_size = 512         # most of a story, which has some 900 bytes

n_layer = 8
n_head = 6
n_embd = 384

batch_size = 128
max_steps = 16_000
optimizer = "muon"
learning_rate = 0.005
warmup_steps = 100
lr_schedule = "wsd"
cooldown = 0.5
weight_decay = 0.1       # no dropout: nothing is seen twice

eval_interval = 1000
eval_tokens = 2_000_000
save_interval = 1000
