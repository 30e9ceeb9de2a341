"""Countdown's GRPO over its fine-tuned model, and with the teachers' room instead of twice as much.

    bash runs/countdown.sh
    python compare.py experiments/countdown.py
"""
start = "out/countdown/rft"
out_dir = "out/countdown_compared"
command = "grpo.py config/countdown_grpo.py --eval_interval=0"
arms = {
    "the teachers' room": "--max_new_tokens=373",
    "one mini-batch": "--mini_batches=1",
}
controls = "start,again,placebo,rft"
rft = ("datagen.py --task=countdown_search --max_new_tokens=773 --temperature=1 --oversample=4 "
       "--keep_per_question=1 --stop_early && train.py config/countdown_rft.py")
