"""GRPO of a small model on six domains at once, on two cores: 180 steps of 288 completions, ten minutes.

    python grpo.py config/six_domains_cpu.py --init_from=out/domains/rft
    python grpo.py config/six_domains_cpu.py --init_from=out/domains/rft --surgery=pcgrad \\
        --out_dir=out/domains/pcgrad

runs/domains.sh runs the first command after the earlier stages; experiments/domains.py compares the two.
"""
init_from = "out/domains/rft"
out_dir = "out/domains/mixed"
task = "math:0+code:0+logic:0+simulation:0+table:0+science:0"
num_questions = 7200                     # 1,200 of each domain; 180 steps ask 1,080 of them
prompts_per_step = 36                    # six of each domain
max_new_tokens = 144

temperature = 1.0
learning_rate = 5e-4
lr_schedule = "linear"
warmup_steps = 10
max_steps = 180

eval_interval = 180                      # before and after
eval_questions = 300
