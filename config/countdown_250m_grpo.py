"""GRPO of the 250M model on Countdown with one GPU, after config/countdown_250m.py.

    python grpo.py config/countdown_250m_grpo.py --init_from=out/countdown_250m_rft

The paper improves its model with STaR (three rounds of rejection sampling and fine-tuning) and APA (a policy
gradient with a critic); this uses GRPO instead, so the paper's 36% of formerly unsolved problems is only a
rough upper estimate. Not run.
"""
init_from = "out/countdown_250m_rft"
out_dir = "out/countdown_250m_grpo"
task = "countdown_search:4,99,1024"
num_questions = 40000

prompts_per_step = 64
k_samples = 8
max_new_tokens = 660     # the teachers' 1,024 bytes, at most
tokens_per_micro_batch = 16384
max_steps = 500

learning_rate = 1e-5
warmup_steps = 20
eval_interval = 50
save_interval = 100
