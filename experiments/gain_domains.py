"""The controls of docs/compare.md on six domains at once: GRPO beside no training, a vote, random rewards,
and rejection sampling for the same seconds (docs/gain.md).

    bash runs/domains.sh
    python compare.py experiments/gain_domains.py
"""
start = "out/domains/rft"
out_dir = "out/gain_domains"
command = "grpo.py config/six_domains_cpu.py --max_steps=30 --eval_interval=0"
controls = "start,again,placebo,rft"
rft = ("datagen.py --task=math:0+code:0+logic:0+simulation:0+table:0+science:0 --max_new_tokens=144 "
       "--temperature=1 --oversample=8 --keep_per_question=1 --stop_early && "
       "train.py config/rft.py --num_epochs=1.5")
questions = 300
seeds = 5
