"""The run of six_domains_mixed.py with gradient surgery: what the six domains' gradients undo of each other is taken out (PCGrad).

    torchrun --nproc_per_node=8 grpo.py config/six_domains_pcgrad.py

Six gradients of 1.5 billion numbers wait in bf16: 18.5 GB a card; in fp32 they would be 37, with --parallel=fsdp 4.6. Not run on a GPU yet.
"""
from config.six_domains_mixed import *

out_dir = "out/six_domains_pcgrad"
surgery = "pcgrad"
surgery_buffers = "bf16"
