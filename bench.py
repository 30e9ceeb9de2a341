"""What a stage costs on this machine, beside its limit and beside other ways to do it.

    python bench.py --peers=generate                            SmolLM2-360M's shape, random weights, 2x10, 8x8 and 32x1 samples
    python bench.py --model=gpt2 --work=1x1,64x1,32x8,64x8 --prompt_tokens=90 --dtype=bf16
    python bench.py --stage=datagen --run=out/quickstart/base   rejection sampling against a loop over transformers' generate
    python bench.py --stage=sft --model=llama-1m                fine-tuning against transformers' Trainer, and TRL's if it is there
    python bench.py --stage=grpo --model=llama-50m              whole steps of reinforcement learning against TRL's GRPOTrainer
    python bench.py --stage=rewards                             slow verifiers in worker processes against the caller itself

The same weights, data and precision (grpo: TRL in both) on every side, taken in turn. Of datagen.py, train.py and grpo.py the real
scripts run, as processes.
Knobs, as --key=value:
"""
import gc
import hashlib
import importlib.util
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Literal

import torch

import hf
import tasks
from engine import Engine, Packed, Request, Sampling, cache_bytes, draw, uniform
from eval import requests_of
from model import GPTConfig, blank
from runtime import config, distributed, examples, guard, hardware
from runtime.config import BadInput
from runtime.rewards import Pool
from runtime.tokenizer import END_OF_TEXT, Tokenizer

ROOT = Path(__file__).parent
SHAPES = {
    "smollm2-360m": dict(vocab_size=49152, block_size=8192, n_layer=32, n_head=15, n_kv_head=5, n_embd=960, mlp="swiglu",
                         mlp_hidden=2560, qk_norm=False, tied_head=True, rope_theta=1e5),
    "gpt2": dict(norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh", qkv_bias=True, o_bias=True, mlp_bias=True,
                 tied_head=True),
    "1m": dict(vocab_size=257, block_size=256, n_layer=4, n_head=2, n_embd=128),
    "llama-1m": dict(vocab_size=257, block_size=256, n_layer=4, n_head=2, n_embd=128, mlp="swiglu", qk_norm=False),
    "llama-50m": dict(vocab_size=32768, block_size=256, n_layer=8, n_head=9, n_embd=576, mlp="swiglu", mlp_hidden=1536, qk_norm=False,
                      tied_head=True),
}


@dataclass
class Config:
    stage: Literal["generate", "datagen", "sft", "grpo", "rewards", "trl"] = "generate"        # trl: TRL's side of grpo, which grpo starts
    model: Literal["auto", "smollm2-360m", "gpt2", "1m", "llama-1m", "llama-50m"] = "auto"     # a shape; its weights are random. auto:
                                             # smollm2-360m, for grpo llama-1m
    run: str = ""                            # datagen: a model that can answer, instead
    num_questions: int = 100                 # datagen
    oversample: int = 10                     # datagen: samples a question
    examples: int = 640                      # sft: of unit conversion, once each, 32 x 2 a step
    lora_rank: int = 0                       # sft; 0: all weights
    steps: int = 6                           # grpo: that count, after WARM_UP which don't
    ranks: int | None = None                 # grpo: processes of ours; None: one a thread for a small model on a CPU, else one
    peer_ranks: int = 1                      # grpo: processes of TRL's
    completions: int = 256                   # rewards
    verifier_ms: float = 5.0                 # rewards: of a core's time, for each
    reward_workers: int = 2                  # rewards: processes
    work: str | None = None                  # prompts x samples of each, one case after the other; None: 2x10,8x8,32x1, or GRPO's
    prompt_tokens: int | None = None         # None: 120, or GRPO's
    max_new_tokens: int | None = None        # None: 60, or GRPO's
    slots: int | None = None                 # None: all samples at once, at most 512
    peers: str = ""                          # generate: transformers' generate, generate_batch, or both with a comma
    repeats: int = 3                         # runs of each side, in turn; the median counts
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    seed: int = 0
    json: bool = False                       # all figures as the last line


