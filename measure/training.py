"""Steps of train.py, on text and on examples, beside their limit and other ways to train."""
import functools
import json
import statistics
from dataclasses import fields
from pathlib import Path

import hf
import tasks
from measure import peers
from measure.ceilings import devices, matmul_peak, on_meta, peak
from measure.runs import ROOT, WARM_UP, Work, a_peer, a_run, as_flags, in_turn, raw, steps_alone
from measure.synthetic import SHAPES, random_model, write_text, write_tokenizer
from model import GPTConfig, add_lora
from runtime import checkpoint, config, hardware
from runtime.config import BadInput
from runtime.tokenizer import Tokenizer


def train_work(cfg, hw, folder, handed):
    """train.py from scratch, on ids that are made up, unless a --dataset= is handed over."""
    folder, script, knobs = Path(folder), handed.config, {}
    shape = None if cfg.model == "auto" else SHAPES[cfg.model]                # auto: a config file's
    if shape is not None:
        c = GPTConfig(**shape)
        # from knobs that may be handed over
        follows = {"n_kv_head", "head_dim", "mlp_hidden"} - shape.keys()
        knobs = {f.name: getattr(c, f.name) for f in fields(script) if hasattr(c, f.name) and f.name not in follows | {"dropout"}}
        knobs["bias"] = c.qkv_bias
    if cfg.ladder or cfg.ablate or cfg.peers:
        # as the guides have it, and the peers
        knobs |= {"optimizer": "adamw", "learning_rate": 1e-3, "warmup_steps": 2}
    made = []
    if "dataset" in {flag[2:].partition("=")[0] for flag in handed.flags}:
        if cfg.peers:
            raise BadInput("The peers train on a text that bench.py makes up: leave --dataset out, or "
                           "--peers.")
    else:
        named = script.tokenizer or "bytes"
        n_vocab = 50257 if named == "gpt2" else Tokenizer(named).n_vocab if "tokenizer" in handed.given or shape is None else c.vocab_size
        if n_vocab != 257 and (named == "gpt2" or "tokenizer" not in handed.given):
            # GPT-2's own would have to be downloaded
            write_tokenizer(folder, n_vocab)
            made = as_flags(tokenizer=folder)
        made += as_flags(dataset=write_text(folder / "text", n_vocab, cfg.seed), data_dir=folder / "tokens")
    defaults = as_flags(**{k: v for k, v in knobs.items() if k not in handed.given})
    T, sequences = knobs.get("block_size", script.block_size) if "block_size" not in handed.given else script.block_size, script.sequences
    arguments = [*defaults, *handed.files, *handed.flags, *made, *steps_alone(cfg, folder),
                 *as_flags(init_from="scratch", num_epochs=None, patience=0, eval_interval=10**9, eval_tokens=T, dtype=hw.dtype)]
    what = f"{sequences} sequences of {T} tokens a step"
    return Work("train.py", arguments, folder, what, "tokens/s", cfg.steps, cfg.ranks or 1, sequences, script)


def sft_work(cfg, hw, folder, handed):
    """train.py on examples of unit conversion, as many as the steps need once, from random weights that are
    exported to the folder."""
    folder, recipe = Path(folder), [] if handed.files else [str(ROOT / "config/rft.py")]
    script = config.load(type(handed.config), recipe + handed.files + handed.flags)
    task, path = tasks.load("unit_conversion"), folder / "rft.json"
    questions = task.questions("train", n=script.sequences * (WARM_UP + cfg.steps))
    path.write_text(json.dumps([[q["question"], q["answer"], task.solution(q)] for q in questions]))
    rate = as_flags(learning_rate=1e-3, warmup_steps=2) if cfg.ladder or cfg.ablate else as_flags(learning_rate=1e-4)
    arguments = [*recipe, *rate, *handed.files, *handed.flags, *steps_alone(cfg, folder), *as_flags(
        init_from=folder, tokenizer="bytes", dataset=path, num_epochs=None, patience=0, eval_interval=10**9, dtype=hw.dtype)]
    what = f"{script.sequences} examples of unit conversion a step"
    return Work("train.py", arguments, folder, what, "tokens/s", cfg.steps, cfg.ranks or 1, script.sequences, script)


def bench_training(cfg, hw, folder, handed, say):
    """Tokens a second (of examples without padding) within steps, the fetching of batches included: of theirs
    without. Peers of train have the same shape and text; of sft the same weights, rows and labels. Both sides
    AdamW."""
    work, runs = (train_work if cfg.stage == "train" else sft_work)(cfg, hw, folder, handed), []
    say(f"{work.what}, {work.steps} steps a run after {WARM_UP}, {hw.dtype} on {hw.name}")

    def ours():
        runs.append(a_run(work))
        return runs[-1]["rate"]

    def theirs(peer):                        # in micro-batches as large as ours had to be
        settings, c = runs[-1]["settings"], checkpoint.read_model(work.out)["architecture"]
        if peer == "nanogpt" and not peers.is_gpt2(c):
            raise BadInput("--peers=nanogpt is GPT-2's architecture alone: give --model=gpt2 or gpt2-1m, and "
                           "no knob that changes it.")
        model = folder
        if cfg.stage == "train" and peer == "trainer" and not (model := Path(folder) / "peer").exists():
            hf.export(random_model(GPTConfig(**c), hardware.setup("cpu", compile=False)), model)
        data = Path(folder) / ("text" if cfg.stage == "train" else "rft.json")
        return a_peer(cfg, hw, work, peer, runs[-1]["units"], architecture=c, model=str(model), data=str(data),
                      lora_rank=settings["lora_rank"], block_size=settings["block_size"], batch_size=settings["micro_batch"],
                      accumulation=work.sequences // settings["micro_batch"])
    rates = in_turn({"nanoRFT": ours} | {name: functools.partial(theirs, name) for name in cfg.peers}, cfg.repeats, work.unit, say)
    about, rate = checkpoint.read_model(work.out), statistics.median(rates["nanoRFT"])
    model = on_meta(GPTConfig(**about["architecture"]))
    if about["lora"]:
        add_lora(model, **about["lora"])
    # at the length that sequences have on average
    flops = model.flops_per_token(runs[0]["units"] / work.sequences)
    step = statistics.median(run["step_s"] for run in runs)
    n = devices(hw, work.ranks)
    limit, mfu = n * matmul_peak(hw) / flops, rate * flops / peak(hw) / n
    say(f"{flops / 1e6:,.1f} MFLOP a token: MFU {mfu:.1%}, a step {1e3 * step:,.1f} ms; at a large product's "
        f"speed {limit:,.0f} tokens/s")
    return {"what": work.what, "unit": work.unit, "rates": rates, "limit": limit, "share": rate / limit, "mfu": mfu, "step_s": step,
            "flops_per_token": flops, "peak_memory_gb": statistics.median(run["peak_memory_gb"] for run in runs),
            "settings": runs[0]["settings"], "repeats": raw(runs), "also": f"MFU {mfu:.1%}, a step {1e3 * step:,.0f} ms"}
