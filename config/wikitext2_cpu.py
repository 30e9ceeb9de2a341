"""WikiText-2 with GPT-2's tokenizer on a laptop's CPU, in twenty minutes.

    python train.py config/wikitext2_cpu.py --dataset=folder      # a folder with train.txt and valid.txt

17.6M parameters, of which 12.9M are the embedding that the head shares: with 50,257 ids the head is three quarters of the
arithmetic. 1,000 steps see 4.1M tokens, 1.7 epochs.
"""
out_dir = "out/wikitext2"
tokenizer = "gpt2"
block_size = 256

n_layer = 6
n_head = 4
n_embd = 256
tied_head = True         # 100 steps: 164 perplexity a token with, 168 without

batch_size = 16
max_steps = 1000
learning_rate = 0.01
warmup_steps = 20
lr_schedule = "wsd"
cooldown = 0.5
optimizer = "muon"
weight_decay = 0.1

eval_interval = 350      # a pass over the validation text takes half a minute
save_interval = 350
log_interval = 20
