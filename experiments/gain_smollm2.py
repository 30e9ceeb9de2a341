"""The controls of docs/compare.md on SmolLM2-135M-Instruct after 512 worked examples (docs/gain.md).

    bash runs/smollm2.sh && python compare.py experiments/gain_smollm2.py
"""
start = "out/smollm2/sft"
out_dir = "out/gain_smollm2"
command = ("grpo.py --task=unit_conversion --max_new_tokens=80 --lora_rank=16 --prompts_per_step=12 "
           "--k_samples=8 --learning_rate=3e-4 --lr_schedule=linear --temperature=1.2 --max_steps=8 "
           "--eval_interval=0")
controls = "start,again,placebo,rft"
rft = ("datagen.py --task=unit_conversion --max_new_tokens=80 --temperature=0.8 --oversample=5 "
       "--keep_per_question=1 --stop_early && train.py --lora_rank=16 --compile=false --optimizer=adamw "
       "--batch_size=8 --num_epochs=1 --block_size=256 --learning_rate=5e-4 --lr_schedule=cosine "
       "--warmup_steps=5")
questions = 120
num_samples = 4
seeds = 3
