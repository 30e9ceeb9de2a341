"""Fine-tune a model on its own verified solutions (rejection-sampling fine-tuning).

    python train.py config/rft.py --init_from=out/base --dataset=data/rft.json --out_dir=out/rft

Trains all weights of a small model; config/rft_smollm2_360m.py does the same to a larger one with LoRA.
"""
init_from = "out/base"
dataset = "data/rft.json"
out_dir = "out/rft"

batch_size = 32
gradient_accumulation_steps = 2          # 64 examples a step
num_epochs = 3
optimizer = "adamw"
learning_rate = 2e-3                     # for a million parameters; --learning_rate=none: by the model's size
lr_schedule = "cosine"
warmup_steps = None                      # a tenth of the steps, at most 50
log_interval = 10
keep_last = 3                            # one for each epoch
