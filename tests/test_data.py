import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import forked
from conftest import ROOT
from runtime.config import BadInput
from text import data, sources
from text.tokenizer import Tokenizer

def ids_of(folder, split):
    return data.TokenFile(folder, split)[0:]


def test_a_killed_preparation_starts_again_and_its_old_temporary_files_are_removed(text, tmp_path, monkeypatch):
    whole = ids_of(data.prepare(str(text), Tokenizer("bytes"), tmp_path / "whole"), "train")
    monkeypatch.setattr(sources, "CHUNK", 1000)
    monkeypatch.setattr(data, "SHARD", 4)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(data, "fsync", Mock(side_effect=[None, None, None, KeyboardInterrupt]))
        data.prepare(str(text), Tokenizer("bytes"), tmp_path)
    (left,) = tmp_path.glob("cats-*")
    assert sorted(path.name for path in left.iterdir()) == [f"train_0000{i}.bin" for i in range(3)]
    (left / "train_00002.bin").write_bytes(b"torn")
    for name, age in (("old.bin.tmp-7", 7200), ("new.bin.tmp-8", 60)):
        (left / name).write_bytes(b"half")
        os.utime(left / name, (time.time() - age, time.time() - age))
    assert data.prepare(str(text), Tokenizer("bytes"), tmp_path) == left and np.array_equal(ids_of(left, "train"), whole)
    assert [path.name for path in left.glob("*.tmp*")] == ["new.bin.tmp-8"]            # another process may be writing it
    token_file = data.TokenFile(left, "train")
    assert len(token_file.shards) > 4
    border = token_file.starts[2]
    for start, stop in ((border - 3, border + 3), (border, border + 1), (border - 1, border), (0, len(whole)), (5, 5),
                        (border - 1, token_file.starts[4] + 1), (len(whole) - 2, len(whole) + 9)):
        assert np.array_equal(token_file[start:stop], whole[start:stop])


def test_a_text_without_line_ends_stays_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 64)
    path = tmp_path / "long.txt"
    path.write_text("漢字é" * 3000)
    pieces = list(sources.pieces(sources.Text(path).raw()))
    assert max(map(len, pieces)) <= 9 * 64 + 64 and b"".join(pieces) == path.read_bytes()
    assert all(piece.decode() for piece in pieces)


def test_meta_counts_tokens_words_and_bytes(text, tmp_path):
    folder = data.prepare(str(text), Tokenizer("bytes"), tmp_path)
    meta, whole = json.loads((folder / "meta.json").read_text()), text.read_bytes()
    assert meta["train"]["bytes"] + meta["valid"]["bytes"] == len(whole) == meta["train"]["tokens"] + meta["valid"]["tokens"]
    assert 0 <= meta["train"]["words"] + meta["valid"]["words"] - len(whole.decode().split()) <= 1
    assert abs(meta["valid"]["bytes"] / len(whole) - 0.1) < 1e-3
    assert (meta["name"], meta["n_vocab"], meta["eos"], meta["dtype"]) == ("bytes", 257, 256, "uint16")


def test_the_split_keeps_characters_whole(tmp_path):
    for n in range(20, 26):
        path = tmp_path / f"{n}.txt"
        path.write_text("漢" * n)
        folder = data.prepare(str(path), Tokenizer("bytes"), tmp_path / "t")
        parts = [bytes(ids_of(folder, s).tolist()).decode() for s in ("train", "valid")]
        assert "".join(parts) == "漢" * n and parts[1]


def test_preparation_is_done_once_and_never_trusted_when_damaged(text, tmp_path, monkeypatch, capsys):
    def prepared():
        return data.prepare(str(text), Tokenizer("bytes"), tmp_path)
    folder = prepared()
    meta = folder / "meta.json"
    valid = folder / "valid_00000.bin"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    digest = data.digest(folder)
    hashed = []
    whole = data.sha256
    monkeypatch.setattr(data, "sha256", lambda path: hashed.append(path.name) or whole(path))
    assert prepared() == folder and data.digest(folder) == digest
    assert times == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert hashed == ["train_00000.bin", "valid_00000.bin"]           # once at a start
    for spoil in (lambda: meta.write_text("{"), lambda: meta.write_text("[1]"), lambda: meta.write_text('{"train": {"shards": 1}}'),
                  lambda: valid.write_bytes(b"12"), lambda: valid.write_bytes(b"?" + before[valid.name][1:]), valid.unlink, meta.unlink):
        spoil()
        assert not data.is_prepared(folder) and prepared() == folder
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert capsys.readouterr().out.count("valid_00000.bin is damaged") == 4
    text2 = tmp_path / "cats.txt"
    text2.write_bytes(text.read_bytes()[:-1] + b"!")
    assert data.prepare(str(text2), Tokenizer("bytes"), tmp_path) != folder            # another text, another folder


