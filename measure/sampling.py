"""Measure the engine, with a breakdown of its time, and datagen.py against their limits and transformers."""
import functools
import gc
import json
import statistics
from dataclasses import dataclass

import torch

import hub.weights
import tasks
from engine import Engine, Request, Sampling
from layers.packed import takes_half_weights
from engine.sampler import draw
from measure import peers
from measure.ceilings import clock, devices, matmul_peak, read_bandwidth, sampling_limit
from measure.runs import ROOT, alternate, as_flags, is_small, process, processes
from measure.synthetic import SHAPES, random_model
from model import GPTConfig
from rollouts.pipeline import requests_of
from rollouts.questions import questions_of
from runtime import guard, memory


@dataclass
class Case:
    """The work of every side: `samples` completions of `new` tokens for each prompt."""
    prompts: list
    samples: int
    new: int

    @property
    def tokens(self):
        return len(self.prompts) * self.samples * self.new


def run_engine(engine, prompts, samples, new):
    """Sample `new` tokens for every completion, and return the total number of tokens."""
    requests = [Request(prompt, samples, key, new) for key, prompt in enumerate(prompts)]
    return sum(len(sample.ids) for sample in engine.generate(requests))


def rate_of(run, case, hw):
    """Return the tokens a second of a run of the case. Raises Failure if it sampled another number."""
    seconds, tokens = clock(lambda: run(case.prompts, case.samples, case.new), hw)
    if tokens != case.tokens:
        raise guard.Failure(f"it sampled {tokens} tokens instead of {case.tokens}")
    return tokens / seconds


def run_step(engine, shape, position):
    """Run one decoding step of this shape, with all rows at this position and at step index 0."""
    engine.runner.step_index.zero_()
    engine.runner.state[1, :shape[0]] = position
    engine.runner.launch(*shape, engine.sampling)


def median_seconds(function, hw, calls):
    return statistics.median(clock(function, hw)[0] for _ in range(calls))


@torch.inference_mode()
def split_time(case, engine, context, in_flight, hw):
    """Return ({part: seconds of a run}, seconds of a step of in_flight rows that read `context` positions).
    The parts, each timed on its own, are prefill, decode, and draw where it is not in the step's CUDA
    graph."""
    shape = engine.runner.step_shape([context] * in_flight)
    rows = shape[0]
    prompts = [(i % engine.slots, prompt[:-1]) for i, prompt in enumerate(case.prompts)]
    prefill, _ = clock(lambda: engine.runner.prefill(prompts), hw)
    one_step = functools.partial(run_step, engine, shape, context - 1)
    one_step()
    step = median_seconds(one_step, hw, 15)
    steps = case.tokens / rows
    if engine.cuda_graphs:
        return {"prefill": prefill, "decode": steps * step}, step
    logits = torch.randn(rows, engine.runner.config.vocab_size, device=hw.device)
    noise = engine.runner.noise[:rows, 0]
    one_draw = median_seconds(lambda: draw(logits, noise, engine.sampling), hw, 5)
    return {"prefill": prefill, "decode": steps * (step - one_draw), "draw": steps * one_draw}, step


def engine_figures(case, engine, rate, hw, log):
    """Log and return the figures of the engine. rate: median tokens a second of its runs."""
    P = len(case.prompts)
    prompt_tokens = len(case.prompts[0])
    seconds = case.tokens / rate
    least, decode, in_flight = sampling_limit(
        engine.runner.config, hw, P, prompt_tokens, case.samples, case.new, engine.slots,
        2 if engine.half_weights else None)
    limit = case.tokens / least
    bandwidth = read_bandwidth(hw)
    nominal = hw.bandwidth * 1e12 if hw.bandwidth else bandwidth
    mbu = decode * bandwidth / nominal / seconds
    floor = decode * in_flight / case.tokens
    middle = int(prompt_tokens + case.new / 2)                   # of a run
    parts, step = split_time(case, engine, middle, in_flight, hw)
    parts["host"] = seconds - sum(parts.values())
    shares = ", ".join(f"{part} {value / seconds:.0%}" for part, value in parts.items())
    log(f"{rate / limit:.0%} of the limit of {limit:,.0f}, MBU {mbu:.0%}; {engine.format}; {shares}; "
        f"a step of {in_flight} rows {1e3 * step:.2f} ms (limit {1e3 * floor:.2f})")
    return {"work": f"{P}x{case.samples}", "tokens_per_s": rate, "limit": limit, "mbu": mbu,
            "step_ms": 1e3 * step, "floor_ms": 1e3 * floor, "fused": engine.runner.fused,
            "format": engine.format} | {f"{part}_s": value for part, value in parts.items()}


