"""A known gain and a known loss: sampling at 1.3 instead of 1.0, and ten times the learning rate.

    bash runs/quickstart.sh
    python compare.py experiments/temperature.py
"""
start = "out/quickstart/rft"
out_dir = "out/temperature"
command = "grpo.py config/grpo.py --max_steps=50 --temperature=1 --eval_interval=0"
arms = {
    "temperature 1.3": "--temperature=1.3",
    "rate x 10": "--learning_rate=5e-3",
}
controls = "start,again,placebo"
