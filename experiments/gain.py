"""GRPO beside no training, a vote, random rewards and rejection sampling (docs/gain.md), on the quickstart's
fine-tuned model.

    bash runs/quickstart.sh
    python compare.py experiments/gain.py
"""
start = "out/quickstart/rft"
out_dir = "out/gain"
command = "grpo.py config/grpo.py --max_steps=50 --eval_interval=0"
controls = "start,again,placebo,rft"
questions = 200
seeds = 5