def test_two_preparations_of_one_text_do_not_disturb_each_other(tmp_path, text):
    code = ("import sys; from text import data, sources; from text.tokenizer import Tokenizer; sources.CHUNK = 200; data.SHARD = 2\n"
            "print(data.prepare(sys.argv[1], Tokenizer('bytes'), sys.argv[2]))")
    both = [forked.Popen([sys.executable, "-c", code, str(text), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    folder = Path(results[0][0].split()[-1])
    assert bytes(ids_of(folder, "train").tolist()) + bytes(ids_of(folder, "valid").tolist()) == text.read_bytes()
    assert not list(folder.glob("*.tmp*"))


def test_a_temporary_file_that_vanishes_while_it_is_looked_at_is_no_error(tmp_path, text):
    """Another preparation renames its own: here a link without a target, which is listed and cannot be examined."""
    folder = Path(data.prepare(str(text), Tokenizer("bytes"), tmp_path))
    (folder / "train_00000.bin.tmp-1").symlink_to(tmp_path / "none")
    assert data.prepare(str(text), Tokenizer("bytes"), tmp_path) == folder


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_nanogpt_bins_are_used_where_they_lie(tmp_path, dtype):
    """Read as uint16, a zero or three would follow every wider id."""
    def prepared(train, valid):
        np.array(train, dtype).tofile(tmp_path / "train.bin")
        np.array(valid, dtype).tofile(tmp_path / "val.bin")
        return data.prepare(str(tmp_path), Tokenizer("bytes"), tmp_path / "t")
    folder = prepared(range(200), range(50))
    assert ids_of(folder, "train").tolist() == list(range(200)) and ids_of(folder, "valid").tolist() == list(range(50))
    assert data.TokenFile(folder, "valid").words is None
    digest = data.digest(folder)
    assert prepared(range(1, 201), range(50)) == folder and data.digest(folder) != digest
    with pytest.raises(BadInput, match="token id 300"):
        prepared(range(200), [1, 300])
    (tmp_path / "val.bin").unlink()
    with pytest.raises(BadInput, match="val.bin"):
        data.prepare(str(tmp_path), Tokenizer("bytes"), tmp_path / "t")
    (tmp_path / "train.bin").rename(tmp_path / "other.bin")            # beside a text
    (tmp_path / "text.txt").write_text("one two three\n" * 40)
    assert len(ids_of(data.prepare(str(tmp_path), Tokenizer("bytes"), tmp_path / "t"), "train")) > 400


def test_token_files_with_an_alphabet_of_their_own_are_refused(tmp_path):
    for name in ("train.bin", "val.bin", "meta.pkl"):
        (tmp_path / name).write_bytes(bytes([65, 0]) * 32)
    with pytest.raises(BadInput, match="meta.pkl.*input.txt"):
        data.prepare(str(tmp_path), Tokenizer("bytes"), tmp_path / "t")


@pytest.fixture
def counting(tmp_path):
    """A token file with the ids 0, 1, 2, ... so that every position can be told."""
    np.arange(1003, dtype=np.uint16).tofile(tmp_path / "train.bin")
    shards = [{"file": "train.bin", "tokens": 1003}]
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint16", "train": {"shards": shards}}))
    return data.TokenFile(tmp_path, "train")


def test_an_epoch_shows_every_window_once_in_another_order_each_time(counting):
    windows = data.Windows(counting, 10, 3, seed=7)
    n = windows.per_epoch
    starts = torch.cat([windows[step][0][0][:, 0] for step in range(n)]).tolist()            # three epochs
    epochs = [starts[i * n:(i + 1) * n] for i in range(3)]
    for starts in epochs:
        assert sorted(starts) == list(range(min(starts), min(starts) + 10 * n, 10))       # distinct, and none left out
    assert len({tuple(e) for e in epochs}) == 3 and len({min(e) for e in epochs}) > 1


def test_documents_that_end_elsewhere_are_another_text():
    """Their bytes in a row are the same, their end-of-text tokens are not."""
    one, two = (b"".join(sources.Documents(texts).raw()) for texts in (["a\nb\n"], ["a\n", "b\n"]))
    assert one != two and b"".join(sources.Documents(["a\n", "b\n"]).raw()) == two


def test_batches_are_a_pure_function_of_seed_and_step_for_any_number_of_ranks(counting):
    whole = data.Windows(counting, 10, 12, seed=3)
    for world in (1, 2, 3, 4):
        shares = [data.Windows(counting, 10, 12, seed=3, rank=r, world_size=world) for r in range(world)]
        for step in (40, 0, 9):
            assert torch.equal(torch.cat([s[step][0][0] for s in shares]), whole[step][0][0])
    [(x, y)] = whole[5]
    assert torch.equal(y, x + 1) and x.shape == (12, 10)
    assert not torch.equal(data.Windows(counting, 10, 12, seed=4)[5][0][0], x)
    whole.micro_batch = 5
    assert [len(part) for part, _ in whole[5]] == [5, 5, 2] and torch.equal(torch.cat([part for part, _ in whole[5]]), x)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_gives_the_steps_in_order(counting, workers):
    windows = data.Windows(counting, 10, 4, seed=3)
    got = list(data.batches(windows, range(7, 12), workers))
    assert all(torch.equal(x, windows[step][0][0]) for step, [(x, _)] in zip(range(7, 12), got)) and len(got) == 5


def test_text_shorter_than_a_block_is_refused(counting):
    data.Windows(counting, 1002, 4, seed=0)[3]
    with pytest.raises(BadInput, match="1003 tokens"):
        data.Windows(counting, 1003, 4, seed=0)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 1, 95, 10**6])
@pytest.mark.parametrize("stride", [None, 1, 3, 10])
def test_a_complete_pass_predicts_every_token_once(counting, world, limit, stride):
    seen = []
    for rank in range(world):
        for x, y in data.complete_pass(counting, 10, 4, limit, rank, world, stride):
            assert x.shape == y.shape == (4, 10)
            real = y != data.IGNORE
            assert torch.equal(x[real] + 1, y[real])
            context = (y[real] - x[:, :1].expand(-1, 10)[real])        # the later windows predict after block_size - stride tokens
            assert (context > 10 - (stride or 10))[y[real] > 10].all()
            seen += y[real].tolist()
    assert sorted(seen) == list(range(1, min(limit or 1002, 1002) + 1))
