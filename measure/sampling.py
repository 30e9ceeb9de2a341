"""What sampling reaches beside its limit and transformers: the engine, with what its time goes to, and
datagen.py."""
import functools
import gc
import json
import statistics

import torch

import hf
import tasks
from engine import Engine, Packed, Request, Sampling, draw
from questions import questions_of
from rollout import requests_of
from measure import peers
from measure.ceilings import clock, devices, matmul_peak, read_bandwidth, sampling_limit
from measure.runs import ROOT, as_flags, in_turn, process, processes, seconds_of, small
from measure.synthetic import SHAPES, random_model
from model import GPTConfig
from runtime import guard


class Ours:
    name = "engine"

    def __init__(self, model, cfg, hw, rows):
        slots = cfg.slots or min(rows, 512)
        self.engine = Engine(model, slots, cfg.prompt_tokens + cfg.max_new_tokens, Sampling(), cfg.seed, hw.sampling_dtype)

    def run(self, prompts, samples, new):
        requests = [Request(p, samples, i, new) for i, p in enumerate(prompts)]
        return sum(len(s.ids) for s in self.engine.generate(requests))


def split(engine, prompts, samples, new, total, hw, B, groups):
    """(seconds of a run by part: its prompts, the draws (where they are not part of a step's CUDA graph), and
    its other decoding, each measured alone; the rest is the host's; seconds of a step in the middle of a
    run)"""
    def a_step():
        engine.tick.zero_()
        engine.launch(B, groups)
    with torch.inference_mode():
        prefill = clock(lambda: engine.prefill([(i % engine.slots, p[:-1]) for i, p in enumerate(prompts)]), hw)[0]
        a_step()
        steps = [clock(a_step, hw)[0] for _ in range(15)]
        logits = torch.randn(B, engine.c.vocab_size, device=hw.device)
        draws = [clock(lambda: draw(logits, engine.noise[:B, 0], engine.sampling), hw)[0] for _ in range(5)]
    rounds = new * len(prompts) * samples / B
    step, one_draw = statistics.median(steps), statistics.median(draws)
    parts = {"prefill": prefill, "decode": rounds * (step - one_draw), "draw": rounds * one_draw}
    if engine.cuda_graphs:
        parts = {"prefill": prefill, "decode": rounds * step}
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


def bench_generate(cfg, hw, folder, handed, say):
    """Tokens a second of the engine and of transformers, beside the limit, with what a run's time goes to."""
    c, cases, rates = GPTConfig(**SHAPES[cfg.model]), [], {}
    bandwidth, flops = read_bandwidth(hw), matmul_peak(hw)
    torch.manual_seed(cfg.seed)
    model = random_model(c, hw)
    say(f"{model.n_params():,} parameters, {hw.sampling_dtype} on {hw.name}; prompts of {cfg.prompt_tokens}, "
        f"{cfg.max_new_tokens} new tokens a sample; measured {bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.2f} "
        "TFLOP/s.")
    others = [peers.SAMPLERS[name](folder, hw) for name in cfg.peers if name in peers.SAMPLERS]
    for P, N in [map(int, case.split("x")) for case in cfg.work.split(",")]:
        prompts = torch.randint(c.vocab_size, (P, cfg.prompt_tokens)).tolist()
        sides, times, failed = [Ours(model, cfg, hw, P * N), *others], {}, {}
        # the first is a warm-up, in which shapes are recorded
        for repeat in range(cfg.repeats + 1):
            for side in [side for side in sides if side.name not in failed]:
                try:
                    seconds, tokens = clock(lambda: side.run(prompts, N, cfg.max_new_tokens), hw)
                    assert tokens == P * N * cfg.max_new_tokens, f"{tokens} tokens"
                    if repeat:
                        times.setdefault(side.name, []).append(seconds)
                except Exception as e:
                    if side is sides[0]:
                        raise
                    failed[side.name] = f"{type(e).__name__}: {e}".splitlines()[0]
        engine, ours, new = sides[0].engine, statistics.median(times["engine"]), P * N * cfg.max_new_tokens
        limit, reading, in_flight = sampling_limit(c, hw, P, cfg.prompt_tokens, N, cfg.max_new_tokens, engine.slots)
        nominal = hw.bandwidth * 1e12 if hw.bandwidth else bandwidth
        context, floor, mbu = cfg.prompt_tokens + cfg.max_new_tokens / 2, reading * in_flight / new, reading * bandwidth / nominal / ours
        B, groups = engine.shape([int(context)] * in_flight)           # of a step in the middle of a run
        C = groups[0][2]
        parts, step = split(engine, prompts, N, cfg.max_new_tokens, ours, hw, B, groups)
        least = products(engine, B, C, hw) if hw.device.type == "cpu" else None
        if "generate_batch" in cfg.peers:
            try:
                times["generate_batch"] = seconds_of("generate_batch", cfg, hw, folder, prompts=prompts, samples=N,
                                                     # the first is a warm-up
                                                     max_new_tokens=cfg.max_new_tokens)[1:]
            except guard.Failure as e:
                failed["generate_batch"] = str(e)
        row = {"work": f"{P}x{N}", "tokens_per_s": new / ours, "limit": new / limit, "mbu": mbu, "step_ms": 1e3 * step,
               "floor_ms": 1e3 * floor, "overhead_ms": least and 1e3 * (step - least), **{f"{k}_s": v for k, v in parts.items()},
               "seconds": times, "failed": failed}
        say(f"\n{P} prompts x {N}: {new / ours:,.0f} tokens/s, {limit / ours:.0%} of the limit of "
            f"{new / limit:,.0f}, MBU {mbu:.0%}; "
            + ", ".join(f"{k} {v / ours:.0%}" for k, v in parts.items())
            + f"; a step of {in_flight} rows {1e3 * step:.2f} ms (limit {1e3 * floor:.2f}"
            + (f", products alone {1e3 * least:.2f})" if least else ")"))
        for peer in [name for name in times if name != "engine"]:
            ratios = sorted(b / a for a, b in zip(times["engine"][-len(times[peer]):], times[peer]))
            row[f"over_{peer}"] = statistics.median(ratios)
            say(f"  {peer}: {new / statistics.median(times[peer]):,.0f} tokens/s; the engine is "
                f"{statistics.median(ratios):.2f} times as fast ({ratios[0]:.2f}-{ratios[-1]:.2f})")
        for peer, reason in failed.items():
            say(f"  {peer}: failed ({reason})")
        cases.append(row)
        rates |= {f"{P}x{N} "
                  f"{'nanoRFT' if name == 'engine' else name}": [new / s for s in seconds] for name, seconds in times.items()}
        del sides, engine
        gc.collect()
    first = cases[0]
    return {"what": f"{cfg.work}, prompts of {cfg.prompt_tokens}, {cfg.max_new_tokens} new "
                    "tokens", "unit": "tokens/s", "rates": rates,
            "limit": first["limit"], "share": first["tokens_per_s"] / first["limit"], "cases": cases, "bandwidth": bandwidth,
            "flops": flops, "also": f"MBU {first['mbu']:.1%}, a step {first['step_ms']:,.1f} ms"}


