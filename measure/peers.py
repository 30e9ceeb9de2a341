"""The same work as others do it, for bench.py --peers: a plain training loop as nanoGPT has it, transformers'
generate, generate_batch and Trainer, TRL's SFTTrainer and GRPOTrainer.

    python -m measure.peers JOB.json         a peer in a process of its own; the seconds of its steps as the last line
"""
import importlib.util
import json
import logging
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import tasks
from measure.synthetic import GPT2
from runtime import distributed, examples, hardware
from runtime.config import BadInput
from runtime.tokenizer import Tokenizer

PEERS = {                                    # of a stage: {peer: the packages that it needs}
    "train": {"nanogpt": (), "trainer": ("transformers", "accelerate")},
    "sft": {"trainer": ("transformers", "accelerate"), "trl": ("transformers", "trl")},
    "generate": {"generate": ("transformers",), "static": ("transformers",), "generate_batch": ("transformers",)},
    # sequences at a time
    "datagen": {"generate_32": ("transformers",), "generate_512": ("transformers",)},
    "grpo": {"trl_fp32": ("transformers", "trl"), "trl_bf16": ("transformers", "trl")},
}


def chosen(stage, asked):
    """Names of the peers that --peers= asks for: False, True (all that are installed; what is not is said),
    or names with a comma."""
    if not asked:
        return []
    known = PEERS.get(stage, {})
    if not known:
        raise BadInput(f"--stage={stage} has no peers to compare with: leave --peers out.")
    names = list(known) if asked is True else asked.split(",")
    if not set(names) <= known.keys():
        raise BadInput(f"--peers={asked} is not known: of {stage} choose from {', '.join(known)}.")
    missing = {name: [p for p in known[name] if not importlib.util.find_spec(p)] for name in names}
    for name in names:
        if missing[name]:
            sentence = f"{name} is not installed: pip install {' '.join(missing[name])}, to compare with it."
            if asked is not True:
                raise BadInput(sentence)
            print(sentence)
    return [name for name in names if not missing[name]]


def quiet():
    """transformers, without its reports."""
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    return transformers


# --- sampling, in bench.py's own process ---

class Generate:
    """transformers' generate: the prompts as one batch, num_return_sequences samples of each."""
    name = "generate"

    def __init__(self, folder, hw):
        self.model = quiet().AutoModelForCausalLM.from_pretrained(folder, dtype=hw.sampling_dtype).to(hw.device).eval()
        self.options = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
        self.device = hw.device
        if self.name == "static":
            self.options["cache_implementation"] = "static"

    def run(self, prompts, samples, new):
        """Tokens sampled."""
        x = torch.tensor(prompts, device=self.device)
        with torch.inference_mode():
            out = self.model.generate(x, attention_mask=torch.ones_like(x), num_return_sequences=samples, max_new_tokens=new,
                                      min_new_tokens=new, eos_token_id=None, **self.options)
        return out[:, x.shape[1]:].numel()


class Static(Generate):
    """With a static cache, which transformers compiles for on a GPU."""
    name = "static"


SAMPLERS = {kind.name: kind for kind in (Generate, Static)}


