"""The stages of bench.py that need no peer, tiny, and TRL's side of grpo where TRL is installed."""
import json

import pytest
import torch

import bench
from model import GPT, GPTConfig
from runtime.config import BadInput
from runtime.tokenizer import Tokenizer

TINY = dict(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=32, mlp="swiglu", qk_norm=False)
GRPO = ["--stage=grpo", "--model=llama-1m", "--work=2x4", "--prompt_tokens=5", "--max_new_tokens=6", "--steps=1", "--repeats=1", "--device=cpu",
        "--dtype=fp32", "--json"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(bench.SHAPES, "llama-1m", TINY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")           # of the scripts that are started


def said(capsys, *argv):
    assert bench.main(list(argv)) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_grpo_without_a_peer(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    out, figures = said(capsys, *GRPO, "--ranks=2")
    assert "2 prompts of 5 tokens x 4 samples of 6" in out and "2 processes here" in out and "TRL is not installed" in out
    assert figures["stage"] == "grpo" and figures["model"] == "llama-1m" and figures["rates"]["nanoRFT"][0] > 0


def test_grpo_beside_trl(capsys):
    pytest.importorskip("trl")
    out, figures = said(capsys, *GRPO)
    assert figures["rates"].keys() == {"nanoRFT", "TRL's GRPOTrainer, fp32", "TRL's GRPOTrainer, bf16"}
    assert all(len(rates) == 1 and rates[0] > 0 for rates in figures["rates"].values())
    assert out.count("times as fast") == 2


def test_both_sides_read_the_same_ids(tmp_path):
    """A prompt of n characters is n tokens, and what the model may sample is the same text on both sides."""
    transformers = pytest.importorskip("transformers")
    bench.write_tokenizer(tmp_path, 300)
    ours, theirs = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("how far 0 12", "naïve\n\t 漢"):
        assert ours.prompt_ids(text) == theirs(text=text)["input_ids"] and len(ours.prompt_ids(text)) == len(text.encode())
    assert ours.n_vocab == len(theirs) == 300 and ours.stop == [299] and theirs.eos_token_id == 299
    ids = list(range(299))
    assert ours.text_of(ids) == theirs.batch_decode([ids], skip_special_tokens=True)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_never_ends(tied, seed):
    torch.manual_seed(seed)
    model = bench.random_model(GPTConfig(**TINY | {"n_layer": 8, "n_embd": 128}, tied_head=tied), bench.hardware.setup("cpu", "fp32"))
    bench.never_ends(model, 299)
    model = model.bfloat16()
    model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    p = model(torch.randint(299, (8, 32))).softmax(-1)
    assert isinstance(model, GPT) and p[..., 299].max() == 0 and p[..., :299].max() < 0.5


def test_rewards(capsys):
    out, figures = said(capsys, "--stage=rewards", "--completions=8", "--verifier_ms=0.1", "--repeats=2", "--json")
    assert "8 completions, 0.1 ms each, 2 processes" in out and "times as fast" in out
    assert {name: len(rates) for name, rates in figures["rates"].items()} == {"nanoRFT": 2, "one after the other": 2}


@pytest.mark.parametrize("argv, sentence", [
    (["--stage=grpo", "--run=out/x"], "leave --run out"), (["--stage=grpo", "--work=8x8,2x2"], "write for example --work=8x8"),
    (["--stage=trl"], "choose that"), (["--stage=grpo", "--prompt_tokens=300"], "has 32 positions"), (["--stage=grpo", "--steps=0"], "at least 1"),
    (["--stage=grpo", "--work=8x1"], "at least 2")])
def test_bad_input(argv, sentence):
    with pytest.raises(BadInput, match=sentence):
        bench.main(argv)
