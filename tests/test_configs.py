"""Every file in config/ says the truth in its header, builds, and trains."""
import dataclasses
import json
import re

import pytest
import torch

import grpo
import train
from conftest import ROOT, trained
from experimental import feedback
from model import GPTConfig, on_meta
from runs import grpo_memory
from runtime import config, hardware, memory, optim
from tasks import countdown_search
from text.tokenizer import Tokenizer

OVERLAY = ROOT / "config/okadfa.py"
FILES = [p for p in sorted(ROOT.glob("config/*.py")) if "\ninit_from" not in p.read_text() and p != OVERLAY]      # that train from scratch
QWEN = dict(vocab_size=151936, qkv_bias=True, tied_head=True, mlp="swiglu", qk_norm=False, block_size=2048)
WIKITEXT_103 = 118e6                                 # GPT-2 tokens of its training split
GPT2_IDS = 50257


def loaded(path):
    return config.load(train.Config, [str(path)])


def build(cfg, attention="sdpa"):
    """The model of a config, on the meta device: shapes without memory."""
    class Ids:
        n_vocab = GPT2_IDS if cfg.tokenizer == "gpt2" else Tokenizer("bytes").n_vocab
    model = on_meta(train.architecture(cfg, Ids), attention, cfg.gradient_checkpointing, cfg.loss_chunks)
    feedback.attach(model, cfg)
    return model


def tokens_a_step(cfg):
    return cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_header_states_what_the_file_makes(path):
    cfg, header = loaded(path), re.match(r'"""(.*?)"""', path.read_text(), re.S)[1]
    train.check(cfg)
    model = build(cfg)

    def stated(pattern):
        found = re.search(pattern, header)
        return found and float(found[1].replace(",", ""))
    assert stated(r"([\d,]+) parameters") == model.n_params()
    if "computed" not in header:                     # measured, on a CPU
        return
    tokens = cfg.max_steps * tokens_a_step(cfg)
    assert stated(r"([\d.]+)M tokens") == pytest.approx(tokens / 1e6, abs=0.05)
    if cfg.dataset == "wikitext":
        assert stated(r"([\d.]+) epochs of WikiText-103") == pytest.approx(tokens / WIKITEXT_103, abs=0.005)
    card, mfu = re.search(r"minutes on one (.*?) at (\d+)% MFU", header).groups()
    peak = hardware.peaks(card)[0]["bf16" if cfg.dtype == "auto" else cfg.dtype] * 1e12
    flops = model.flops_per_token(cfg.block_size)
    minutes = tokens * flops / (peak * int(mfu) / 100) / 60
    assert stated(r"([\d.]+) minutes") == pytest.approx(minutes, rel=0.02)
    hw = hardware.setup("cpu", dtype="bf16" if cfg.dtype == "auto" else cfg.dtype, attention="sdpa")
    hw.device = torch.device("cuda")
    optimizers = optim.build(model, cfg.optimizer, fused=False)
    need = memory.parts(model, hw, cfg.batch_size, cfg.block_size, optim.pending_bytes(optimizers))
    whole = 4 * model.n_params() + sum(need.values())
    assert stated(r"([\d.]+) GiB") == pytest.approx(whole / 2**30, rel=0.02)
    assert stated(r"micro-batch of (\d+)") == cfg.batch_size


