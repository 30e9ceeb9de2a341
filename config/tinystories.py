"""A byte-level model of TinyStories on one GPU, scored in bits per byte, which compare across tokenizers.

    python train.py config/tinystories.py                          # downloads it from the Hugging Face hub
    python train.py config/tinystories.py --dataset=FOLDER         # with train.txt and valid.txt

14,409,088 parameters; 1048.6M tokens, about half of the text.
Memory, computed: 7.9 GiB at a micro-batch of 128 without torch.compile, which needs less.
Time, computed: 19.5 minutes on one A100 at 30% MFU.
Not run on a GPU yet. Published: 0.71 bits a byte with 55M parameters, 1.07 with 1.1M (docs/figures.json).
"""
out_dir = "out/tinystories"
dataset = "roneneldan/TinyStories"
tokenizer = "bytes"
block_size = 512         # most of a story of about 900 bytes

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
