"""Other implementations for bench.py --peers: a plain training loop as in nanoGPT, transformers' generate and
Trainer, TRL's SFTTrainer and GRPOTrainer.

    python -m measure.peers JOB.json

runs one peer; its last line holds the seconds of its steps and its peak memory.
"""
import importlib.util
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import hub
import tasks
from measure.synthetic import GPT2
from runtime import hardware
from runtime.config import BadInput
from text import examples
from text.tokenizer import Tokenizer

TRANSFORMERS = ("transformers",)
TRAINER = ("transformers", "accelerate")
TRL = ("transformers", "trl")
# {stage: {peer: required packages}}
PEERS = {
    "train": {"nanogpt": (), "trainer": TRAINER},
    "sft": {"trainer": TRAINER, "trl": TRL},
    "generate": {"generate": TRANSFORMERS, "static": TRANSFORMERS},
    "datagen": {"generate_32": TRANSFORMERS, "generate_512": TRANSFORMERS},      # sequences at a time
    "grpo": {"trl_fp32": TRL, "trl_bf16": TRL},
}


def chosen(stage, asked):
    """Return the names of the peers to run. asked: False, True (all that are installed; the others are
    reported) or comma-separated names. Raises BadInput for an unknown name or one that is not installed."""
    if not asked:
        return []
    known = PEERS.get(stage, {})
    if not known:
        raise BadInput(f"--stage={stage} has no peers to compare with: leave --peers out.")
    names = list(known) if asked is True else asked.split(",")
    if not set(names) <= known.keys():
        raise BadInput(f"--peers={asked} is not known: choose from {', '.join(known)} for {stage}.")
    missing = {name: [p for p in known[name] if not importlib.util.find_spec(p)] for name in names}
    for name in names:
        if missing[name]:
            message = f"{name} is not installed: pip install {' '.join(missing[name])}, to compare with it."
            if asked is not True:
                raise BadInput(message)
            print(message)
    return [name for name in names if not missing[name]]


def import_transformers():
    """Import transformers and return it, with progress bars and warnings off."""
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


# --- sampling, in bench.py's own process ---