GRPO = {"llama-50m": ("4x8", 50, 32)}        # work, prompt_tokens, max_new_tokens: what takes TRL some seconds a step on two cores;
GRPO_ELSE = ("8x8", 50, 64)                  # of other shapes
WARM_UP = 2                                  # steps in which memory is taken and shapes are seen for the first time


def random_model(c, hw):
    model = blank(c, device=hw.device)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02) if p.ndim > 1 else p.fill_(1)
    return model.eval()


def clock(function, hw):
    """(seconds, result); the device is done when it starts and when it stops."""
    wait = torch.cuda.synchronize if hw.device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    result = function()
    wait()
    return time.perf_counter() - began, result


def ceilings(hw):
    """(bytes/s that reading 1 GiB reaches, FLOP/s of a product of large matrices in the engine's dtype)."""
    big = torch.zeros(2**28, dtype=torch.int32, device=hw.device)
    bandwidth = big.nbytes / min(clock(lambda: big.max(), hw)[0] for _ in range(5))
    n = 8192 if hw.device.type == "cuda" else 2048
    a = torch.randn(n, n, device=hw.device).to(hw.torch_dtype)
    product = a.mm
    if hw.dtype == "fp32" and Packed.works(hw.device, hw.torch_dtype):       # the faster one there, so that is the ceiling
        product = Packed()
        product.pack(a)
    return bandwidth, 2 * n**3 / min(clock(lambda: product(a), hw)[0] for _ in range(5))


class Ours:
    name = "engine"

    def __init__(self, model, cfg, hw, rows):
        slots = cfg.slots or min(rows, 512)
        self.engine = Engine(model, slots, cfg.prompt_tokens + cfg.max_new_tokens, Sampling(), cfg.seed, hw.torch_dtype)

    def run(self, prompts, samples, new):
        requests = [Request(p, samples, i, new) for i, p in enumerate(prompts)]
        return sum(len(s.ids) for s in self.engine.generate(requests))


class Generate:
    """transformers' generate: the prompts as one batch, num_return_sequences samples of each."""
    name = "generate"

    def __init__(self, folder, cfg, hw):
        import transformers
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=hw.torch_dtype).to(hw.device).eval()
        self.options = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
        self.device = hw.device

    def run(self, prompts, samples, new):
        x = torch.tensor(prompts, device=self.device)
        with torch.inference_mode():
            out = self.model.generate(x, attention_mask=torch.ones_like(x), num_return_sequences=samples, max_new_tokens=new,
                                      min_new_tokens=new, eos_token_id=None, **self.options)
        return out[:, x.shape[1]:].numel()


class GenerateBatch(Generate):
    """transformers' continuous batching: a request a sample. Run once, after the others, because its threads stay."""
    name = "generate_batch"

    def run(self, prompts, samples, new):
        from transformers import GenerationConfig
        settings = GenerationConfig(max_new_tokens=new, eos_token_id=-1, **self.options)
        out = self.model.generate_batch(inputs=[p for p in prompts for _ in range(samples)], generation_config=settings,
                                        progress_bar=False)
        return sum(len(o.generated_tokens) for o in out.values())


PEERS = {kind.name: kind for kind in (Generate, GenerateBatch)}


def split(engine, prompts, samples, new, total, hw, B, groups):
    """(seconds of a run by part: its prompts, the draws, and its other decoding, each measured alone; the rest is the host's;
    seconds of a step in the middle of a run)"""
    def a_step():
        engine.tick.zero_()
        engine.launch(B, groups)
    with torch.inference_mode():
        prefill = clock(lambda: engine.prefill([(i % engine.slots, p[:-1]) for i, p in enumerate(prompts)]), hw)[0]
        a_step()
        steps = [clock(a_step, hw)[0] for _ in range(5)]
        logits = torch.randn(B, engine.c.vocab_size, device=hw.device)
        noise = engine.state[2, :B]
        draws = [clock(lambda: draw(logits, uniform(noise, noise), engine.sampling), hw)[0] for _ in range(5)]
    rounds = new * len(prompts) * samples / B
    step, one_draw = statistics.median(steps), statistics.median(draws)
    parts = {"prefill": prefill, "decode": rounds * (step - one_draw), "draw": rounds * one_draw}
    return parts | {"host": total - sum(parts.values())}, step


