"""Objectives of GRPO on the quickstart's fine-tuned model: 100 rollouts of four mini-batches each.

    bash runs/quickstart.sh
    python compare.py experiments/objectives.py

With several optimizer steps a rollout, clipping and its variants have an effect. GSPO is not an option of
grpo.py: docs/edits/gspo.diff adds it to a copy.
"""
start = "out/quickstart/rft"
out_dir = "out/objectives"
command = "grpo.py config/grpo.py --mini_batches=4 --eval_interval=0"
arms = {
    "grpo": "--loss_type=grpo --advantage_scale=group --clip_high=0.2",
    "dr_grpo": "--loss_type=dr_grpo --clip_high=0.2",
    "cispo": "--loss_type=cispo --clip_high=4",
    "dynamic sampling": "--dynamic_sampling",
}
controls = "start,again,placebo"
seeds = 5
