"""A byte-level model of chess as an environment (position, move -> new position), from scratch on a CPU.

    python train.py config/chess_mini.py
    python eval.py out/chess_mini --task=chess_world:A --num_questions=1000 --max_new_tokens=120

804,224 parameters, 20,000 documents of 155 bytes, 4.4 epochs in 8.8 minutes: exact FEN, reward and flags in
40.5% [37.5, 43.6] of 1,000 test questions (seed 0, 2 Zen 5 cores, 2026-11-21).
"""
dataset = "task:chess_world:A"
out_dir = "out/chess_mini"
tokenizer = "bytes"
block_size = 384         # 2.5 documents: at 256, windows would cut more of them

n_layer = 4
n_head = 4               # several lookups at once: source square, target square, position in the copy
n_kv_head = 2
n_embd = 128

batch_size = 8           # as fast as 16 on one core, and the model needs many steps
max_steps = 4500
learning_rate = 0.01

eval_interval = 1500
save_interval = 500
log_interval = 100