def products(engine, B, C, hw):
    """Seconds of a step's matrix products alone, on a CPU: what is left of a step is overhead."""
    D, dtype, groups = engine.c.head_dim, engine.dtype, engine.c.n_head // engine.c.n_kv_head
    linears = [m for m in [*engine.model.modules(), engine.head] if isinstance(m, Packed | torch.nn.Linear)]
    x = {m: torch.randn(B, 1, m.weight.shape[1]).to(dtype) for m in linears}
    q, p = (torch.randn(B * engine.c.n_kv_head, groups, n).to(dtype) for n in (D, C))

    def all_of_them():
        for m in linears:
            m(x[m])
        for k, v in zip(engine.k, engine.v):
            k, v = (z[:B].flatten(0, 1)[:, :C] for z in (k, v))
            torch.bmm(q, k.transpose(1, 2)), torch.bmm(p, v)
    with torch.inference_mode():
        return statistics.median(clock(all_of_them, hw)[0] for _ in range(5))


# --- rejection sampling and fine-tuning: the real scripts, against what one would write with transformers ---

def script(name, *arguments, ranks=1):
    """Run a script of ours, on several ranks with one thread each; what it printed."""
    start, env = [sys.executable], os.environ
    if ranks > 1:
        start, env = start + ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"], env | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, str(ROOT / name), *map(str, arguments)], capture_output=True, text=True, env=env)
    if done.returncode:
        raise guard.Failure(f"{name} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def in_turn(sides, repeats, what, warm_up=1):
    """Run {name: function -> rate} in turn, `repeats` times after `warm_up` that don't count; print medians and ratios; the rates."""
    rates = {name: [] for name in sides}
    for repeat in range(warm_up + repeats):
        for name, side in sides.items():
            rate = side()
            rates[name] += [rate] if repeat >= warm_up else []
    ours = rates["nanoRFT"]
    print(f"nanoRFT: {statistics.median(ours):,.1f} {what} ({min(ours):,.1f}-{max(ours):,.1f})")
    for name in rates.keys() - {"nanoRFT"}:
        ratios = sorted(a / b for a, b in zip(ours, rates[name]))
        print(f"{name}: {statistics.median(rates[name]):,.1f} {what}; nanoRFT is {statistics.median(ratios):.2f} times as fast "
              f"({ratios[0]:.2f}-{ratios[-1]:.2f})")
    return rates


def bench_datagen(cfg, hw, folder):
    """Samples a second, verified ones if a model is given that can answer, without the start of the processes."""
    found = hf.find(cfg.run or folder)
    tokenizer, task = found.tokenizer(None if cfg.run else "bytes"), tasks.load("unit_conversion")
    hf.export(found.load(), f"{folder}/peer")
    peer = Generate(f"{folder}/peer", cfg, hw)
    questions = task.questions("train", n=cfg.num_questions)
    prompts = [r.ids for r in requests_of(tokenizer, task, questions)]
    print(f"{len(prompts)} questions x {cfg.oversample}, prompts of {min(map(len, prompts))}-{max(map(len, prompts))} tokens, at most "
          f"{cfg.max_new_tokens} new ones, {hw.dtype} on {hw.name}")
    per_call = max(1, 32 // cfg.oversample)
    small = sum(p.numel() for p in peer.model.parameters()) < 2e7
    ranks = torch.get_num_threads() if hw.device.type == "cpu" and small else 1        # as README says it is fastest there

    def ours():
        said = script("datagen.py", f"--init_from={cfg.run or folder}", *([] if cfg.run else ["--tokenizer=bytes"]), "--overwrite", "--json",
                      f"--output={folder}/rft.json", f"--num_questions={cfg.num_questions}", f"--oversample={cfg.oversample}", "--temperature=1",
                      f"--max_new_tokens={cfg.max_new_tokens}", f"--dtype={hw.dtype}", f"--device={cfg.device}", "--few_shot=0", ranks=ranks)
        figures = json.loads(said.splitlines()[-1])
        return (figures["verdicts"].get("verified", 0) if cfg.run else figures["attempts"]) / figures["seconds"]

    def loop():
        """Questions in micro-batches of about 32 sequences, padded on the left; an answer ends at the end-of-text token."""
        began, verified = time.perf_counter(), 0
        for first in range(0, len(prompts), per_call):
            group = prompts[first:first + per_call]
            T = max(map(len, group))
            x = torch.tensor([[tokenizer.pad] * (T - len(p)) + p for p in group], device=hw.device)
            mask = torch.tensor([[0] * (T - len(p)) + [1] * len(p) for p in group], device=hw.device)
            with torch.inference_mode():
                out = peer.model.generate(x, attention_mask=mask, num_return_sequences=cfg.oversample, max_new_tokens=cfg.max_new_tokens,
                                          eos_token_id=tokenizer.stop, **peer.options | {"pad_token_id": tokenizer.pad})
            for i, ids in enumerate(out[:, T:].tolist()):
                score, parts = task.reward(questions[first + i // cfg.oversample], task.cut(tokenizer.decode(ids)))
                verified += task.verified(score, parts)
        return (verified if cfg.run else len(prompts) * cfg.oversample) / (time.perf_counter() - began)
    return in_turn({"nanoRFT": ours, "loop over generate": loop}, cfg.repeats, "verified samples/s" if cfg.run else "samples/s")


def bench_sft(cfg, hw, folder):
    """Tokens a second (prompts and answers, without padding) within steps: ours with the fetching of batches, theirs without."""
    import transformers
    transformers.logging.set_verbosity_error()
    task, path = tasks.load("unit_conversion"), Path(folder) / "rft.json"
    path.write_text(json.dumps([[q["question"], q["answer"], task.solution(q)] for q in task.questions("train", n=cfg.examples)]))
    data = examples.read(path, Tokenizer("bytes"))
    tokens = sum(e.length for e in data)
    print(f"{len(data)} examples of {min(e.length for e in data)}-{max(e.length for e in data)} tokens, 32 x 2 a step, "
          f"{f'LoRA of rank {cfg.lora_rank}' if cfg.lora_rank else 'all weights'}, AdamW, {hw.dtype} on {hw.name}")
    rows = [{"input_ids": e.ids.tolist(), "labels": [int(i) if t else -100 for i, t in zip(e.ids, e.trained)]} for e in data]

    def ours():
        script("train.py", ROOT / "config/rft.py", f"--init_from={folder}", "--tokenizer=bytes", f"--dataset={path}", f"--out_dir={folder}/run",
               "--overwrite", "--num_epochs=1", f"--dtype={hw.dtype}", f"--device={cfg.device}", f"--lora_rank={cfg.lora_rank}", "--save_only_model",
               "--learning_rate=1e-4")
        last = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()][-1]
        return last["tokens"] / last["seconds"]

    def theirs(kind):
        """A fresh model, trained for an epoch by transformers' Trainer or a class built on it."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if cfg.lora_rank:
            import peft
            model = peft.get_peft_model(model, peft.LoraConfig(r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank, target_modules="all-linear"))
        times = []

        class Clock(transformers.TrainerCallback):
            def on_step_begin(self, *_, **__):
                times.append(time.perf_counter())

            def on_step_end(self, *_, **__):
                times.append(time.perf_counter())

        def collate(batch):
            T = max(len(row["input_ids"]) for row in batch)
            return {"input_ids": torch.tensor([r["input_ids"] + [0] * (T - len(r["input_ids"])) for r in batch]),
                    "labels": torch.tensor([r["labels"] + [-100] * (T - len(r["labels"])) for r in batch]),
                    "attention_mask": torch.tensor([[1] * len(r["input_ids"]) + [0] * (T - len(r["input_ids"])) for r in batch])}
        kind(model, hw, rows, collate, f"{folder}/trainer", Clock()).train()
        return tokens / sum(end - begin for begin, end in zip(times[::2], times[1::2]))

    def options(out):
        return dict(output_dir=out, per_device_train_batch_size=32, gradient_accumulation_steps=2, num_train_epochs=1, learning_rate=1e-4,
                    lr_scheduler_type="cosine", optim="adamw_torch_fused", bf16=hw.dtype == "bf16", fp16=hw.dtype == "fp16", report_to=[],
                    save_strategy="no", logging_steps=10, disable_tqdm=True, use_cpu=hw.device.type == "cpu", remove_unused_columns=False)

    def trainer(model, hw, rows, collate, out, clock):
        return transformers.Trainer(model, transformers.TrainingArguments(**options(out)), collate, rows, callbacks=[clock])

    def trl(model, hw, rows, collate, out, clock):
        import tokenizers
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer
        args = SFTConfig(**options(out), dataset_kwargs={"skip_prepare_dataset": True}, gradient_checkpointing=False)
        unused = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<e>": 0}, "<e>"))      # it asks for one, whatever the rows are
        unused = transformers.PreTrainedTokenizerFast(tokenizer_object=unused, eos_token="<e>", pad_token="<e>")
        return SFTTrainer(model, args, collate, Dataset.from_list(rows), callbacks=[clock], processing_class=unused)
    sides = {"nanoRFT": ours, "transformers' Trainer": lambda: theirs(trainer)}
    if importlib.util.find_spec("trl"):
        sides["TRL's SFTTrainer"] = lambda: theirs(trl)
    return in_turn(sides, cfg.repeats, "tokens/s")


# --- reinforcement learning: whole steps, rollout, reward and update ---

SCORE = '''"""Any score does for a benchmark, if the samples of a group differ in it."""
import zlib

PROMPT, STOP = "{}", ""


def reward(question, completion):
    return zlib.crc32(completion.encode("utf-8", "replace")) / 2**32
'''


def write_tokenizer(folder, n_vocab):
    """A tokenizer.json that both sides read: bytes, words that no text is encoded to (but a completion decoded), the end of text."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}           # GPT-2's letters for bytes: the others come after 255
    others = iter(range(256, 512))
    letters = [chr(b if b in printed else next(others)) for b in range(256)]
    words = islice(("".join(word) for n in (2, 3, 4) for word in product(ascii_lowercase, repeat=n)), n_vocab - 257)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"id": n_vocab - 1, "content": END_OF_TEXT, "special": True} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (Path(folder) / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [special], "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate([*letters, *words, END_OF_TEXT])}, "merges": []}}))
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}))


