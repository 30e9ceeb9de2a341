"""The answer to an option or a word that a script does not know. Options of other tools (nanoGPT, Trainer,
TRL, verl, vLLM, guides) are answered by their names here. Loaded when such a word was met."""
import difflib
import os
from functools import cache
from pathlib import Path

from runtime.help import sections_of

ROOT = Path(__file__).parents[1]
SCRIPTS = ("train", "grpo", "datagen", "eval", "sample")
DATA = (".json", ".jsonl", ".txt", ".csv", ".parquet")

# ours: theirs. Of several names of ours, the first that the script has is the answer.
OPTIONS = """
learning_rate: lr max_lr base_lr peak_lr initial_lr actor_lr policy_lr
lr_schedule: lr_scheduler_type lr_scheduler scheduler decay_lr lr_decay_style lr_decay_iters
warmup_steps: warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters warmup warmup_ratio
grad_clip: max_grad_norm gradient_clip_norm gradient_clip_val gradient_clipping clip_grad clip_grad_norm
max_steps: max_iters num_steps train_steps total_steps max_train_steps num_training_steps total_training_steps
num_epochs max_steps: num_train_epochs epochs n_epochs total_epochs max_epochs
inner_epochs: ppo_epochs num_ppo_epochs num_iterations update_epochs
mini_batches: ppo_mini_batch_size mini_batch_size num_mini_batches num_minibatches steps_per_generation
prompts_per_step batch_size slots: train_batch_size rollout_batch_size generation_batch_size global_batch_size
batch_size tokens_per_micro_batch slots: per_device_train_batch_size micro_batch_size device_batch_size \
    ppo_micro_batch_size_per_gpu per_device_eval_batch_size per_gpu_batch_size micro_batch
gradient_accumulation_steps tokens_per_micro_batch: grad_accum grad_accum_steps accumulate_grad_batches
block_size max_prompt_tokens max_new_tokens: max_seq_length max_seq_len seq_length seq_len sequence_length \
    max_length context_length context_size n_ctx max_position_embeddings max_model_len
max_new_tokens: max_completion_length max_response_length response_length max_tokens max_gen_len n_predict
n_layer: num_layers num_hidden_layers depth
n_head: num_heads num_attention_heads n_heads
n_kv_head: num_key_value_heads num_kv_heads n_kv_heads
n_embd: d_model hidden_size hidden_dim embed_dim n_embed model_dim dim
mlp_hidden: intermediate_size d_ff ffn_dim dim_feedforward
tied_head: tie_word_embeddings tie_embeddings weight_tying
dtype=auto: mixed_precision use_amp amp amp_dtype precision torch_dtype
dtype=bf16: bf16 bfloat16 use_bf16
dtype=fp16: fp16 float16 half fp16_opt_level
out_dir output: output_dir checkpoint_dir checkpoint_path save_dir save_path ckpt_dir logging_dir log_dir
init_from start model models run: model_name_or_path model_name pretrained_model_name_or_path base_model
resume=auto: resume_from_checkpoint resume_from auto_resume resume_training resume_mode
dataset task: dataset_name train_files train_file data_path data train_data dataset_path data_files
task: reward_funcs reward_fn reward_function reward_model custom_reward_function env environment verifier
k_samples oversample num_samples: num_generations num_return_sequences group_size n best_of n_samples
num_questions: max_train_samples max_samples max_eval_samples limit num_prompts
beta: kl_coef kl_coeff kl_loss_coef init_kl_coef kl_penalty use_kl_loss kl_weight
clip_low: clip_ratio cliprange epsilon clip_eps clip_range clip_ratio_low
clip_high: epsilon_high clip_ratio_high
advantage_scale: scale_rewards norm_adv_by_std_in_grpo normalize_advantage whiten_rewards
overlong=mask: mask_truncated_completions
teacher: ref_model ref_model_path teacher_model teacher_model_name_or_path
reward_pool=process reward_workers: parallel_rewards
log_interval: logging_steps log_every log_freq log_every_n_steps logging_interval
save_interval: save_steps save_freq save_every checkpoint_interval checkpointing_steps save_strategy
keep_last: save_total_limit max_ckpt_to_keep
eval_interval: eval_steps test_freq eval_every eval_freq val_interval val_check_interval eval_strategy
eval_tokens eval_questions: eval_iters val_batches eval_samples
gradient_checkpointing: activation_checkpointing enable_gradient_checkpointing use_checkpoint
attention=flash: attn_implementation flash_attn flash_attention use_flash_attention use_flash_attn
lora_rank: lora_r use_lora use_peft lora
parallel=fsdp: fsdp use_fsdp strategy deepspeed zero_stage
surgery=pcgrad: pcgrad use_pcgrad gradient_surgery
wandb: report_to use_wandb wandb_log
"""
SENTENCES = {
    "torchrun --nproc_per_node=N runs a script on N GPUs": "use_ddp ddp num_gpus gpus world_size local_rank "
        "nproc_per_node n_gpus_per_node nnodes num_processes tensor_parallel_size tensor_model_parallel_size",
    "config files are given alone, as in python SCRIPT.py FILE.py": "config config_file config_path cfg",
    "samples come from engine/, which takes the memory that is free": "use_vllm vllm_mode max_num_seqs "
        "gpu_memory_utilization vllm_gpu_memory_utilization enforce_eager",
    "datagen.py and compare.py resume when their command is repeated": "resume resume_from_checkpoint",
    "weights are not quantised here": "load_in_4bit load_in_8bit quantization use_qlora qlora",
    "GRPO has no critic, since the mean of a group is its baseline": "critic vf_coef gae_lambda lam gamma",
    "no loss has an entropy bonus": "ent_coef entropy_coef entropy_coeff entropy_bonus",
}


