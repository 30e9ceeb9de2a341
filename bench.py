"""What generation costs on this machine, beside its limit and beside transformers.

    python bench.py --peers=generate                            SmolLM2-360M's shape, random weights, 2x10, 8x8 and 32x1 samples
    python bench.py --model=gpt2 --work=1x1,64x1,32x8,64x8 --prompt_tokens=90 --dtype=bf16

The same weights, prompts and lengths on every side, taken in turn; no sample ends early. Knobs, as --key=value:
"""
import gc
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Literal

import torch

import hf
from engine import Engine, Packed, Request, Sampling, cache_bytes, draw, uniform
from model import GPTConfig, blank
from runtime import config, guard, hardware
from runtime.config import BadInput

SHAPES = {
    "smollm2-360m": dict(vocab_size=49152, block_size=8192, n_layer=32, n_head=15, n_kv_head=5, n_embd=960, mlp="swiglu",
                         mlp_hidden=2560, qk_norm=False, tied_head=True, rope_theta=1e5),
    "gpt2": dict(norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh", qkv_bias=True, o_bias=True, mlp_bias=True,
                 tied_head=True),
    "1m": dict(vocab_size=257, block_size=256, n_layer=4, n_head=2, n_embd=128),
}


@dataclass
class Config:
    stage: Literal["generate"] = "generate"
    model: Literal["smollm2-360m", "gpt2", "1m"] = "smollm2-360m"      # a shape; its weights are random
    work: str = "2x10,8x8,32x1"              # prompts x samples of each, one case after the other
    prompt_tokens: int = 120
    max_new_tokens: int = 60
    slots: int | None = None                 # None: all samples at once, at most 512
    peers: str = ""                          # beside transformers: generate, generate_batch, or both with a comma
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


def split(engine, prompts, samples, new, total, hw, B, C):
    """(seconds of a run by part: its prompts, the draws, and its other decoding, each measured alone; the rest is the host's;
    seconds of a step in the middle of a run)"""
    def a_step():
        engine.tick.zero_()
        engine.launch(B, C)
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


def main(argv):
    cfg = config.load(Config, argv)
    config.at_least(cfg, 1, "prompt_tokens max_new_tokens slots repeats")
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
        B, C = engine.shape(in_flight, int(context))      # of a step in the middle of a run
        parts, step = split(engine, prompts, N, cfg.max_new_tokens, ours, hw, B, C)
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