def never_ends(model, eos):
    """Weights with which the end of text is never sampled, so that both sides do the same work without being told to: a channel that all
    embeddings share and no block writes to, and a head whose row for that id is against it."""
    with torch.no_grad():
        model.token_embedding.weight[:, 0] = 1
        model.head_weight[eos, 0] = -1000
        for block in model.blocks:
            block.attention.out.weight[0] = block.mlp.down.weight[0] = 0


def bench_grpo(cfg, hw, folder):
    """Completions a second of whole steps (rollout, reward, update), from the seconds that grpo.py logs, against TRL's GRPOTrainer from
    the start of its steps to their end: neither with the start of the process, TRL's without fetching questions and logging. Same
    weights, prompts of one length, reward, group size, learning rate and loss (dapo's, clipped alike, no KL, advantages not scaled),
    one AdamW step a rollout; samples don't end before max_new_tokens, which is checked on both sides. grpo.py leaves samples without any
    advantage out of its update: here there are none, for the reward is a hash."""
    prompts, samples = map(int, cfg.work.split("x"))
    total, rng = WARM_UP + cfg.steps, random.Random(cfg.seed)
    texts = ["".join(rng.choices(ascii_lowercase + " 0123456789", k=cfg.prompt_tokens)) for _ in range(prompts * total)]
    (Path(folder) / "questions.jsonl").write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    (Path(folder) / "score.py").write_text(SCORE)
    small = SHAPES[cfg.model]["n_layer"] * SHAPES[cfg.model]["n_embd"]**2 < 2e6        # as README says it is fastest there
    ranks = cfg.ranks or (torch.get_num_threads() if hw.device.type == "cpu" and small and prompts % torch.get_num_threads() == 0 else 1)
    print(f"{prompts} prompts of {cfg.prompt_tokens} tokens x {samples} samples of {cfg.max_new_tokens}, {cfg.steps} steps a run after {WARM_UP}, "
          f"{hw.dtype} on {hw.name}; {ranks} processes here, {cfg.peer_ranks} of TRL's")

    def ours():
        script("grpo.py", f"--init_from={folder}", f"--task={folder}/score.py", f"--dataset={folder}/questions.jsonl", f"--out_dir={folder}/run",
               "--overwrite", f"--prompts_per_step={prompts}", f"--k_samples={samples}", f"--max_new_tokens={cfg.max_new_tokens}",
               f"--max_steps={total}", "--learning_rate=1e-6", "--warmup_steps=0", "--eval_interval=0", "--save_only_model",
               f"--dtype={hw.dtype}", f"--device={cfg.device}", f"--seed={cfg.seed}", ranks=ranks)
        steps = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
        steps = [step for step in steps if "reward" in step]
        same = {(s["completion_tokens"], s["completion_tokens_max"], s["zero_variance"]) for s in steps}
        assert len(steps) == total and same == {(cfg.max_new_tokens, cfg.max_new_tokens, 0)}, f"not the work that was asked for: {same}"
        return prompts * samples * cfg.steps / (steps[-1]["seconds"] - steps[WARM_UP - 1]["seconds"])

    def theirs(dtype):
        said = script("bench.py", "--stage=trl", f"--run={folder}", f"--work={cfg.work}", f"--max_new_tokens={cfg.max_new_tokens}",
                      f"--steps={cfg.steps}", f"--dtype={dtype}", f"--device={cfg.device}", f"--seed={cfg.seed}", ranks=cfg.peer_ranks)
        return prompts * samples * cfg.steps / sum(json.loads(said.splitlines()[-1])["seconds"][WARM_UP:])
    sides = {"nanoRFT": ours}
    if importlib.util.find_spec("trl"):
        sides |= {f"TRL's GRPOTrainer, {dtype}": lambda dtype=dtype: theirs(dtype) for dtype in ("fp32", "bf16")}
    else:
        print("TRL is not installed: pip install trl, to compare with it.")
    return in_turn(sides, cfg.repeats, "completions/s", warm_up=0)


