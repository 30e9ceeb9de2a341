"""tinyshakespeare character by character on two CPU cores, as far as nanoGPT comes on an A100.

    python train.py config/shakespeare.py --dataset=input.txt

4,890,624 parameters, half of nanoGPT's, and 7.8 passes over the text where it takes 82. Three seeds
end at 1.420 to 1.435 nats a character, where nanoGPT publishes 1.4697, in twelve minutes on two Zen 5 cores
(2026-11-24; docs/benchmarks.md, "As far as nanoGPT comes on a GPU").
"""
out_dir = "out/shakespeare"
tokenizer = "bytes"
block_size = 512         # twice nanoGPT's context

n_layer = 6
n_head = 2               # of 128 channels: fewer take less time
n_embd = 256
norm = "layernorm"       # for which PyTorch has a CPU kernel of its own, both ways

batch_size = 8
max_steps = 1900         # 7.8M characters, 7.8 passes over the text
learning_rate = 0.01
warmup_steps = 20
lr_schedule = "wsd"
cooldown = 0.5
optimizer = "muon"
muon_momentum = 0.9
weight_decay = 0.1
dropout = 0.1

eval_interval = 10_000   # once, at the end: the validation text is touched no earlier
save_interval = 200
log_interval = 10
