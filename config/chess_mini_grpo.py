"""Train the small chess environment of config/chess_mini.py further with GRPO on its graded rewards.

    python train.py config/chess_mini.py
    python grpo.py config/chess_mini_grpo.py
    python eval.py --compare out/chess_mini out/chess_mini_grpo --task=chess_world:A --num_questions=1000 \\
        --max_new_tokens=120

Exactly right on 1,000 test questions: from 40.5% to 43.8%, +3.3 [1.1, 5.5]; samples at T = 1 from 26.4% to
32.6%, +6.2 [4.7, 7.6] (seed 0, 2 Zen 5 cores, 2026-11-21).
"""
init_from = "out/chess_mini"
out_dir = "out/chess_mini_grpo"
task = "chess_world:A"

num_questions = 3000
max_new_tokens = 120

temperature = 1.2
learning_rate = 3e-4
lr_schedule = "linear"
warmup_steps = 10
max_steps = 100

eval_interval = 100                      # before and after
