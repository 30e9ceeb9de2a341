"""The run of six_domains_mixed.py, knob by knob, with gradient surgery: what the six domains' gradients undo of each other is taken out (PCGrad).

    torchrun --nproc_per_node=8 grpo.py config/six_domains_pcgrad.py

Six gradients of 1.5 billion numbers wait in bf16: 18.5 GB a card; in fp32 they would be 37, with --parallel=fsdp 4.6. Not run on a GPU yet.
"""
init_from = "Qwen/Qwen2.5-1.5B-Instruct"
out_dir = "out/six_domains_pcgrad"
task = {"gym:math": 1, "gym:code": 1, "gym:logic": 1, "gym:simulation": 1, "table:2": 1, "science:2": 1}
num_questions = 60_000

prompts_per_step = 128
k_samples = 4
max_prompt_tokens = 768                  # of which 256 are the question's; the rest shows the form
max_new_tokens = 512
few_shot = 2
tokens_per_micro_batch = 32768
max_steps = 1500

learning_rate = 1e-6
warmup_steps = 10
gradient_checkpointing = True
eval_interval = 100
eval_questions = 600
save_interval = 500

surgery = "pcgrad"
surgery_buffers = "bf16"