def test_the_page_repeats_the_headers():
    rows = {m[1]: m[0] for m in re.finditer(r"\| `(\w+\.py)` \|.*", (ROOT / "docs/recipes.md").read_text())}
    assert len(rows) == 10
    for name, row in rows.items():
        header = (ROOT / "config" / name).read_text()
        for number in (re.search(r"[\d,]+(?= parameters)", header)[0], re.search(r"[\d.]+ GiB", header)[0]):
            assert number in row
        if "epochs" in header:
            assert f"({re.search(r'[0-9.]+(?= epochs of)', header)[0]})" in row


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_two_shrunken_steps(path, text, tmp_path):
    cfg = loaded(path)
    trained(tmp_path / "run", text, defaults={}, config=path, tokenizer="bytes", n_layer=2, n_embd=16 * (cfg.n_head // 2),
            n_head=cfg.n_head // 2, mlp_hidden=None, block_size=32, batch_size=2, gradient_accumulation_steps=2, max_steps=2,
            warmup_steps=1, eval_tokens=64)
    kept = json.loads((tmp_path / "run/config.json").read_text())
    changed = {k for k, v in dataclasses.asdict(cfg).items() if kept[k] != v}
    assert kept["learning_rate"] == (cfg.learning_rate or 0.01)
    assert not changed & {"optimizer", "dropout", "weight_decay", "lr_schedule", "norm", "patience", "dtype"}


@pytest.mark.parametrize("name", ["fast", "production", "max", "mega"])
def test_the_overlay_adds_the_parts_of_okadfa_to_a_config(name):
    files = [str(ROOT / f"config/a100_{name}.py"), str(OVERLAY)]
    without, with_parts = (config.load(train.Config, files[:n]) for n in (1, 2))
    train.check(with_parts)
    differ = {k for k, v in vars(with_parts).items() if getattr(without, k) != v}
    assert differ <= {"mixer", "mixer_features", "backward", "orthogonality", "orthogonality_warmup"}
    assert (with_parts.mixer, with_parts.mixer_features, with_parts.backward) == ("favor", 256, "feedback")


@pytest.mark.parametrize("smaller, of", [("rtx4090", "a100_production"), ("t4_fp16", "a100_fast")])
def test_a_smaller_card_takes_the_same_steps(smaller, of):
    a, b = (loaded(ROOT / f"config/{name}.py") for name in (smaller, of))
    assert tokens_a_step(a) == tokens_a_step(b)
    differ = {k for k in vars(a) if getattr(a, k) != getattr(b, k)}
    assert differ <= {"out_dir", "dtype", "batch_size", "gradient_accumulation_steps", "save_interval"}


@pytest.mark.parametrize("path", [p for p in sorted(ROOT.glob("config/*.py")) if "\ntask = " in p.read_text()], ids=lambda p: p.name)
def test_the_files_for_grpo_are_valid_and_have_the_documents_settings(path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8" if "x8" in path.name else "2")
    cfg = config.load(grpo.Config, [str(path)])
    grpo.check(cfg)
    documents = {"grpo_4090x2": (16, 8), "grpo_a100x8": (128, 4), "six_domains_mixed": (128, 4)}
    assert (cfg.prompts_per_step, cfg.k_samples) == documents.get(path.stem, (cfg.prompts_per_step, 8))
    if path.stem == "grpo_a100x8":
        assert (cfg.max_new_tokens, cfg.max_steps) == (512, -(-3 * 6700 // 128))


def test_the_six_domains_are_the_source_s_sizes():
    mixed = config.load(grpo.Config, [str(ROOT / "config/six_domains_mixed.py")])
    assert (mixed.max_new_tokens, mixed.save_interval, len(mixed.task)) == (512, 500, 6)
    header = (ROOT / "config/six_domains_mixed.py").read_text()
    n = on_meta(GPTConfig(n_layer=28, n_head=12, n_kv_head=2, n_embd=1536, mlp_hidden=8960, **QWEN)).n_params()
    bf16, fp32, shared = (float(x) for x in re.search(r"([\d.]+) GB a card; in fp32 they would be ([\d.]+), with --parallel=fsdp ([\d.]+)\.", header).groups())
    assert bf16 == pytest.approx(6 * 2 * n / 1e9, abs=0.1) and fp32 == pytest.approx(6 * 4 * n / 1e9, abs=0.1)
    assert shared == pytest.approx(6 * 4 * n / 8 / 1e9, abs=0.1)


def test_qwen_of_half_a_billion_on_one_card():
    header = (ROOT / "config/gsm8k_qwen05b_grpo.py").read_text()
    cfg = config.load(grpo.Config, [str(ROOT / "config/gsm8k_qwen05b_grpo.py")])
    shape = GPTConfig(n_layer=24, n_head=14, n_kv_head=2, n_embd=896, mlp_hidden=4864, **QWEN | {"block_size": 1024})
    model = on_meta(shape)
    stated = [float(number.replace(",", "")) for number in re.search(r"([\d,]+) parameters, ([\d,.]+) MFLOP.*?([\d.]+) GiB", header, re.S).groups()]
    assert stated[:2] == [model.n_params(), pytest.approx(model.flops_per_token(1024) / 1e6, abs=0.05)]
    assert f"{cfg.slots} slots" in header and f"micro-batches of {cfg.tokens_per_micro_batch:,} tokens" in header
    assert cfg.max_steps == -(-2 * 6700 // cfg.prompts_per_step) and "Not run here" in header
    assert f"{cfg.max_steps * cfg.mini_batches} updates" in header
    published = json.loads((ROOT / f"expected/seeds/{cfg.out_dir.rpartition('/')[2]}.json").read_text())["figures"]["val_accuracy"]
    ranges = dict(zip(published["steps"], zip(*published["runs"])))          # of verl's log, 95%
    for step, share in ((30, 0.458), (100, 0.531)):
        assert f"{share:.1%} after {step}" in header.replace("\n", " ") and ranges[step][0] < share < ranges[step][1]
    assert cfg.few_shot == 0 and "--few_shot=0" in header                # as the log that it is compared with


@pytest.mark.parametrize("name", ["grpo_4090x2", "grpo_a100x8", "six_domains_mixed", "gsm8k_qwen05b_grpo"])
def test_the_memory_of_a_card_is_that_of_the_header_s_command(name, capsys, monkeypatch):
    header = (ROOT / f"config/{name}.py").read_text().partition('"""\n')[0]
    monkeypatch.setenv("WORLD_SIZE", "1")    # main() sets it
    command = re.search(r"python -m runs.grpo_memory (.*)", header)[1].split()
    stated = re.search(r"computed: ([\d.]+ GiB) a card", header)[1]
    options = {stated: []}
    if name == "grpo_4090x2":
        small = ["--slots=16", "--gradient_checkpointing", "--tokens_per_micro_batch=256"]
        options |= {"4.4 GiB": ["--tokens_per_micro_batch=1024"], "3.1 GiB": small, "2.8 GiB": [*small, "--optimizer=muon"]}
    for gib, changes in options.items():
        grpo_memory.main([*command[:4], str(ROOT / command[4]), *changes])
        assert capsys.readouterr().out.startswith(f"{gib}: weights") and gib.split()[0] in header
        assert all(change in header for change in changes)
    assert stated.split()[0] in re.search(rf"`{name}.py` [(|](.*)", (ROOT / "docs/recipes.md").read_text())[1]


@pytest.mark.parametrize("name", ["countdown", "countdown_large"])
def test_countdown_s_files_belong_together(name):
    text = loaded(ROOT / f"config/{name}.py")
    asked = config.load(grpo.Config, [str(ROOT / f"config/{name}_grpo.py")])
    task, _, argument = asked.task.partition(":")
    assert text.dataset.startswith(f"task:{asked.task}") and task == "countdown_search"
    room = 2 * countdown_search.sizes(argument or None)[2]        # twice that of the teachers, as runs/countdown.py counts
    assert text.block_size >= room and room - 30 <= asked.max_new_tokens < room
    assert asked.num_questions >= asked.max_steps * asked.prompts_per_step
