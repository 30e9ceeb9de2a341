"""A byte-level model that is chess's environment: from a position and a move to the new position, from scratch, on a CPU.

    python train.py config/chess_mini.py
    python eval.py out/chess_mini --task=chess_world:A --num_questions=1000 --max_new_tokens=120

804,224 parameters, 20,000 documents of 155 bytes, 4.4 epochs of them in 8.8 minutes: the exact FEN, reward and flags in 40.5% of 1,000 test
questions [37.5, 43.6] (seed 0, 2 Zen 5 cores, 2026-11-21).
"""
dataset = "task:chess_world:A"
out_dir = "out/chess_mini"
tokenizer = "bytes"
block_size = 384         # two documents and a half: at 256, more of them would be cut by a window's edge

n_layer = 4
n_head = 4               # several things to find at once: the square that the move leaves, the one it comes to, where the copy is
n_kv_head = 2
n_embd = 128

batch_size = 8           # as fast as 16 on one core, and steps are what it needs
max_steps = 4500
learning_rate = 0.01

eval_interval = 1500
save_interval = 500
log_interval = 100
