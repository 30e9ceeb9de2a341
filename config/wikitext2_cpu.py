"""WikiText-2 with GPT-2's tokenizer on a CPU: 16 minutes on two Zen 5 cores.

    python train.py config/wikitext2_cpu.py --dataset=folder      # a folder with train.txt and valid.txt

17,600,512 parameters, 12.9M of them in the tied embedding: with 50,257 ids the head is three quarters of the
arithmetic. 850 steps see 3.5M tokens, 1.4 epochs.
"""
out_dir = "out/wikitext2"
tokenizer = "gpt2"
block_size = 256

n_layer = 6
n_head = 4
n_embd = 256
tied_head = True

batch_size = 16
max_steps = 850
learning_rate = 0.01
warmup_steps = 20
lr_schedule = "wsd"
cooldown = 0.5
optimizer = "muon"
weight_decay = 0.1

eval_interval = 425      # a pass over the validation text takes some twenty seconds
save_interval = 425
log_interval = 20
