"""The parts of OKADFA in the quickstart's base model, for the seconds of its 300 steps (docs/okadfa.md).

    python compare.py experiments/okadfa.py

Each run trains from scratch; the start is an untrained model of one step.
"""
start_command = "train.py config/quickstart.py --max_steps=1"
out_dir = "out/okadfa_compared"
command = "train.py config/quickstart.py --init_from=scratch --max_steps=300"
arms = {
    "elu": "--mixer=linear",
    "elu, delta rule": "--mixer=linear --mixer_rule=delta",
    "favor": "--mixer=favor",
    "feedback": "--backward=feedback",
    "last block alone": "--trained_blocks=last",
    "orthogonality": "--orthogonality=0.01 --orthogonality_warmup=100",
}
budget = "seconds"
controls = "again"
max_new_tokens = 144