def bench_case(cfg, hw, model, others, work, log):
    """Measure one case, such as 2x10. Return (figures of the engine, {side: tokens a second of its runs}).
    others: {peer: Generate}."""
    num_prompts, samples = map(int, work.split("x"))
    prompts = torch.randint(model.config.vocab_size, (num_prompts, cfg.prompt_tokens)).tolist()
    case = Case(prompts, samples, cfg.max_new_tokens)
    slots = min(num_prompts * samples, 512)
    context = cfg.prompt_tokens + cfg.max_new_tokens
    engine = Engine(model, slots, context, Sampling(), seed=cfg.seed, dtype=hw.sampling_dtype,
                    half_weights=cfg.dtype == "auto")
    runs = {"nanoRFT": functools.partial(run_engine, engine)}
    runs |= {name: peer.run for name, peer in others.items()}
    sides = {name: functools.partial(rate_of, run, case, hw) for name, run in runs.items()}
    log(f"\n{num_prompts} prompts x {samples}")
    rates = alternate(sides, cfg.repeats, "tokens/s", log, warm_up=1)  # which captures CUDA graphs
    ours = rates["nanoRFT"]
    figures = engine_figures(case, engine, statistics.median(ours), hw, log)
    for name in rates.keys() - {"nanoRFT"}:
        figures[f"over_{name}"] = statistics.median(a / b for a, b in zip(ours, rates[name]))
    return figures, rates


def bench_generate(cfg, hw, folder, script_args, log):
    """Measure tokens a second of the engine and of transformers, and break down the engine's time."""
    c = GPTConfig(**SHAPES[cfg.model])
    bandwidth = read_bandwidth(hw)
    flops = matmul_peak(hw)
    torch.manual_seed(cfg.seed)
    model = random_model(c, hw)
    log(f"{model.n_params():,} parameters, {hw.sampling_dtype} on {hw.name}; prompts of {cfg.prompt_tokens}, "
        f"{cfg.max_new_tokens} new tokens a sample; "
        f"measured {bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.2f} TFLOP/s.")
    others = {name: peers.Generate(folder, hw, name) for name in cfg.peers}
    cases = []
    rates = {}
    for work in cfg.work.split(","):
        figures, measured = bench_case(cfg, hw, model, others, work, log)
        cases.append(figures)
        rates |= {f"{work} {name}": values for name, values in measured.items()}
        gc.collect()                         # frees the engine's memory for the next one
    first = cases[0]
    description = f"{cfg.work}, prompts of {cfg.prompt_tokens}, {cfg.max_new_tokens} new tokens"
    also = f"MBU {first['mbu']:.1%}, a step {first['step_ms']:,.1f} ms"
    return {"what": description, "unit": "tokens/s", "rates": rates, "limit": first["limit"],
            "share": first["tokens_per_s"] / first["limit"], "cases": cases, "bandwidth": bandwidth,
            "flops": flops, "also": also}


# --- datagen.py against a loop over transformers' generate ---