def verified_in_a_loop(peer, hw, tokenizer, task, questions, prompts, samples, new, at_once):
    """How many samples transformers' generate and the verifier find right: questions in batches of at_once
    sequences, padded on the left; an answer ends at the end-of-text token."""
    verified, per_call = 0, max(1, at_once // samples)
    for first in range(0, len(prompts), per_call):
        group = prompts[first:first + per_call]
        T = max(map(len, group))
        x = torch.tensor([[tokenizer.pad] * (T - len(p)) + p for p in group], device=hw.device)
        mask = torch.tensor([[0] * (T - len(p)) + [1] * len(p) for p in group], device=hw.device)
        with torch.inference_mode():
            out = peer.model.generate(x, attention_mask=mask, num_return_sequences=samples, max_new_tokens=new,
                                      eos_token_id=tokenizer.stop, **peer.options | {"pad_token_id": tokenizer.pad})
        for i, ids in enumerate(out[:, T:].tolist()):
            score, parts = task.reward(questions[first + i // samples], task.cut(tokenizer.decode(ids)))
            verified += task.verified(score, parts)
    return verified


# --- each in a process of its own, with TF32 and a CPU's memory kept as for ours; job: what bench.py wrote ---
# They return the seconds of their steps.

class PlainBlock(nn.Module):
    """A block of GPT-2."""

    def __init__(self, c):
        super().__init__()
        C, self.heads = c["n_embd"], c["n_head"]
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, c["mlp_hidden"]), nn.Linear(c["mlp_hidden"], C)

    def forward(self, h):                    # [B, T, C]
        q, k, v = (z.unflatten(2, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.norm1(h)).chunk(3, dim=2))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 in as few lines as it takes. c: GPTConfig's fields, as a dictionary."""

    def __init__(self, c):
        super().__init__()
        C, V = c["n_embd"], -(-c["vocab_size"] // 64) * 64
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(c["block_size"], C)
        self.blocks, self.norm = nn.Sequential(*(PlainBlock(c) for _ in range(c["n_layer"]))), nn.LayerNorm(C)
        self.apply(lambda m: nn.init.normal_(m.weight, 0, 0.02) if isinstance(m, nn.Embedding | nn.Linear) else None)

    def forward(self, x, y):                 # [B, T] -> []
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits = F.linear(self.norm(self.blocks(h)), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))


def is_gpt2(c):
    """Whether PlainGPT is the architecture of GPTConfig's fields."""
    return all(c.get(name) == value for name, value in GPT2.items()) and c.get("n_kv_head") in (None, c["n_head"])


def windows(job):
    """Function of a number of rows -> x, y [rows, T] from random places of train.bin, as nanoGPT takes
    them."""
    ids, rng, T = np.memmap(Path(job["data"]) / "train.bin", np.uint16, mode="r"), np.random.default_rng(job["seed"]), job["block_size"]

    def draw(rows):
        picked = np.stack([ids[i:i + T + 1] for i in rng.integers(0, len(ids) - T - 1, rows)]).astype(np.int64)
        return torch.from_numpy(picked[:, :-1]), torch.from_numpy(picked[:, 1:])
    return draw


def nanogpt(job, hw):
    """Eager, autocast, fused AdamW, gradients accumulated and clipped; batches from a memory-mapped file,
    without a loader."""
    model, draw = PlainGPT(job["architecture"]).to(hw.device), windows(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=hw.device.type != "mps")
    scaler, seconds = hw.scaler(), []
    for _ in range(job["steps"]):
        began = time.perf_counter()
        for _ in range(job["accumulation"]):
            x, y = (z.to(hw.device, non_blocking=True) for z in draw(job["batch_size"]))
            with hw.autocast():
                loss = model(x, y) / job["accumulation"]
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        loss.item()                          # waits for the device
        seconds.append(time.perf_counter() - began)
    return seconds


def clock_of(transformers, hw):
    """(callback that notes when steps begin and end, function that gives their seconds)."""
    times = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            hw.wait()
            times.append(time.perf_counter())
        on_step_end = on_step_begin
    return Clock(), lambda: [end - begin for begin, end in zip(times[::2], times[1::2])]


def trainer_options(job, hw):
    return dict(output_dir=f"{job['folder']}/trainer", per_device_train_batch_size=job["batch_size"], max_steps=job["steps"],
                gradient_accumulation_steps=job["accumulation"], learning_rate=1e-4, lr_scheduler_type="cosine", optim="adamw_torch_fused",
                bf16=hw.dtype == "bf16", fp16=hw.dtype == "fp16", report_to=[], save_strategy="no", logging_steps=10, disable_tqdm=True,
                use_cpu=hw.device.type == "cpu", remove_unused_columns=False)


def trained(job, hw, kind):
    """Seconds of the steps of a trainer. kind: of (transformers, model, rows, collate, Clock) -> it. rows: of
    text as many random windows as it takes, else the examples of job["data"] with the labels that we train
    on."""
    transformers = quiet()
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    if job.get("lora_rank"):
        import peft
        adapters = peft.LoraConfig(r=job["lora_rank"], lora_alpha=2 * job["lora_rank"], target_modules="all-linear")
        model = peft.get_peft_model(model, adapters)
    if Path(job["data"]).is_dir():
        x, _ = windows(job)(job["steps"] * job["batch_size"] * job["accumulation"])
        rows = [{"input_ids": ids, "labels": ids} for ids in x.tolist()]
    else:
        rows = [{"input_ids": e.ids.tolist(), "labels": [int(i) if t else -100 for i, t in zip(e.ids, e.trained)]}
                for e in examples.read(job["data"], Tokenizer("bytes"))]

    def collate(batch):
        T = max(len(row["input_ids"]) for row in batch)
        return {"input_ids": torch.tensor([r["input_ids"] + [0] * (T - len(r["input_ids"])) for r in batch]),
                "labels": torch.tensor([r["labels"] + [-100] * (T - len(r["labels"])) for r in batch]),
                "attention_mask": torch.tensor([[1] * len(r["input_ids"]) + [0] * (T - len(r["input_ids"])) for r in batch])}
    clock, seconds = clock_of(transformers, hw)
    kind(transformers, model, rows, collate, clock).train()
    return seconds()


def trainer(job, hw):
    def make(transformers, model, rows, collate, clock):
        return transformers.Trainer(model, transformers.TrainingArguments(**trainer_options(job, hw)), collate, rows, callbacks=[clock])
    return trained(job, hw, make)


def sft_trainer(job, hw):
    def make(transformers, model, rows, collate, clock):
        import tokenizers
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer
        args = SFTConfig(**trainer_options(job, hw), dataset_kwargs={"skip_prepare_dataset": True}, gradient_checkpointing=False)
        # it asks for one, whatever the rows are
        unused = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<e>": 0}, "<e>"))
        unused = transformers.PreTrainedTokenizerFast(tokenizer_object=unused, eos_token="<e>", pad_token="<e>")
        return SFTTrainer(model, args, collate, Dataset.from_list(rows), callbacks=[clock], processing_class=unused)
    return trained(job, hw, make)


def grpo_trainer(job, hw):
    """TRL's GRPOTrainer, in one process or several: loss, clipping, group and optimizer as grpo.py has them
    by default."""
    transformers = quiet()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    task, lengths = tasks.load(job["task"]), set()
    clock, seconds = clock_of(transformers, hw)

    def score(completions, completion_ids, **_):
        lengths.update(map(len, completion_ids))
        return [task.score(None, completion) for completion in completions]
    args = GRPOConfig(
        output_dir=f"{job['folder']}/trl", per_device_train_batch_size=job["prompts"] * job["samples"] // distributed.world_size(),
        num_generations=job["samples"], max_completion_length=job["max_new_tokens"], max_steps=job["steps"], beta=0.0, epsilon=0.2,
        epsilon_high=0.28, loss_type="dapo", scale_rewards="none", temperature=1.0, learning_rate=1e-6, lr_scheduler_type="constant",
        optim="adamw_torch_fused", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, bf16=hw.dtype == "bf16", fp16=hw.dtype == "fp16",
        gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=10**9, disable_tqdm=True,
        use_cpu=hw.device.type == "cpu", seed=job["seed"])
    made = GRPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32), score, args, callbacks=[clock],
        train_dataset=Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in Path(job["data"]).read_text().splitlines()]),
        processing_class=transformers.AutoTokenizer.from_pretrained(job["model"]))
    made.train()
    assert lengths == {job["max_new_tokens"]}, f"not the work that was asked for: completions of {lengths} tokens"
    return seconds()


