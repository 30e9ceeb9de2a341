"""The controls of docs/compare.md on Countdown with three numbers (docs/gain.md).

    bash runs/countdown.sh --task=countdown_search:3,20,200 --out_dir=out/countdown3
    python compare.py experiments/gain_countdown.py
"""
start = "out/countdown3/rft"
out_dir = "out/gain_countdown"
command = ("grpo.py config/countdown_grpo.py --task=countdown_search:3,20,200 --max_new_tokens=373 "
           "--max_steps=30 --num_questions=960 --eval_interval=0")
controls = "start,again,placebo,rft"
rft = ("datagen.py --task=countdown_search:3,20,200 --max_new_tokens=373 --temperature=1 --oversample=8 "
       "--keep_per_question=1 --stop_early && train.py config/countdown_rft.py")
questions = 200
seeds = 5