def run_trl(cfg, hw):
    """TRL's side, in a process or several; the seconds of its steps as the last line."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    prompts, samples = map(int, cfg.work.split("x"))
    task, questions, times, lengths = tasks.load(f"{cfg.run}/score.py"), Path(cfg.run) / "questions.jsonl", [], set()

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            if hw.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
        on_step_end = on_step_begin

    def score(completions, completion_ids, **_):
        lengths.update(map(len, completion_ids))
        return [task.score(None, completion) for completion in completions]
    args = GRPOConfig(
        output_dir=f"{cfg.run}/trl", per_device_train_batch_size=prompts * samples // distributed.world_size(), num_generations=samples,
        max_completion_length=cfg.max_new_tokens, max_steps=WARM_UP + cfg.steps, beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo",
        scale_rewards="none", temperature=1.0, learning_rate=1e-6, lr_scheduler_type="constant", optim="adamw_torch_fused", adam_beta2=0.95,
        weight_decay=0.0, max_grad_norm=1.0, bf16=hw.dtype == "bf16", fp16=hw.dtype == "fp16", gradient_checkpointing=False, report_to=[],
        save_strategy="no", logging_steps=10**9, disable_tqdm=True, use_cpu=hw.device.type == "cpu", seed=cfg.seed)
    trainer = GRPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(cfg.run, dtype=torch.float32), score, args, callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in questions.read_text().splitlines()]),
        processing_class=transformers.AutoTokenizer.from_pretrained(cfg.run))
    trainer.train()
    assert lengths == {cfg.max_new_tokens}, f"not the work that was asked for: completions of {lengths} tokens"
    if distributed.is_main():
        print(json.dumps({"seconds": [end - begin for begin, end in zip(times[::2], times[1::2])]}))
    return 0


def bench_rewards(cfg, folder):
    """Completions a second that worker processes grade, and the caller itself, with a verifier that takes about verifier_ms of an idle
    core, always the same work. Without the start of the workers, which grpo.py has once a run."""
    def rounds(n):
        began = time.thread_time()
        hashlib.pbkdf2_hmac("sha256", b"", b"", n)
        return time.thread_time() - began
    n, path = max(1, int(10_000 * cfg.verifier_ms / 1000 / min(rounds(10_000) for _ in range(5)))), Path(folder) / "slow.py"
    path.write_text(f'import hashlib\n\n\ndef reward(question, completion):\n    hashlib.pbkdf2_hmac("sha256", b"", b"", {n})\n'
                    "    return len(completion) % 2\n")
    pairs = [({"question": "", "answer": ""}, "x" * i) for i in range(cfg.completions)]
    print(f"{cfg.completions} completions, {cfg.verifier_ms:g} ms each, {cfg.reward_workers} processes")
    with Pool(str(path), cfg.reward_workers) as several, Pool(str(path), 1, kind="serial") as serial:
        def rate(pool):
            began = time.perf_counter()
            grades = pool.score(pairs)
            seconds = time.perf_counter() - began
            assert [grade.score for grade in grades] == [i % 2 for i in range(len(pairs))], "wrong grades"
            return len(pairs) / seconds
        return in_turn({"nanoRFT": lambda: rate(several), "one after the other": lambda: rate(serial)}, cfg.repeats, "completions/s")


def main(argv):
    cfg = config.load(Config, argv)
    if cfg.model == "auto":
        cfg.model = "llama-1m" if cfg.stage == "grpo" else "smollm2-360m"
    defaults = GRPO.get(cfg.model, GRPO_ELSE) if cfg.stage == "grpo" else ("2x10,8x8,32x1", 120, 60)
    for knob, default in zip(("work", "prompt_tokens", "max_new_tokens"), defaults):
        setattr(cfg, knob, default if getattr(cfg, knob) is None else getattr(cfg, knob))
    config.at_least(cfg, 1, "prompt_tokens max_new_tokens slots repeats num_questions oversample examples steps ranks peer_ranks completions "
                            "reward_workers")
    config.at_least(cfg, 0, "lora_rank verifier_ms")
    if cfg.stage in ("sft", "grpo") and cfg.run:
        raise BadInput(f"--stage={cfg.stage} trains random weights of --model=: leave --run out.")
    if cfg.stage == "trl" and not cfg.run:
        raise BadInput("--stage=trl is a part of --stage=grpo: choose that.")
    one_case = cfg.stage in ("grpo", "trl")
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*" + ("" if one_case else r"(,[1-9]\d*x[1-9]\d*)*"), cfg.work):
        raise BadInput(f"--work={cfg.work} is not prompts x samples: write for example --work={'8x8' if one_case else '2x10,32x1'}.")
    if one_case and cfg.work.endswith("x1"):
        raise BadInput(f"--work={cfg.work} leaves nothing to compare a sample with: give at least 2 of each prompt.")
    if cfg.stage == "trl":
        return run_trl(cfg, hardware.setup(cfg.device, cfg.dtype, compile=False))
    if cfg.stage == "rewards":
        with tempfile.TemporaryDirectory() as folder:
            rates = bench_rewards(cfg, folder)
        if cfg.json:
            print(json.dumps({"stage": cfg.stage, "rates": rates}))
        return 0
    c = GPTConfig(**SHAPES[cfg.model])
    if cfg.stage in ("generate", "grpo") and cfg.prompt_tokens + cfg.max_new_tokens > c.block_size:
        raise BadInput(f"{cfg.model} has {c.block_size} positions: lower --prompt_tokens or --max_new_tokens.")
    if cfg.stage != "generate":
        hw = hardware.setup(cfg.device, cfg.dtype, compile=False)
        torch.manual_seed(cfg.seed)
        with tempfile.TemporaryDirectory() as folder:
            if not cfg.run:
                model = random_model(c, hw)
                print(f"{cfg.model}, {model.n_params():,} parameters")
                if cfg.stage == "grpo":
                    never_ends(model, c.vocab_size - 1)
                    write_tokenizer(folder, c.vocab_size)
                hf.export(model, folder)
                del model
            rates = {"datagen": bench_datagen, "sft": bench_sft, "grpo": bench_grpo}[cfg.stage](cfg, hw, folder)
        if cfg.json:
            print(json.dumps({"stage": cfg.stage, "model": cfg.run or cfg.model, "device": hw.name, "dtype": hw.dtype, "rates": rates}))
        return 0
    work = [tuple(map(int, case.split("x"))) for case in cfg.work.split(",")]
    if cfg.peers and not set(cfg.peers.split(",")) <= PEERS.keys():
        raise BadInput(f"--peers={cfg.peers} is not known: choose from {', '.join(PEERS)}.")
    hw = hardware.setup(cfg.device, cfg.dtype, compile=False)
    torch.manual_seed(cfg.seed)
    model, (bandwidth, flops) = random_model(c, hw), ceilings(hw)
    weights, per_token = model.n_params() * hw.torch_dtype.itemsize, cache_bytes(c, 0, 64, hw.torch_dtype) / 64
    print(f"{cfg.model}, {model.n_params():,} parameters, {hw.dtype} on {hw.name}; prompts of {cfg.prompt_tokens}, "
          f"{cfg.max_new_tokens} new tokens a sample; measured {bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.2f} TFLOP/s.")
    peers = []
    if cfg.peers:
        with tempfile.TemporaryDirectory() as folder:
            hf.export(model, folder)
            peers = [PEERS[name](folder, cfg, hw) for name in cfg.peers.split(",")]
    rows = []
    for P, N in work:
        prompts = torch.randint(c.vocab_size, (P, cfg.prompt_tokens)).tolist()
        sides, times, failed = [Ours(model, cfg, hw, P * N), *peers], {}, {}
        for repeat in range(cfg.repeats + 1):             # the first is a warm-up, in which shapes are recorded
            for side in sides:
                try:
                    if side.name in failed or isinstance(side, GenerateBatch) and repeat < cfg.repeats:
                        continue
                    seconds, tokens = clock(lambda: side.run(prompts, N, cfg.max_new_tokens), hw)
                    assert tokens == P * N * cfg.max_new_tokens, f"{tokens} tokens"
                    if repeat:
                        times.setdefault(side.name, []).append(seconds)
                except Exception as e:
                    if side is sides[0]:
                        raise
                    failed[side.name] = f"{type(e).__name__}: {e}".splitlines()[0]
        ours, new = statistics.median(times["engine"]), P * N * cfg.max_new_tokens
        engine, context = sides[0].engine, cfg.prompt_tokens + cfg.max_new_tokens / 2
        in_flight = min(engine.slots, P * N)
        floor = (weights + in_flight * context * per_token) / bandwidth
        limit = 2 * (model.n_params() - c.padded_vocab_size * c.n_embd) * P * cfg.prompt_tokens / flops + \
            floor * new / in_flight
        B, groups = engine.shape([int(context)] * in_flight)           # of a step in the middle of a run
        C = groups[0][2]
        parts, step = split(engine, prompts, N, cfg.max_new_tokens, ours, hw, B, groups)
        alone = products(engine, B, C, hw) if hw.device.type == "cpu" else None
        row = {"work": f"{P}x{N}", "tokens_per_s": new / ours, "limit": new / limit, "step_ms": 1e3 * step, "floor_ms": 1e3 * floor,
               "overhead_ms": alone and 1e3 * (step - alone),
               **{f"{k}_s": v for k, v in parts.items()}, "seconds": times, "failed": failed}
        print(f"\n{P} prompts x {N}: {new / ours:,.0f} tokens/s, {limit / ours:.0%} of the limit of {new / limit:,.0f}; "
              + ", ".join(f"{k} {v / ours:.0%}" for k, v in parts.items())
              + f"; a step of {in_flight} rows {1e3 * step:.2f} ms (limit {1e3 * floor:.2f}"
              + (f", products alone {1e3 * alone:.2f})" if alone else ")"))
        for peer in times.keys() - {"engine"}:
            ratios = sorted(b / a for a, b in zip(times["engine"][-len(times[peer]):], times[peer]))
            row[f"over_{peer}"] = statistics.median(ratios)
            print(f"  {peer}: {new / statistics.median(times[peer]):,.0f} tokens/s; the engine is {statistics.median(ratios):.2f} times as "
                  f"fast ({ratios[0]:.2f}-{ratios[-1]:.2f})")
        for peer, reason in failed.items():
            print(f"  {peer}: failed ({reason})")
        rows.append(row)
        del sides, engine
        gc.collect()
    if cfg.json:
        print(json.dumps({"model": cfg.model, "device": hw.name, "dtype": hw.dtype, "torch": torch.__version__,
                          "bandwidth": bandwidth, "flops": flops, "cases": rows}))
    return 0


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
