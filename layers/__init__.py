"""Parts of model.py: kernels with hand-written backward passes, linear attention, LoRA adapters."""
