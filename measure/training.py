"""Measure steps of train.py, on text and on examples, against their limit and other trainers."""
import functools
import json
import statistics
from dataclasses import fields
from pathlib import Path

import hub.weights
import tasks
from measure import peers
from measure.ceilings import devices, matmul_peak, peak
from measure.runs import (ROOT, WARM_UP, Work, alternate, as_flags, run_peer, run_script, shared_figures,
                          steps_alone)
from measure.synthetic import SHAPES, random_model, write_text, write_tokenizer
from model import GPTConfig
from runtime import checkpoint, config, hardware
from runtime.config import BadInput
from text import examples
from text.tokenizer import Tokenizer


def train_work(cfg, hw, folder, script_args):
    """Return the Work of train.py from scratch, on synthetic ids unless --dataset= is given."""
    folder = Path(folder)
    script = script_args.config
    shape = None if cfg.model == "auto" else SHAPES[cfg.model]                # auto: the config file's
    options = {} if shape is None else shape_options(script, shape)
    if cfg.ladder or cfg.ablate or cfg.peers:
        # as in the guides and the peers
        options |= {"optimizer": "adamw", "learning_rate": 1e-3, "warmup_steps": 2}
    data_flags = []
    if "dataset" in {flag[2:].partition("=")[0] for flag in script_args.flags}:
        if cfg.peers:
            raise BadInput("The peers train on a synthetic text: leave --dataset out, or --peers.")
    else:
        data_flags = write_data(cfg, folder, script_args, shape)
    defaults = {option: value for option, value in options.items() if option not in script_args.given}
    block_size = defaults.get("block_size", script.block_size)
    arguments = as_flags(**defaults)
    arguments += [*script_args.files, *script_args.flags, *data_flags]
    arguments += as_flags(init_from="scratch", eval_tokens=block_size)
    return training_work(cfg, hw, folder, script, arguments, f"sequences of {block_size} tokens")


def training_work(cfg, hw, folder, script, arguments, what):
    """Return the Work of train.py with these arguments. what: a step's sequences, in words."""
    fixed = as_flags(num_epochs=None, patience=0, eval_interval=10**9, dtype=hw.dtype)
    arguments = [*arguments, *steps_alone(cfg, folder), *fixed]
    return Work("train.py", arguments, folder, f"{script.sequences} {what} a step", "tokens/s", cfg.steps,
                cfg.ranks or 1, script.sequences, script)


def shape_options(script, shape):
    """Return the options of train.py that build a model of this shape."""
    c = GPTConfig(**shape)
    # these follow from n_head and n_embd, which the user may have set
    derived = {"n_kv_head", "head_dim", "mlp_hidden"} - shape.keys()
    names = [field.name for field in fields(script) if hasattr(c, field.name)]
    options = {name: getattr(c, name) for name in names if name not in derived | {"dropout"}}
    options["bias"] = c.qkv_bias
    return options


def write_data(cfg, folder, script_args, shape):
    """Write synthetic ids, and a tokenizer if the script's does not fit or needs a download. Return flags."""
    named = script_args.config.tokenizer or "bytes"
    tokenizer_given = "tokenizer" in script_args.given
    if named == "gpt2":
        n_vocab = 50257
    elif tokenizer_given or shape is None:
        n_vocab = Tokenizer(named).n_vocab
    else:
        n_vocab = GPTConfig(**shape).vocab_size
    flags = []
    if n_vocab != 257 and (named == "gpt2" or not tokenizer_given):
        # GPT-2's tokenizer would need a download
        write_tokenizer(folder, n_vocab)
        flags = as_flags(tokenizer=folder)
    text = write_text(folder / "text", n_vocab, cfg.seed)
    return flags + as_flags(dataset=text, data_dir=folder / "tokens")


