"""Speed of the engine, with what its time goes to, and of datagen.py, beside their limit and transformers."""
import functools
import gc
import json
import statistics
from dataclasses import dataclass

import torch

import hf
import tasks
from engine import Engine, Request, Sampling
from engine.generate import Packed
from engine.sampler import draw
from measure import peers
from measure.ceilings import clock, devices, matmul_peak, read_bandwidth, sampling_limit
from measure.runs import ROOT, as_flags, in_turn, process, processes, seconds_of, small
from measure.synthetic import SHAPES, random_model
from model import GPTConfig
from rollouts.pipeline import requests_of
from rollouts.questions import questions_of
from runtime import guard


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
    """The engine, with a slot for each sample, 512 at most."""
    name = "engine"

    def __init__(self, model, cfg, hw, rows):
        slots = cfg.slots or min(rows, 512)
        context = cfg.prompt_tokens + cfg.max_new_tokens
        self.engine = Engine(model, slots, context, Sampling(), seed=cfg.seed, dtype=hw.sampling_dtype)

    def run(self, prompts, samples, new):
        """Return how many tokens were sampled."""
        requests = [Request(prompt, samples, key, new) for key, prompt in enumerate(prompts)]
        return sum(len(sample.ids) for sample in self.engine.generate(requests))


# --- what a run's time goes to ---

def run_step(engine, shape):
    """Run one step of this shape, always at the same step index."""
    engine.step_index.zero_()
    engine.launch(*shape, engine.sampling)


def median_seconds(function, hw, calls):
    return statistics.median(clock(function, hw)[0] for _ in range(calls))


def time_draw(engine, rows, hw):
    """Return the median seconds of drawing a token for each row."""
    logits = torch.randn(rows, engine.config.vocab_size, device=hw.device)
    noise = engine.noise[:rows, 0]
    return median_seconds(lambda: draw(logits, noise, engine.sampling), hw, 5)


@torch.inference_mode()
def time_products(engine, rows, length, hw):
    """Return the median seconds of a step's matrix products alone, on a CPU; the rows read `length`
    positions. What is left of a step is overhead."""
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
    return median_seconds(products, hw, 5)


@torch.inference_mode()
def split_time(case, engine, shape, hw):
    """Return {part: seconds} of a run and the seconds of a step of this shape (B, RowGroups). The parts are
    its prompts, its draws (where they are not part of a step's CUDA graph) and its other decoding, each
    measured alone."""
    prompts = [(i % engine.slots, prompt[:-1]) for i, prompt in enumerate(case.prompts)]
    prefill, _ = clock(lambda: engine.prefill(prompts), hw)
    run_step(engine, shape)
    step = median_seconds(lambda: run_step(engine, shape), hw, 15)
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
    limit, decode, in_flight = sampling_limit(
        engine.config, hw, P, prompt_tokens, case.samples, case.new, engine.slots)
    nominal = hw.bandwidth * 1e12 if hw.bandwidth else bandwidth
    mbu = decode * bandwidth / nominal / seconds
    floor = decode * in_flight / case.tokens
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
        "decoding": engine.decoding,
    }
    figures |= {f"{part}_s": value for part, value in parts.items()}
    shares = ", ".join(f"{part} {value / seconds:.0%}" for part, value in parts.items())
    line = (f"{P} prompts x {case.samples}: {case.tokens / seconds:,.0f} tokens/s, "
            f"{limit / seconds:.0%} of the limit of {case.tokens / limit:,.0f}, MBU {mbu:.0%}; {shares}; "
            f"a step of {in_flight} rows {1e3 * step:.2f} ms ({in_step})")
    return figures, line