def run_datagen(cfg, hw, folder, script_args, num_questions, ranks):
    """Run datagen.py and return the figures of its --json."""
    arguments = as_flags(num_questions=num_questions, temperature=1)
    arguments += [*script_args.files, *script_args.flags]
    arguments += as_flags(
        init_from=cfg.run or folder, task="unit_conversion", output=f"{folder}/rft.json", overwrite=True,
        max_new_tokens=cfg.max_new_tokens, few_shot=0, dtype=cfg.dtype, device=cfg.device, seed=cfg.seed,
        json=True, **({} if cfg.run else {"tokenizer": "bytes"}))
    printed = process([str(ROOT / "datagen.py")], arguments, ranks, fine=(0, 1))       # 1: none verified
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise guard.Failure("datagen.py failed: run it by itself to see why.")
    return json.loads(lines[-1])


def count_samples(cfg, figures):
    """Return the number of samples of datagen.py: with --run the verified ones, else all."""
    return figures["verdicts"].get("verified", 0) if cfg.run else figures["attempts"]


def bench_datagen(cfg, hw, folder, script_args, log):
    """Measure samples a second of datagen.py, excluding the start of the processes."""
    source = hub.find(cfg.run or folder)
    tokenizer = source.tokenizer(None if cfg.run else "bytes")
    task = tasks.load("unit_conversion")
    num_questions = script_args.config.num_questions if "num_questions" in script_args.given else 100
    samples = script_args.config.oversample
    new = cfg.max_new_tokens
    questions = questions_of(task, "train", num_questions, cfg.seed)
    prompts = [request.ids for request in requests_of(tokenizer, task, questions)]
    lengths = [len(prompt) for prompt in prompts]
    small_on_cpu = hw.device.type == "cpu" and is_small(source.config)
    ranks = cfg.ranks or (torch.get_num_threads() if small_on_cpu else 1)
    description = (f"{len(prompts)} questions x {samples}, prompts of {min(lengths)}-{max(lengths)} tokens, "
                   f"at most {new} new ones")
    unit = "verified samples/s" if cfg.run else "samples/s"
    log(f"{description}, {hw.dtype} on {hw.name}; {processes(ranks)}")
    runs = []                                # figures of each

    def ours():
        figures = run_datagen(cfg, hw, folder, script_args, num_questions, ranks)
        runs.append(figures)
        return count_samples(cfg, figures) / figures["seconds"]
    sides = {"nanoRFT": ours}
    if cfg.peers:
        hub.weights.export(source.load(), f"{folder}/peer")
        peer = peers.Generate(f"{folder}/peer", hw)

        def loop(at_once):
            sample = functools.partial(peers.rejection_sampling, peer, tokenizer, task, questions, prompts,
                                       samples=samples, new=new, at_once=at_once)
            seconds, verified = clock(sample, hw)
            return (verified if cfg.run else len(prompts) * samples) / seconds
        for name in cfg.peers:
            at_once = int(name.removeprefix("generate_"))
            sides[f"loop over generate, {at_once} sequences at a time"] = functools.partial(loop, at_once)
    rates = alternate(sides, cfg.repeats, unit, log, warm_up=1 if len(sides) > 1 else 0)
    last = runs[-1]
    tokens = last["tokens_per_s"] * last["seconds"] / last["attempts"]      # of a sample
    per_device = -(-len(prompts) // devices(hw, ranks))                # questions
    n_params = memory.n_params(source.config)
    half = cfg.dtype == "auto" and takes_half_weights(n_params, hw.device.type, hw.sampling_dtype)
    least, *_ = sampling_limit(source.config, hw, per_device, statistics.fmean(lengths), samples, tokens,
                               weight_size=2 if half else None)
    rate = statistics.median(rates["nanoRFT"])
    limit = count_samples(cfg, last) / least
    log(f"{tokens:.0f} tokens a sample; {rate / limit:.1%} of the limit of {limit:,.0f} {unit}")
    also = f"{last['tokens_per_s']:,.0f} new tokens/s, {processes(ranks)}"
    return {"what": description, "unit": unit, "rates": rates, "limit": limit, "share": rate / limit,
            "tokens_per_s": last["tokens_per_s"], "also": also}
