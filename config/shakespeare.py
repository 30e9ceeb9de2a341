"""Character-level tinyshakespeare on two CPU cores, at the loss of nanoGPT's GPU recipe.

    python train.py config/shakespeare.py --dataset=input.txt

4,890,624 parameters, half of nanoGPT's, and 7.8 epochs instead of 82. Three seeds end at 1.420 to 1.435 nats
a character, against nanoGPT's published 1.4697, in twelve minutes on two Zen 5 cores (2026-11-24;
docs/benchmarks.md).
"""
out_dir = "out/shakespeare"
tokenizer = "bytes"
block_size = 512         # twice nanoGPT's context

n_layer = 6
n_head = 2               # of 128 channels: fewer heads are faster
n_embd = 256
norm = "layernorm"       # unlike RMSNorm, has fused CPU kernels for forward and backward

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

eval_interval = 10_000   # only at the end: nothing is selected on the validation text
save_interval = 200
log_interval = 10
