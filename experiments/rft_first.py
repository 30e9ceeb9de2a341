"""Rejection sampling and fine-tuning before GRPO, beside GRPO alone for the same seconds: a tie
(docs/notes.md).

    bash runs/quickstart.sh
    python compare.py experiments/rft_first.py
"""
start = "out/quickstart/base"
out_dir = "out/rft_first"
command = "grpo.py config/grpo.py --max_steps=40 --eval_interval=0"
arms = {
    "RFT first": "datagen.py --task=unit_conversion --max_new_tokens=144 --temperature=1 --oversample=8 "
                 "--keep_per_question=1 --stop_early && train.py config/rft.py --num_epochs=1.5 && "
                 "grpo.py config/grpo.py --max_steps=10 --eval_interval=0",
}
controls = "start,again"
budget = "seconds"
questions = 200