class Generate:
    """transformers' generate. name "static": with a static KV cache, for which transformers compiles the
    model on a GPU."""

    def __init__(self, folder, hw, name="generate"):
        transformers = import_transformers()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=hw.sampling_dtype)
        self.model = model.to(hw.device).eval()
        self.options = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        self.device = hw.device
        if name == "static":
            self.options["cache_implementation"] = "static"

    @torch.inference_mode()
    def sample(self, prompts, samples, new, pad=0, **options):
        """Sample at most `new` tokens of each completion, the prompts as one batch with padding on the left,
        and return the completions' ids with padding on the right, each prompt's samples in a row."""
        T = max(map(len, prompts))
        x = torch.tensor([[pad] * (T - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (T - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        out = self.model.generate(x, attention_mask=mask, num_return_sequences=samples, max_new_tokens=new,
                                  pad_token_id=pad, **self.options, **options)
        return out[:, T:].tolist()

    def run(self, prompts, samples, new):
        """Sample `new` tokens for every completion, and return the total number of tokens."""
        return sum(map(len, self.sample(prompts, samples, new, min_new_tokens=new, eos_token_id=None)))


def rejection_sampling(peer, tokenizer, task, questions, prompts, *, samples, new, at_once):
    """Sample with transformers' generate and return the number of verified completions. Each call generates
    at_once sequences of at most `new` tokens, up to the end-of-text token."""
    verified = 0
    per_call = max(1, at_once // samples)
    for first in range(0, len(prompts), per_call):
        group = prompts[first:first + per_call]
        completions = peer.sample(group, samples, new, tokenizer.pad, eos_token_id=tokenizer.stop)
        for i, ids in enumerate(completions):
            question = questions[first + i // samples]
            answer = task.cut(tokenizer.decode(ids))
            score, parts = task.reward(question, answer)
            verified += task.verified(score, parts)
    return verified


# --- peers in their own processes, with the TF32 setting of nanoRFT's runs ---
# Each takes the job that bench.py wrote and returns the seconds of its steps.

class PlainBlock(nn.Module):
    """A block of GPT-2."""

    def __init__(self, c):
        super().__init__()
        C = c["n_embd"]
        self.heads = c["n_head"]
        self.norm1 = nn.LayerNorm(C)
        self.norm2 = nn.LayerNorm(C)
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)
        self.up = nn.Linear(C, c["mlp_hidden"])
        self.down = nn.Linear(c["mlp_hidden"], C)

    def forward(self, h):                    # [B, T, C]
        qkv = self.qkv(self.norm1(h)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))


class PlainGPT(nn.Module):
    """A minimal GPT-2. c: GPTConfig's fields, as a dictionary."""

    def __init__(self, c):
        super().__init__()
        C = c["n_embd"]
        V = -(-c["vocab_size"] // 64) * 64
        self.tokens = nn.Embedding(V, C)
        self.positions = nn.Embedding(c["block_size"], C)
        self.blocks = nn.Sequential(*(PlainBlock(c) for _ in range(c["n_layer"])))
        self.norm = nn.LayerNorm(C)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, x, y):                 # [B, T] -> []
        positions = torch.arange(x.shape[1], device=x.device)
        h = self.tokens(x) + self.positions(positions)
        logits = F.linear(self.norm(self.blocks(h)), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))


def is_gpt2(c):
    """Return whether PlainGPT implements the architecture of these GPTConfig fields."""
    is_like_gpt2 = all(c.get(name) == value for name, value in GPT2.items())
    return is_like_gpt2 and c.get("n_kv_head") in (None, c["n_head"])


def windows(job):
    """Return a function that draws x, y [rows, T] at random offsets of train.bin, as nanoGPT does."""
    ids = np.memmap(Path(job["data"]) / "train.bin", np.uint16, mode="r")
    rng = np.random.default_rng(job["seed"])
    T = job["block_size"]

    def draw(rows):
        starts = rng.integers(0, len(ids) - T - 1, rows)
        batch = np.stack([ids[i:i + T + 1] for i in starts]).astype(np.int64)
        return torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:])
    return draw


def nanogpt(job, hw):
    """Train in eager mode with autocast, fused AdamW, gradient accumulation and clipping; batches are read
    from a memory-mapped file, without a loader."""
    model = PlainGPT(job["architecture"]).to(hw.device)
    draw = windows(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=hw.device.type != "mps")
    scaler = hw.scaler()
    seconds = []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        for _ in range(job["accumulation"]):
            x, y = (ids.to(hw.device, non_blocking=True) for ids in draw(job["batch_size"]))
            with hw.autocast():
                loss = model(x, y) / job["accumulation"]
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        loss.item()                          # synchronizes
        seconds.append(time.perf_counter() - start)
    return seconds


def step_clock(transformers, hw):
    """Return (a TrainerCallback that times steps, a function that returns their seconds)."""
    times = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            hw.wait()
            times.append(time.perf_counter())
        on_step_end = on_step_begin

    def seconds():
        return [end - start for start, end in zip(times[::2], times[1::2])]
    return Clock(), seconds


def common_options(job, hw, folder):
    """Return the options shared by all trainers, which write to `folder` within the job's."""
    return {
        "output_dir": f"{job['folder']}/{folder}",
        "max_steps": job["steps"],
        "optim": "adamw_torch_fused",
        "bf16": hw.dtype == "bf16",
        "fp16": hw.dtype == "fp16",
        "use_cpu": hw.device.type == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def training_rows(job):
    """Return rows {input_ids, labels}: random windows of a text, one for each sequence of the run, or the
    examples of job["data"] with the ids and labels that train.py uses, encoded by the tokenizer of
    job["source"], a model, or "" for bytes."""
    if Path(job["data"]).is_dir():
        x, _ = windows(job)(job["steps"] * job["batch_size"] * job["accumulation"])
        return [{"input_ids": ids, "labels": ids} for ids in x.tolist()]
    rows = []
    tokenizer = hub.find(job["source"]).tokenizer(None) if job["source"] else Tokenizer("bytes")
    for example in examples.read(job["data"], tokenizer):
        labels = [int(i) if is_trained else -100 for i, is_trained in zip(example.ids, example.is_target)]
        rows.append({"input_ids": example.ids.tolist(), "labels": labels})
    return rows


def collate(batch):
    """Return the tensors [B, T] of rows, padded on the right."""
    ids = [torch.tensor(row["input_ids"]) for row in batch]
    labels = [torch.tensor(row["labels"]) for row in batch]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def trainer(job, hw):
    """Train with transformers' Trainer, or with TRL's SFTTrainer if the peer is "trl"."""
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    adapters = lora_config(job)
    if adapters:
        from peft import get_peft_model
        model = get_peft_model(model, adapters)
    rows = training_rows(job)
    options = common_options(job, hw, "trainer") | {
        "per_device_train_batch_size": job["batch_size"],
        "gradient_accumulation_steps": job["accumulation"],
        "learning_rate": 1e-4,
        "lr_scheduler_type": "cosine",
        "logging_steps": 10,
        "remove_unused_columns": False,
    }
    clock, seconds = step_clock(transformers, hw)
    if job["peer"] == "trainer":
        args = transformers.TrainingArguments(**options)
        transformers.Trainer(model, args, collate, rows, callbacks=[clock]).train()
        return seconds()
    import tokenizers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    args = SFTConfig(**options, dataset_kwargs={"skip_prepare_dataset": True}, gradient_checkpointing=False)
    # SFTTrainer requires a tokenizer even for tokenized rows
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<e>": 0}, "<e>"))
    unused = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", pad_token="<e>")
    dataset = Dataset.from_list(rows)
    SFTTrainer(model, args, collate, dataset, callbacks=[clock], processing_class=unused).train()
    return seconds()


def lora_config(job):
    """Return PEFT's configuration of the job's adapters, on the same layers as nanoRFT's; None for rank 0."""
    rank = job["lora_rank"]
    if not rank:
        return None
    from peft import LoraConfig
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def grpo_trainer(job, hw):
    """Train with TRL's GRPOTrainer with grpo.py's default loss, clipping, groups and optimizer."""
    transformers = import_transformers()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    task = tasks.load(job["task"])
    lengths = set()                          # tokens of completions
    clock, seconds = step_clock(transformers, hw)

    def score(completions, completion_ids, question=None, **_):
        lengths.update(map(len, completion_ids))
        pairs = zip(question or [None] * len(completions), completions)
        return [task.reward(*pair)[0] for pair in pairs]
    options = common_options(job, hw, "trl") | {
        "per_device_train_batch_size": job["prompts"] * job["samples"],
        "num_generations": job["samples"],
        "max_completion_length": job["max_new_tokens"],
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "loss_type": "dapo",
        "scale_rewards": "none",
        "temperature": 1.0,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "logging_steps": 10**9,
        "seed": job["seed"],
    }
    args = GRPOConfig(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    dataset = Dataset.from_list(rows)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    GRPOTrainer(model, score, args, dataset, processing_class=tokenizer, callbacks=[clock],
                peft_config=lora_config(job)).train()
    expected = {job["max_new_tokens"]}
    assert job["source"] or lengths == expected, f"completions have {lengths} tokens instead of {expected}"
    return seconds()


PROCESS_PEERS = {
    "nanogpt": nanogpt,
    "trainer": trainer,
    "trl": trainer,
    "trl_fp32": grpo_trainer,
    "trl_bf16": grpo_trainer,
}


def main(path):
    """Run the peer of a job file, and print the seconds of its steps and its peak memory."""
    job = json.loads(Path(path).read_text())
    # A peer keeps PyTorch's defaults: nanoRFT's huge pages are its own.
    hw = hardware.setup(job["device"], job["dtype"], job["tf32"], compile=False, keep_memory=False)
    torch.manual_seed(job["seed"])
    seconds = PROCESS_PEERS[job["peer"]](job, hw)
    print(json.dumps({"seconds": seconds, "peak_memory_gb": hw.memory_gb()[1]}))


if __name__ == "__main__":
    main(sys.argv[1])
