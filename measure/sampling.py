"""Speed of the engine, with what its time goes to, and of datagen.py, beside their limit and transformers."""
import functools
import gc
import json
import statistics
from dataclasses import dataclass

import torch

import hf
import tasks
from engine import Engine, Packed, Request, Sampling
from measure import peers
from measure.ceilings import clock, devices, matmul_peak, read_bandwidth, sampling_limit
from measure.runs import ROOT, as_flags, in_turn, process, processes, seconds_of, small
from measure.synthetic import SHAPES, random_model
from model import GPTConfig
from questions import questions_of
from rollout import requests_of
from runtime import guard
from sampler import draw


@dataclass
class Case:
    """What every side does: `samples` of `new` tokens each for every prompt."""
    prompts: list
    samples: int
    new: int

    @property
    def tokens(self):
        return len(self.prompts) * self.samples * self.new


class Ours:
    name = "engine"

    def __init__(self, model, cfg, hw, rows):
        slots = cfg.slots or min(rows, 512)
        context = cfg.prompt_tokens + cfg.max_new_tokens
        self.engine = Engine(model, slots, context, Sampling(), cfg.seed, hw.sampling_dtype)

    def run(self, prompts, samples, new):
        requests = [Request(p, samples, i, new) for i, p in enumerate(prompts)]
        return sum(len(s.ids) for s in self.engine.generate(requests))


# --- what a run's time goes to ---

def run_step(engine, shape):
    engine.step_index.zero_()
    engine.launch(*shape, engine.sampling)


def time_draw(engine, rows, hw):
    """Return the median seconds of drawing a token for each row."""
    logits = torch.randn(rows, engine.config.vocab_size, device=hw.device)
    noise = engine.noise[:rows, 0]
    return statistics.median(clock(lambda: draw(logits, noise, engine.sampling), hw)[0] for _ in range(5))