def sft_work(cfg, hw, folder, script_args):
    """Return the Work of train.py on unit-conversion examples, each seen once, from the folder's weights, or
    with --run from a model's, in its chat template."""
    folder = Path(folder)
    recipe = [] if script_args.files else [str(ROOT / "config/rft.py")]
    script = config.load(type(script_args.config), recipe + script_args.files + script_args.flags)
    if cfg.run:
        source = as_flags(init_from=cfg.run, dataset=f"{examples.WORKED}unit_conversion")
    else:
        task = tasks.load("unit_conversion")
        path = folder / "rft.json"
        questions = task.questions("train", n=script.sequences * (WARM_UP + cfg.steps))
        rows = [[q["question"], q["answer"], task.solution(q)] for q in questions]
        path.write_text(json.dumps(rows))
        source = as_flags(init_from=folder, tokenizer="bytes", dataset=path)
    in_rows = cfg.ladder or cfg.ablate
    schedule = as_flags(learning_rate=1e-3, warmup_steps=2) if in_rows else as_flags(learning_rate=1e-4)
    arguments = [*recipe, *schedule, *script_args.files, *script_args.flags, *source]
    return training_work(cfg, hw, folder, script, arguments, "examples of unit conversion")


def bench_training(cfg, hw, folder, script_args, log):
    """Measure tokens a second within steps, padding excluded. nanoRFT's steps include fetching batches, the
    peers' do not. Peers of train have the same shape and text, peers of sft the same weights, rows and
    labels; all use AdamW."""
    make_work = train_work if cfg.stage == "train" else sft_work
    work = make_work(cfg, hw, folder, script_args)
    log(f"{work.description}, {work.steps} steps a run after {WARM_UP}, {hw.dtype} on {hw.name}")
    sides = {"nanoRFT": lambda: run_script(work)["rate"]}
    for name in cfg.peers:
        sides[name] = functools.partial(peer_rate, cfg, hw, work, name)
    rates = alternate(sides, cfg.repeats, work.unit, log)
    flops = work.runs[0]["settings"]["flops_per_token"]
    n = devices(hw, work.ranks)
    limit = n * matmul_peak(hw) / flops
    mfu = statistics.median(rates["nanoRFT"]) * flops / peak(hw) / n
    figures = shared_figures(work, rates, limit, ("data_s", "forward_backward_s", "optimizer_s"), log)
    step_ms = 1e3 * figures["step_s"]
    log(f"{flops / 1e6:,.1f} MFLOP a token: MFU {mfu:.1%}, a step {step_ms:,.1f} ms; "
        f"limit at the speed of a large product {limit:,.0f} tokens/s")
    also = f"MFU {mfu:.1%}, a step {step_ms:,.0f} ms"
    return figures | {"mfu": mfu, "flops_per_token": flops, "also": also}


def peer_rate(cfg, hw, work, peer):
    """Return the tokens a second of a peer, with the micro-batch size of nanoRFT's last run."""
    settings = work.runs[-1]["settings"]
    micro_batch = settings["micro_batch"]
    architecture = checkpoint.read_model(work.out)["architecture"]
    if peer == "nanogpt" and not peers.is_gpt2(architecture):
        raise BadInput("--peers=nanogpt has GPT-2's architecture only: give --model=gpt2 or gpt2-1m, and no "
                       "option that changes it.")
    model = work.folder
    if cfg.run or cfg.stage == "train" and peer == "trainer":
        model = work.folder / "peer"
        if not model.exists():
            cpu = hardware.setup("cpu", compile=False)
            weights = hub.find(cfg.run).load() if cfg.run else random_model(GPTConfig(**architecture), cpu)
            hub.weights.export(weights, model)
    return run_peer(cfg, hw, work, peer, work.runs[-1]["units"], architecture=architecture, model=str(model),
                    source=cfg.run, data=settings["dataset"], lora_rank=settings["lora_rank"],
                    block_size=settings["block_size"], batch_size=micro_batch,
                    accumulation=work.sequences // micro_batch)
