"""What a stage costs on this machine, beside its limit and beside other ways to do it.

    python bench.py --peers=generate                            SmolLM2-360M's shape, random weights, 2x10, 8x8 and 32x1 samples
    python bench.py --model=gpt2 --work=1x1,64x1,32x8,64x8 --prompt_tokens=90 --dtype=bf16
    python bench.py --stage=datagen --run=out/quickstart/base   rejection sampling against a loop over transformers' generate
    python bench.py --stage=sft --model=llama-1m                fine-tuning against transformers' Trainer, and TRL's if it is there

The same weights, data and precision on every side, taken in turn. Of datagen.py and train.py the real scripts run, as processes.
Knobs, as --key=value:
"""
import gc
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import hf
import tasks
from engine import Engine, Packed, Request, Sampling, cache_bytes, draw, uniform
from eval import requests_of
from model import GPTConfig, blank
from runtime import config, examples, guard, hardware
from runtime.config import BadInput
from runtime.tokenizer import Tokenizer

ROOT = Path(__file__).parent
SHAPES = {
    "smollm2-360m": dict(vocab_size=49152, block_size=8192, n_layer=32, n_head=15, n_kv_head=5, n_embd=960, mlp="swiglu",
                         mlp_hidden=2560, qk_norm=False, tied_head=True, rope_theta=1e5),
    "gpt2": dict(norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh", qkv_bias=True, o_bias=True, mlp_bias=True,
                 tied_head=True),
    "1m": dict(vocab_size=257, block_size=256, n_layer=4, n_head=2, n_embd=128),
    "llama-1m": dict(vocab_size=257, block_size=256, n_layer=4, n_head=2, n_embd=128, mlp="swiglu", qk_norm=False),
}


@dataclass
class Config:
    stage: Literal["generate", "datagen", "sft"] = "generate"
    model: Literal["smollm2-360m", "gpt2", "1m", "llama-1m"] = "smollm2-360m"      # a shape; its weights are random
    run: str = ""                            # datagen: a model that can answer, instead
    num_questions: int = 100                 # datagen
    oversample: int = 10                     # datagen: samples a question
    examples: int = 640                      # sft: of unit conversion, once each, 32 x 2 a step
    lora_rank: int = 0                       # sft; 0: all weights
    work: str = "2x10,8x8,32x1"              # prompts x samples of each, one case after the other
    prompt_tokens: int = 120
    max_new_tokens: int = 60
    slots: int | None = None                 # None: all samples at once, at most 512
    peers: str = ""                          # generate: transformers' generate, generate_batch, or both with a comma
    repeats: int = 3                         # runs of each side, in turn; the median counts
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    seed: int = 0
    json: bool = False                       # all figures as the last line


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


def in_turn(sides, repeats, what):
    """Run {name: function -> rate} in turn, `repeats` times after a first that does not count; print medians and ratios; the rates."""
    rates = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            rate = side()
            rates[name] += [rate] if repeat else []
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


def main(argv):
    cfg = config.load(Config, argv)
    config.at_least(cfg, 1, "prompt_tokens max_new_tokens slots repeats num_questions oversample examples")
    config.at_least(cfg, 0, "lora_rank")
    if cfg.stage == "sft" and cfg.run:
        raise BadInput("--stage=sft trains random weights of --model=: leave --run out.")
    if cfg.stage != "generate":
        hw = hardware.setup(cfg.device, cfg.dtype, compile=False)
        torch.manual_seed(cfg.seed)
        with tempfile.TemporaryDirectory() as folder:
            if not cfg.run:
                model = random_model(GPTConfig(**SHAPES[cfg.model]), hw)
                print(f"{cfg.model}, {model.n_params():,} parameters")
                hf.export(model, folder)
                del model
            rates = (bench_datagen if cfg.stage == "datagen" else bench_sft)(cfg, hw, folder)
        if cfg.json:
            print(json.dumps({"stage": cfg.stage, "model": cfg.run or cfg.model, "device": hw.name, "dtype": hw.dtype, "rates": rates}))
        return 0
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", cfg.work):
        raise BadInput(f"--work={cfg.work} is not prompts x samples: write for example --work=2x10,32x1.")
    work = [tuple(map(int, case.split("x"))) for case in cfg.work.split(",")]
    if cfg.peers and not set(cfg.peers.split(",")) <= PEERS.keys():
        raise BadInput(f"--peers={cfg.peers} is not known: choose from {', '.join(PEERS)}.")
    hw = hardware.setup(cfg.device, cfg.dtype, compile=False)
    c = GPTConfig(**SHAPES[cfg.model])
    if cfg.prompt_tokens + cfg.max_new_tokens > c.block_size:
        raise BadInput(f"{cfg.model} has {c.block_size} positions: lower --prompt_tokens or --max_new_tokens.")
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