def generate_batch(job, hw):
    """Not of steps: of a warm-up and a run of transformers' continuous batching, a request a sample. Its
    threads would stay, and disturb others, in the process of bench.py."""
    from transformers import GenerationConfig
    peer, times = Generate(job["folder"], hw), []
    settings = GenerationConfig(max_new_tokens=job["max_new_tokens"], eos_token_id=-1, **peer.options)
    for _ in range(2):
        hw.wait()
        began = time.perf_counter()
        out = peer.model.generate_batch(inputs=[p for p in job["prompts"] for _ in range(job["samples"])], generation_config=settings,
                                        progress_bar=False, persistent_manager=True)
        times.append(time.perf_counter() - began)
        assert all(len(o.generated_tokens) == job["max_new_tokens"] for o in out.values()), "not the work that was asked for"
    peer.model.destroy_cached_continuous_batching_manager()
    return times


ALONE = {"generate_batch": generate_batch, "nanogpt": nanogpt, "trainer": trainer, "trl": sft_trainer, "trl_fp32": grpo_trainer,
         "trl_bf16": grpo_trainer}


def main(path):
    job = json.loads(Path(path).read_text())
    hw = hardware.setup(job["device"], job["dtype"], job.get("tf32", True), compile=False)
    torch.manual_seed(job["seed"])
    seconds = ALONE[job["peer"]](job, hw)
    if distributed.is_main():
        print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1])
