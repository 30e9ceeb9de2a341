"""Fine-tune SmolLM2-360M on its own verified solutions with LoRA, as in the guides.

    python datagen.py --init_from=HuggingFaceTB/SmolLM2-360M-Instruct --task=unit_conversion:3
    python train.py config/rft_smollm2_360m.py
    python eval.py --compare HuggingFaceTB/SmolLM2-360M-Instruct out/rft_smollm2_360m \\
        --task=unit_conversion:3 --few_shot=0

64 examples a step: micro-batches of 32 and a learning rate of 6e-4 on a card with 70 GB or more,
micro-batches of 16 and 2e-4 elsewhere. A micro-batch that does not fit is halved before the first step.
"""
import torch

init_from = "HuggingFaceTB/SmolLM2-360M-Instruct"
dataset = "data/rft.json"
out_dir = "out/rft_smollm2_360m"
block_size = 512

lora_rank = 16
_large = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 70e9
batch_size = 32 if _large else 16
gradient_accumulation_steps = 2 if _large else 4
learning_rate = 6e-4 if _large else 2e-4
num_epochs = 3
optimizer = "adamw"
lr_schedule = "cosine"
warmup_steps = None                      # a tenth of the steps, at most 50
gradient_checkpointing = False           # True saves memory at the cost of a second forward pass
save_only_model = False                  # True: adapters only, without the state to resume from
keep_last = 3                            # one for each epoch
log_interval = 10