def bench_case(cfg, hw, folder, case, sides, bandwidth, log):
    """Measure one case and return the figures of all sides; the engine is the first of them."""
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
    log(f"\n{line}")
    for peer, seconds in times.items():
        if peer == "engine":
            continue
        engine_seconds = times["engine"][-len(seconds):]
        ratios = sorted(theirs / ours for ours, theirs in zip(engine_seconds, seconds))
        ratio = statistics.median(ratios)
        figures[f"over_{peer}"] = ratio
        log(f"  {peer}: {case.tokens / statistics.median(seconds):,.0f} tokens/s; "
            f"the engine is {ratio:.2f} times as fast ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    for peer, reason in failed.items():
        log(f"  {peer}: failed ({reason})")
    return figures


def bench_generate(cfg, hw, folder, script_args, log):
    """Measure tokens a second of the engine and of transformers, and what a run's time goes to."""
    c = GPTConfig(**SHAPES[cfg.model])
    bandwidth = read_bandwidth(hw)
    flops = matmul_peak(hw)
    torch.manual_seed(cfg.seed)
    model = random_model(c, hw)
    log(f"{model.n_params():,} parameters, {hw.sampling_dtype} on {hw.name}; prompts of {cfg.prompt_tokens}, "
        f"{cfg.max_new_tokens} new tokens a sample; "
        f"measured {bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.2f} TFLOP/s.")
    others = [peers.SAMPLERS[name](folder, hw) for name in cfg.peers if name in peers.SAMPLERS]
    cases = []
    rates = {}
    for work in cfg.work.split(","):
        num_prompts, samples = map(int, work.split("x"))
        prompts = torch.randint(c.vocab_size, (num_prompts, cfg.prompt_tokens)).tolist()
        case = Case(prompts, samples, cfg.max_new_tokens)
        sides = [Ours(model, cfg, hw, num_prompts * samples), *others]
        figures = bench_case(cfg, hw, folder, case, sides, bandwidth, log)
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

def run_datagen(cfg, hw, folder, script_args, num_questions, ranks):
    """Run datagen.py and return its figures."""
    arguments = as_flags(num_questions=num_questions, temperature=1)
    arguments += [*script_args.files, *script_args.flags, "--overwrite", "--json"]
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


def bench_datagen(cfg, hw, folder, script_args, log):
    """Measure samples a second of datagen.py, without the start of the processes."""
    source = hf.find(cfg.run or folder)
    tokenizer = source.tokenizer(None if cfg.run else "bytes")
    task = tasks.load("unit_conversion")
    num_questions = script_args.config.num_questions if "num_questions" in script_args.given else 100
    samples = script_args.config.oversample
    new = cfg.max_new_tokens
    questions = questions_of(task, "train", num_questions)
    prompts = [request.ids for request in requests_of(tokenizer, task, questions)]
    lengths = [len(prompt) for prompt in prompts]
    small_on_cpu = hw.device.type == "cpu" and small(source.config)
    ranks = cfg.ranks or (torch.get_num_threads() if small_on_cpu else 1)
    what = (f"{len(prompts)} questions x {samples}, prompts of {min(lengths)}-{max(lengths)} tokens, "
            f"at most {new} new ones")
    unit = "verified samples/s" if cfg.run else "samples/s"
    log(f"{what}, {hw.dtype} on {hw.name}; {processes(ranks)}")
    runs = []                                # figures of each

    def ours():
        figures = run_datagen(cfg, hw, folder, script_args, num_questions, ranks)
        runs.append(figures)
        return count_samples(cfg, figures) / figures["seconds"]
    sides = {"nanoRFT": ours}
    if cfg.peers:
        hf.export(source.load(), f"{folder}/peer")
        peer = peers.Generate(f"{folder}/peer", hw)

        def loop(at_once):
            arguments = (peer, hw, tokenizer, task, questions, prompts, samples, new, at_once)
            seconds, verified = clock(lambda: peers.verified_in_a_loop(*arguments), hw)
            return (verified if cfg.run else len(prompts) * samples) / seconds
        for name in cfg.peers:
            at_once = int(name.removeprefix("generate_"))
            sides[f"loop over generate, {at_once} sequences at a time"] = functools.partial(loop, at_once)
    rates = in_turn(sides, cfg.repeats, unit, log, warm_up=1 if len(sides) > 1 else 0)
    last = runs[-1]
    tokens = last["tokens_per_s"] * last["seconds"] / last["attempts"]      # of a sample
    per_device = -(-len(prompts) // devices(hw, ranks))                # questions
    least, *_ = sampling_limit(source.config, hw, per_device, statistics.fmean(lengths), samples, tokens)
    rate = statistics.median(rates["nanoRFT"])
    limit = count_samples(cfg, last) / least
    log(f"{tokens:.0f} tokens a sample; {rate / limit:.1%} of the limit of {limit:,.0f} {unit}")
    return {
        "what": what,
        "unit": unit,
        "rates": rates,
        "limit": limit,
        "share": rate / limit,
        "tokens_per_s": last["tokens_per_s"],
        "also": f"{last['tokens_per_s']:,.0f} new tokens/s, {processes(ranks)}",
    }