def answer_to_option(key, source, fields):
    """Return the sentence for an option that is not in `fields`, {name: field of a Config}. source: the flag,
    or the file and the name."""
    dashes = "--" if source.startswith("--") else ""
    name = key.rpartition(".")[2].replace("-", "_").lower()      # verl's keys have dots
    ours = [name] if name in fields else names_here(name)       # --max-new-tokens
    for option in ours:
        field = fields.get(option.partition("=")[0])
        if field:
            is_default = option == f"{field.name}={field.default}"
            return f"{source} is not an option: use {dashes}{option}{', which is the default' * is_default}."
    for sentence, theirs in SENTENCES.items():
        if name in theirs.split():
            return f"{source} is not an option: {sentence}."
    for option in [name, *ours]:
        plain = option.partition("=")[0]
        *others, last = [f"{script}.py" for script in SCRIPTS if plain in options_of(script)] or [None]
        if last:
            who = f"{', '.join(others)} and {last} have" if others else f"{last} has"
            return f"{source} is not an option here: {who} --{option}."
    near = difflib.get_close_matches(name, fields, n=1)
    return f"{source} is not an option{f'; did you mean {near[0]}?' if near else '; --help lists them all.'}"


def names_here(name):
    """Return the options that mean what another tool's does, or another script's of ours; [] if none do."""
    for line in OPTIONS.strip().splitlines():
        ours, theirs = (half.split() for half in line.split(":"))
        if name in theirs or name in [option.partition("=")[0] for option in ours]:
            return ours
    return []


@cache
def options_of(script):
    sections = sections_of((ROOT / f"{script}.py").read_text(encoding="utf-8"))
    return {option.name for options in sections.values() for option in options}


def answer_to_word(word, fields):
    """Return the sentence for a word that is neither a config file nor a flag. fields: of the script."""
    path = Path(word)
    is_model = path.suffix == ".gguf" or os.path.exists(path / "config.json")
    wanted = ["init_from", "start"] if is_model else ["dataset", "output"] if path.suffix in DATA else []
    for option in wanted:
        if option in fields:
            return f"'{word}' is not a config file, which ends in .py: write --{option}={word}."
    return f"'{word}' is neither a config file (ending in .py) nor a flag of the form --key=value."
