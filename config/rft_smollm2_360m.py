"""SmolLM2-360M learns from its own verified solutions, with LoRA: the job of the guides that this project comes from.

    python datagen.py --init_from=HuggingFaceTB/SmolLM2-360M-Instruct --task=unit_conversion:3
    python train.py config/rft_smollm2_360m.py
    python eval.py --compare HuggingFaceTB/SmolLM2-360M-Instruct out/rft_smollm2_360m --task=unit_conversion:3

64 examples a step wherever it runs: 32 at a time with a learning rate of 6e-4 on a card of 70 GB or more (an A100 80 GB, H100, H200), 16
at a time with 2e-4 elsewhere, as in the guides. If 16 don't fit, they are halved before the first step.
"""
import torch

init_from = "HuggingFaceTB/SmolLM2-360M-Instruct"
dataset = "data/rft.json"
out_dir = "out/rft_smollm2_360m"
block_size = 512

lora_rank = 16
_large = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 70e9
batch_size, gradient_accumulation_steps = (32, 2) if _large else (16, 4)
learning_rate = 6e-4 if _large else 2e-4
num_epochs = 3
optimizer = "adamw"
lr_schedule = "cosine"
warmup_steps = None                      # a tenth of the steps, at most 50
gradient_checkpointing = False           # true if memory is short: a second forward pass for one tensor a block
save_only_model = False                  # true: adapters alone, without what resuming needs
keep_last = 3                            # one for each epoch
log_interval = 10
