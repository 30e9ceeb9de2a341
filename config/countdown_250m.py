"""Countdown at the paper's size on one GPU: a 250M model of searches (Stream of Search, Gandhi et al. 2024,
arXiv 2404.03683).

    python train.py config/countdown_250m.py
    python datagen.py --init_from=out/countdown_250m --task=countdown_search:4,99,1024 ...
    python train.py config/countdown_rft.py --init_from=out/countdown_250m --learning_rate=2e-5 ...
    python grpo.py config/countdown_250m_grpo.py --init_from=out/countdown_250m_rft

253,954,048 parameters; 1048.6M tokens.
Memory, computed: 24.6 GiB at a micro-batch of 32 without torch.compile, which needs less.
Time, computed: 214 minutes on one A100 at 45% MFU.

The paper's shape and tokenizer (GPT-Neo: 16 layers, 16 heads, 1,024 channels, GPT-2's tokens) and its 500,000
searches of four numbers. A context of 1,024 tokens holds as much as the paper's 4,096, since a search step
here is an equation instead of a sentence; the task's 1,024 are bytes, at most 663 tokens. The paper reports
that on held-out numbers a model trained on searches solves 51.27%, one trained on solutions alone 25.73%;
after STaR and APA the former solves 36% of the problems that it could not solve before. Its numbers, teachers
and budgets differ, so expect that order, not those figures. Not run.
"""
dataset = "task:countdown_search:4,99,1024,500000"
out_dir = "out/countdown_250m"
tokenizer = "gpt2"
block_size = 1024

n_layer = 16
n_head = 16
n_embd = 1024
norm = "layernorm"
position = "learned"
qk_norm = False
mlp = "gelu_tanh"
tied_head = True

batch_size = 32
gradient_accumulation_steps = 8          # 262,144 tokens a step
max_steps = 4000
optimizer = "adamw"
learning_rate = 3e-4
min_lr = 3e-5
warmup_steps = 200
lr_schedule = "cosine"
weight_decay = 0.01
dropout = 0.1

eval_interval = 250
save_interval = 500