def bench_datagen(cfg, hw, folder, handed, say):
    """Samples a second, verified ones if a model is given that can answer, without the start of the
    processes."""
    found, script = hf.find(cfg.run or folder), handed.config
    tokenizer, task = found.tokenizer(None if cfg.run else "bytes"), tasks.load("unit_conversion")
    asked, oversample, new = (script.num_questions if "num_questions" in handed.given else 100), script.oversample, cfg.max_new_tokens
    questions = questions_of(task, "train", asked)
    prompts = [r.ids for r in requests_of(tokenizer, task, questions)]
    ranks = cfg.ranks or (torch.get_num_threads() if hw.device.type == "cpu" and small(found.config) else 1)
    shortest, *_, longest = sorted(map(len, prompts))
    what = f"{len(prompts)} questions x {oversample}, prompts of {shortest}-{longest} tokens, at most {new} new ones"
    unit, done = "verified samples/s" if cfg.run else "samples/s", []
    say(f"{what}, {hw.dtype} on {hw.name}; {processes(ranks)}")

    def ours():
        arguments = [*as_flags(num_questions=asked, temperature=1), *handed.files, *handed.flags, "--overwrite", "--json", *as_flags(
            init_from=cfg.run or folder, task="unit_conversion", output=f"{folder}/rft.json", max_new_tokens=new, few_shot=0,
            dtype=hw.dtype, device=cfg.device, seed=cfg.seed, **({} if cfg.run else {"tokenizer": "bytes"}))]
        # 1: nothing was right
        said = process([str(ROOT / "datagen.py")], arguments, ranks, "datagen.py", fine=(0, 1))
        if not (last := [line for line in said.splitlines() if line.startswith("{")]):
            raise guard.Failure("datagen.py failed: run it by itself to see why.")
        done.append(json.loads(last[-1]))
        return units(done[-1]) / done[-1]["seconds"]

    def units(f):
        return f["verdicts"].get("verified", 0) if cfg.run else f["attempts"]
    sides = {"nanoRFT": ours}
    if cfg.peers:
        hf.export(found.load(), f"{folder}/peer")
        peer = peers.Generate(f"{folder}/peer", hw)

        def loop(at_once):
            seconds, verified = clock(lambda: peers.verified_in_a_loop(
                peer, hw, tokenizer, task, questions, prompts, oversample, new, at_once), hw)
            return (verified if cfg.run else len(prompts) * oversample) / seconds
        for name in cfg.peers:
            at_once = int(name.removeprefix("generate_"))
            sides[f"loop over generate, {at_once} sequences at a time"] = functools.partial(loop, at_once)
    rates = in_turn(sides, cfg.repeats, unit, say, warm_up=1 if len(sides) > 1 else 0)
    f = done[-1]
    sampled = f["tokens_per_s"] * f["seconds"] / f["attempts"]
    share = -(-len(prompts) // devices(hw, ranks))                       # of the questions, on each
    least, *_ = sampling_limit(found.config, hw, share, statistics.fmean(map(len, prompts)), oversample, sampled)
    rate, limit = statistics.median(rates["nanoRFT"]), units(f) / least
    say(f"{sampled:.0f} tokens a sample; {rate / limit:.1%} of the limit of {limit:,.0f} {unit}")
    return {"what": what, "unit": unit, "rates": rates, "limit": limit, "share": rate / limit, "tokens_per_s": f["tokens_per_s"],
            "also": f"{f['tokens_per_s']:,.0f} new tokens/s, {processes(ranks)}"}
