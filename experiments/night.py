"""Changes of GRPO on the quickstart's fine-tuned model, for runs/referee.py (program.md).

    bash runs/quickstart.sh
    python compare.py experiments/night.py --out_dir=out/night_controls            # again must be a tie
    python -m runs.referee experiments/night.py --candidate=../night
"""
start = "out/quickstart/rft"
out_dir = "out/night"
command = "grpo.py config/grpo.py --max_steps=50 --eval_interval=0"
controls = "start,again,placebo"
budget = "seconds"
questions = 500
seeds = 10