@torch.inference_mode()
def time_products(engine, rows, length, hw):
    """Return the median seconds of a step's matrix products alone, on a CPU; the rows read `length` positions.

    What is left of a step is overhead.
    """
    c = engine.config
    modules = [*engine.model.modules(), engine.head]
    linears = [module for module in modules if isinstance(module, Packed | torch.nn.Linear)]
    inputs = [torch.randn(rows, 1, linear.weight.shape[1]).to(engine.dtype) for linear in linears]
    queries = (rows * c.n_kv_head, c.n_head // c.n_kv_head)
    q = torch.randn(*queries, c.head_dim).to(engine.dtype)
    weights = torch.randn(*queries, length).to(engine.dtype)

    def products():
        for linear, x in zip(linears, inputs):
            linear(x)
        for k, v in zip(engine.cache.k, engine.cache.v):
            k = k[:rows].flatten(0, 1)[:, :length]
            v = v[:rows].flatten(0, 1)[:, :length]
            torch.bmm(q, k.transpose(1, 2))
            torch.bmm(weights, v)
    return statistics.median(clock(products, hw)[0] for _ in range(5))


@torch.inference_mode()
def split_time(case, engine, shape, hw):
    """Return {part: seconds} of a run and the seconds of a step of this shape (B, RowGroups).

    The parts are its prompts, its draws (where they are not part of a step's CUDA graph) and its other decoding,
    each measured alone.
    """
    prompts = [(i % engine.slots, prompt[:-1]) for i, prompt in enumerate(case.prompts)]
    prefill = clock(lambda: engine.prefill(prompts), hw)[0]
    run_step(engine, shape)
    step = statistics.median(clock(lambda: run_step(engine, shape), hw)[0] for _ in range(15))
    one_draw = time_draw(engine, shape[0], hw)
    steps = case.tokens / shape[0]
    if engine.cuda_graphs:
        return {"prefill": prefill, "decode": steps * step}, step
    return {"prefill": prefill, "decode": steps * (step - one_draw), "draw": steps * one_draw}, step


# --- the engine beside transformers ---

def race(case, sides, repeats, hw):
    """Return {side: seconds of its runs} and {side: why it failed}. The sides run in turn."""
    times = {}
    failed = {}
    for repeat in range(repeats + 1):        # the first is a warm-up, in which shapes are recorded
        for side in sides:
            if side.name in failed:
                continue
            try:
                seconds, tokens = clock(lambda: side.run(case.prompts, case.samples, case.new), hw)
                assert tokens == case.tokens, f"{tokens} tokens"
                if repeat:
                    times.setdefault(side.name, []).append(seconds)
            except Exception as e:
                if side is sides[0]:
                    raise
                failed[side.name] = f"{type(e).__name__}: {e}".splitlines()[0]
    return times, failed


def engine_figures(case, engine, seconds, bandwidth, hw):
    """Return the figures of the engine, whose runs take so many seconds, and a line that tells them."""
    P = len(case.prompts)
    prompt_tokens = len(case.prompts[0])
    work = (P, prompt_tokens, case.samples, case.new)
    limit, reading, in_flight = sampling_limit(engine.config, hw, *work, engine.slots)
    nominal = hw.bandwidth * 1e12 if hw.bandwidth else bandwidth
    mbu = reading * bandwidth / nominal / seconds
    floor = reading * in_flight / case.tokens
    context = int(prompt_tokens + case.new / 2)
    shape = engine.step_shape([context] * in_flight)                   # of a step in the middle of a run
    parts, step = split_time(case, engine, shape, hw)
    parts["host"] = seconds - sum(parts.values())
    overhead = None
    in_step = f"limit {1e3 * floor:.2f}"
    if hw.device.type == "cpu":
        products = time_products(engine, shape[0], shape[1][0].length, hw)
        overhead = 1e3 * (step - products)
        in_step += f", products alone {1e3 * products:.2f}"
    figures = {
        "work": f"{P}x{case.samples}",
        "tokens_per_s": case.tokens / seconds,
        "limit": case.tokens / limit,
        "mbu": mbu,
        "step_ms": 1e3 * step,
        "floor_ms": 1e3 * floor,
        "overhead_ms": overhead,
    }
    figures |= {f"{part}_s": value for part, value in parts.items()}
    shares = ", ".join(f"{part} {value / seconds:.0%}" for part, value in parts.items())
    line = (f"{P} prompts x {case.samples}: {case.tokens / seconds:,.0f} tokens/s, {limit / seconds:.0%} of the limit "
            f"of {case.tokens / limit:,.0f}, MBU {mbu:.0%}; {shares}; "
            f"a step of {in_flight} rows {1e3 * step:.2f} ms ({in_step})")
    return figures, line


def bench_case(cfg, hw, folder, case, sides, bandwidth, say):
    """Return the figures of one case, of all sides; the engine is the first of them."""
    times, failed = race(case, sides, cfg.repeats, hw)
    figures, line = engine_figures(case, sides[0].engine, statistics.median(times["engine"]), bandwidth, hw)
    if "generate_batch" in cfg.peers:
        try:
            job = dict(prompts=case.prompts, samples=case.samples, max_new_tokens=case.new)
            seconds = seconds_of("generate_batch", cfg, hw, folder, **job)
            times["generate_batch"] = seconds[1:]                      # the first is a warm-up
        except guard.Failure as e:
            failed["generate_batch"] = str(e)
    figures["seconds"] = times
    figures["failed"] = failed
    say(f"\n{line}")
    for peer, seconds in times.items():
        if peer == "engine":
            continue
        ratios = sorted(b / a for a, b in zip(times["engine"][-len(seconds):], seconds))
        ratio = figures[f"over_{peer}"] = statistics.median(ratios)
        say(f"  {peer}: {case.tokens / statistics.median(seconds):,.0f} tokens/s; "
            f"the engine is {ratio:.2f} times as fast ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    for peer, reason in failed.items():
        say(f"  {peer}: failed ({reason})")
    return figures


def bench_generate(cfg, hw, folder, handed, say):
    """Measure tokens a second of the engine and of transformers, and what a run's time goes to."""
    c = GPTConfig(**SHAPES[cfg.model])
    bandwidth = read_bandwidth(hw)
    flops = matmul_peak(hw)
    torch.manual_seed(cfg.seed)
    model = random_model(c, hw)
    say(f"{model.n_params():,} parameters, {hw.sampling_dtype} on {hw.name}; prompts of {cfg.prompt_tokens}, "
        f"{cfg.max_new_tokens} new tokens a sample; "
        f"measured {bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.2f} TFLOP/s.")
    others = [peers.SAMPLERS[name](folder, hw) for name in cfg.peers if name in peers.SAMPLERS]
    cases = []
    rates = {}
    for work in cfg.work.split(","):
        P, N = map(int, work.split("x"))
        prompts = torch.randint(c.vocab_size, (P, cfg.prompt_tokens)).tolist()
        case = Case(prompts, N, cfg.max_new_tokens)
        sides = [Ours(model, cfg, hw, P * N), *others]
        figures = bench_case(cfg, hw, folder, case, sides, bandwidth, say)
        del sides
        cases.append(figures)
        for name, times in figures["seconds"].items():
            side = "nanoRFT" if name == "engine" else name
            rates[f"{figures['work']} {side}"] = [case.tokens / seconds for seconds in times]
        gc.collect()                         # the engine's memory is the next one's
    first = cases[0]
    return {
        "what": f"{cfg.work}, prompts of {cfg.prompt_tokens}, {cfg.max_new_tokens} new tokens",
        "unit": "tokens/s",
        "rates": rates,
        "limit": first["limit"],
        "share": first["tokens_per_s"] / first["limit"],
        "cases": cases,
        "bandwidth": bandwidth,
        "flops": flops,
        "also": f"MBU {first['mbu']:.1%}, a step {first['step_ms']:,.1f} ms",
    }


# --- datagen.py beside a loop over transformers' generate ---

def run_datagen(cfg, hw, folder, handed, num_questions, ranks):
    """Return the figures of a run of datagen.py."""
    arguments = as_flags(num_questions=num_questions, temperature=1)
    arguments += [*handed.files, *handed.flags, "--overwrite", "--json"]
    arguments += as_flags(init_from=cfg.run or folder, task="unit_conversion", output=f"{folder}/rft.json")
    arguments += as_flags(max_new_tokens=cfg.max_new_tokens, few_shot=0, dtype=hw.dtype, device=cfg.device)
    arguments += as_flags(seed=cfg.seed)
    if not cfg.run:
        arguments += as_flags(tokenizer="bytes")
    script = [str(ROOT / "datagen.py")]
    printed = process(script, arguments, ranks, "datagen.py", fine=(0, 1))       # 1: nothing was right
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise guard.Failure("datagen.py failed: run it by itself to see why.")
    return json.loads(lines[-1])


def count_samples(cfg, figures):
    """Return how many samples datagen.py made: verified ones, if a model is given that can answer."""
    return figures["verdicts"].get("verified", 0) if cfg.run else figures["attempts"]


def bench_datagen(cfg, hw, folder, handed, say):
    """Measure samples a second of datagen.py, without the start of the processes."""
    found = hf.find(cfg.run or folder)
    tokenizer = found.tokenizer(None if cfg.run else "bytes")
    task = tasks.load("unit_conversion")
    num_questions = handed.config.num_questions if "num_questions" in handed.given else 100
    samples = handed.config.oversample
    new = cfg.max_new_tokens
    questions = questions_of(task, "train", num_questions)
    prompts = [request.ids for request in requests_of(tokenizer, task, questions)]
    lengths = [len(prompt) for prompt in prompts]
    ranks = cfg.ranks or (torch.get_num_threads() if hw.device.type == "cpu" and small(found.config) else 1)
    what = (f"{len(prompts)} questions x {samples}, prompts of {min(lengths)}-{max(lengths)} tokens, "
            f"at most {new} new ones")
    unit = "verified samples/s" if cfg.run else "samples/s"
    say(f"{what}, {hw.dtype} on {hw.name}; {processes(ranks)}")
    runs = []                                # figures of each

    def ours():
        figures = run_datagen(cfg, hw, folder, handed, num_questions, ranks)
        runs.append(figures)
        return count_samples(cfg, figures) / figures["seconds"]
    sides = {"nanoRFT": ours}
    if cfg.peers:
        hf.export(found.load(), f"{folder}/peer")
        peer = peers.Generate(f"{folder}/peer", hw)

        def loop(at_once):
            seconds, verified = clock(lambda: peers.verified_in_a_loop(
                peer, hw, tokenizer, task, questions, prompts, samples, new, at_once), hw)
            return (verified if cfg.run else len(prompts) * samples) / seconds
        for name in cfg.peers:
            at_once = int(name.removeprefix("generate_"))
            sides[f"loop over generate, {at_once} sequences at a time"] = functools.partial(loop, at_once)
    rates = in_turn(sides, cfg.repeats, unit, say, warm_up=1 if len(sides) > 1 else 0)
    last = runs[-1]
    sampled = last["tokens_per_s"] * last["seconds"] / last["attempts"]
    per_device = -(-len(prompts) // devices(hw, ranks))                # questions
    least, *_ = sampling_limit(found.config, hw, per_device, statistics.fmean(lengths), samples, sampled)
    rate = statistics.median(rates["nanoRFT"])
    limit = count_samples(cfg, last) / least
    say(f"{sampled:.0f} tokens a sample; {rate / limit:.1%} of the limit of {limit:,.0f} {unit}")
    return {
        "what": what,
        "unit": unit,
        "rates": rates,
        "limit": limit,
        "share": rate / limit,
        "tokens_per_s": last["tokens_per_s"],
        "also": f"{last['tokens_per_s']:,.0f} new tokens/s, {processes(ranks)}",
    }
