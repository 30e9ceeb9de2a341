"""Texts from .jsonl, .parquet, folders and the hub come out as the documents that went in."""
import json
import ssl
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import forked
import local_hub
from conftest import ROOT
from runtime.config import BadInput
from runtime.network import is_reachable
from text import data, sources
from text.tokenizer import Tokenizer

EOS = 256
DOCUMENTS = [f"Document {i} – {'naïve 漢字 ' * (i % 7)}ends.\n" for i in range(200)]


def write_jsonl(path, documents, key="text"):
    path.write_text("".join(json.dumps({"id": i, key: d}) + "\n" for i, d in enumerate(documents)))


def write_parquet(path, documents, key="text", **kw):
    pq.write_table(pa.table({"id": range(len(documents)), key: pa.array(documents, pa.string())}), path, **kw)


def prepared(source, tmp_path, **kw):
    """(documents of train, documents of valid) as the token files hold them."""
    folder = data.prepare(str(source), Tokenizer("bytes"), tmp_path / "tokens", **kw)
    found = []
    for split in sources.SPLITS:
        token_file = data.TokenFile(folder, split)
        ids = token_file[0:]
        documents = np.split(ids, np.flatnonzero(ids == EOS))
        found.append([bytes(int(i) for i in d if i != EOS).decode() for d in documents])
        assert token_file.bytes == sum(len(d.encode()) for d in found[-1])
    return found


def assert_refused(source, tmp_path, words, **kw):
    with pytest.raises(BadInput, match=words):
        data.prepare(str(source), Tokenizer("bytes"), tmp_path / "t", **kw)
    assert not list((tmp_path / "t").rglob("meta.json"))


@pytest.mark.parametrize("suffix, write, kw", [
    ("jsonl", write_jsonl, {}), ("parquet", write_parquet, {}), ("parquet", write_parquet, dict(row_group_size=7)),
    ("parquet", write_parquet, dict(use_dictionary=False)), ("jsonl", write_jsonl, dict(key="body")), ("parquet", write_parquet, dict(key="body"))])
def test_every_document_comes_out_once_and_the_tail_is_for_validation(tmp_path, suffix, write, kw):
    write(tmp_path / f"a.{suffix}", DOCUMENTS, **kw)
    train, valid = prepared(tmp_path / f"a.{suffix}", tmp_path, text_key=kw.get("key", "text"))
    assert train + valid == DOCUMENTS and 10 <= len(valid) <= 30


def test_a_split_alone(tmp_path):
    """Of a folder without validation files, train and valid are what training makes of them; of token files only valid."""
    for name in ("a/text.txt", "b/train.bin", "b/val.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(range(97, 107)) * 10)
    for only, n in (("train", 90), ("valid", 10)):
        train, (valid,) = prepared(tmp_path / "a", tmp_path, only=only)
        assert train == [""] and len(valid) == n
    assert_refused(tmp_path / "a", tmp_path, "has no split test", only="test")
    assert_refused(tmp_path / "b", tmp_path, "only the split valid", only="train")


@pytest.mark.parametrize("suffix, write", [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_folders_of_shards_by_file_name_or_folder_name(tmp_path, suffix, write):
    source = tmp_path / "source"
    for name, documents in (("data/train-00000-of-00002", DOCUMENTS[:50]), ("data/train-00001-of-00002", DOCUMENTS[50:90]),
                            ("validation/0000", DOCUMENTS[90:95]), ("test/0000", ["unseen"]), (".cache/train", ["hidden"])):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        write(source / f"{name}.{suffix}", documents)
    assert prepared(source, tmp_path) == [DOCUMENTS[:90], DOCUMENTS[90:95]]


def test_a_folder_may_mix_kinds_and_hold_empty_shards(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write_jsonl(source / "a-train.jsonl", ["one", "two"])
    write_parquet(source / "b-train.parquet", ["three"])
    (source / "c-train.txt").write_text("four")
    write_parquet(source / "d-train.parquet", [])
    (source / "e-train.jsonl").touch()
    (source / "f-train.parquet").touch()
    (source / "g-train.jsonl").write_text('\n{"text": null}\n{"text": ""}\n')
    (source / "valid.txt").write_text("five")
    assert prepared(source, tmp_path) == [["one", "two", "three", "four"], ["five"]]


@pytest.mark.parametrize("train, valid", [
    ("train2017.txt", "val2017.txt"), ("train0.txt", "valid0.txt"), ("train/dev-diary.txt", "valid/train-station.txt"), ("a.txt", "dev/how-to-train-a-dog.txt")])
def test_the_first_word_names_the_split(tmp_path, train, valid):
    for name, text in ((train, "one"), (valid, "two")):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    assert prepared(tmp_path / "source", tmp_path) == [["one"], ["two"]]


def test_a_linked_folder_is_named_as_left_out(tmp_path, capsys):
    for name in ("source", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "source/books").symlink_to(tmp_path / "elsewhere")
    prepared(tmp_path / "source", tmp_path)
    assert ": books (" in capsys.readouterr().out


def test_parquet_text_that_is_no_utf8_is_one_sentence(tmp_path):
    latin = pa.array([b"caf\xe9"] * 20, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": latin}), tmp_path / "latin.parquet")
    assert_refused(tmp_path / "latin.parquet", tmp_path, "latin.parquet is not a readable parquet file .'utf-8' codec")


def test_suffixes_ignore_case_and_what_is_left_out_is_named(tmp_path, capsys):
    write_jsonl(tmp_path / "a.JSONL", DOCUMENTS)
    write_jsonl(tmp_path / "b.ndjson", DOCUMENTS)
    for name in ("a.JSONL", "b.ndjson"):
        assert sum(prepared(tmp_path / name, tmp_path), []) == DOCUMENTS
    assert capsys.readouterr().out == ""
    source = tmp_path / "source"
    source.mkdir()
    write_jsonl(source / "a-train.NDJSON", ["one"])
    write_parquet(source / "b-train.Parquet", ["two"])
    for name in ("c-Train.TXT", "Valid.txt", "TEST.txt", "more.txt", "notes.md", "d-train.jsonl.gz", ".hidden.md"):
        (source / name).write_text("three")
    assert prepared(source, tmp_path) == [["one", "two", "three"], ["three"]]
    assert "Left out of" in (said := capsys.readouterr().out) and ": d-train.jsonl.gz, more.txt, notes.md (" in said
    with pytest.raises(BadInput, match="not a text file"):
        sources.find_files(source / "X.ZIP", "text")


def test_texts_as_people_have_them(tmp_path, capsys):
    """Markdown, a table's only column, and what save_to_disk() writes."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    notes = tmp_path / "notes"
    notes.mkdir()
    for i in range(16):
        (notes / f"{i:02}.md").write_text(f"# {i}\n\nwords\n")
    assert len(sum(prepared(notes, tmp_path), [])) >= 16
    (notes / "README.md").write_text("about")
    (notes / "list.csv").write_text("name,year\na,1\n")
    assert "about" not in sum(prepared(notes, tmp_path), [])
    assert "Left out of" in (said := capsys.readouterr().out) and "README.md, list.csv" in said
    for number, separator in enumerate(",;\t"):
        (tmp_path / f"{number}.csv").write_text(f"id{separator}text\n" + "".join(f'{i}{separator}"{i}, NA"\n' for i in range(40)))
        assert sum(prepared(tmp_path / f"{number}.csv", tmp_path), []) == [f"{i}, NA" for i in range(40)]
    (tmp_path / "one.csv").write_text("story\n" + "007\n" * 40)
    assert sum(prepared(tmp_path / "one.csv", tmp_path), []) == ["007"] * 40 and "only column, 'story'" in capsys.readouterr().out
    assert_refused(tmp_path / "one.csv", tmp_path, "no column 'body'", text_key="body")
    table = datasets.Dataset.from_list([{"text": document} for document in DOCUMENTS])
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "validation": table.select(range(3)), "more": table}).save_to_disk(str(tmp_path / "splits"))
    assert sum(prepared(tmp_path / "saved", tmp_path), []) == DOCUMENTS
    assert prepared(tmp_path / "splits", tmp_path) == [DOCUMENTS, DOCUMENTS[:3]] and "its splits more" in capsys.readouterr().out
    cards = tmp_path / "cards"
    cards.mkdir()
    (cards / "README.md").write_text("about")
    (cards / "0.csv").write_text((tmp_path / "0.csv").read_text())
    assert "about" not in sum(prepared(cards, tmp_path), [])
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.html").write_text("x")
    assert_refused(tmp_path / "web", tmp_path, "holds no text that is read, only .html: give")


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    write_jsonl(path, DOCUMENTS)
    folder = data.prepare(str(path), Tokenizer("bytes"), tmp_path / "tokens")
    path.write_text(path.read_text(), "utf-8-sig")
    assert data.prepare(str(path), Tokenizer("bytes"), tmp_path / "tokens") == folder
    assert not bytes(data.TokenFile(folder, "train")[0:3].tolist()).startswith(b"\xef")


@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n"])
def test_lines_with_the_end_of_text_separate_the_documents_of_a_text(tmp_path, end, monkeypatch):
    """As in TinyStories' own files; within a line it is text."""
    stories = [f"Story {i} of <|endoftext|> and {'more ' * (i % 9)}.\n" for i in range(200)]
    (tmp_path / "a.txt").write_text("".join(f"{story}<|endoftext|>{end}" for story in stories), newline="")
    monkeypatch.setattr(sources, "CHUNK", 500)
    train, valid = prepared(tmp_path / "a.txt", tmp_path)
    assert train[:170] + valid[-10:] == stories[:170] + stories[190:] and "".join(train + valid).count("Story") == 200


@pytest.mark.parametrize("suffix, write", [("jsonl", write_jsonl), ("parquet", write_parquet)])
@pytest.mark.parametrize("lengths, expected", [
    ([100] * 10 + [1000], None), ([1000], None), ([1000, 10], None), ([10, 1000, 1000], None),             # within a document
    ([920] + [4] * 20, 80), ([4] * 20 + [920], None), ([800, 120, 80], 80), ([100] * 9 + [180], 180)], ids=str)
def test_a_split_of_few_long_documents_holds_out_a_twentieth_to_a_fifth(tmp_path, suffix, write, lengths, expected, capsys):
    documents = [chr(97 + i % 26) * 100 * n for i, n in enumerate(lengths)]
    write(tmp_path / f"a.{suffix}", documents)
    train, valid = prepared(tmp_path / f"a.{suffix}", tmp_path)
    held_out = sum(map(len, valid)) / 100
    assert "".join(train + valid) == "".join(documents) and 0.05 <= held_out / sum(lengths) <= 0.2
    assert ("begins inside a document" in capsys.readouterr().out) == (expected is None) and (expected is None or held_out == expected)


def test_half_a_surrogate_pair_in_json_does_not_stop_a_preparation(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x \\ud83d y"}\n' * 40)
    assert set(sum(prepared(tmp_path / "a.jsonl", tmp_path), [])) == {"x � y"}


@pytest.mark.parametrize("name, content, words", [
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "line 2, has no 'text' .*body.*--text_key"),
    ("a.jsonl", b'{"text": "a"}\nnonsense\n', "line 2, is not JSON"),
    ("a.jsonl", b'["a"]\n', "it is a list"),
    ("a.jsonl", b'{"text": 3}\n', "of type int, not a text"),
    ("a.jsonl", b"", "holds no text"),
    ("a.txt", b"ok " * 99 + b"\xff\xfe", "not UTF-8"),
    ("a.parquet", b"PAR1 torn", "not a readable parquet file"),
    ("a.json", b"[]", "is not a text file"),
    ("org/name.parquet", None, "There is no dataset"),
    ("nothing", None, "There is no dataset"),
])
def test_an_unusable_file_is_one_sentence(tmp_path, monkeypatch, name, content, words):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert_refused(name, tmp_path, words)


def test_the_file_at_fault_is_named(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a-train.txt").write_bytes("é".encode("latin-1"))
    (source / "b-train.txt").write_text("fine")
    (source / "valid.txt").write_text("fine")
    assert_refused(source, tmp_path, "a-train.txt is not UTF-8")
    pq.write_table(pa.table({"text": DOCUMENTS}), source / "c-train.parquet")
    content = bytearray((source / "c-train.parquet").read_bytes())
    content[4:100] = bytes(96)                                        # the first page, not the footer
    (source / "c-train.parquet").write_bytes(content)
    (source / "a-train.txt").unlink()
    assert_refused(source, tmp_path, "c-train.parquet is not a readable parquet file")


def test_a_certificate_that_python_lacks_does_not_make_the_hub_absent(monkeypatch):
    def after(error):
        def urlopen(*args, **kw):
            raise error
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        return is_reachable()
    assert after(urllib.error.URLError(ssl.SSLCertVerificationError("no issuer")))
    assert after(urllib.error.HTTPError("https://huggingface.co", 403, "Forbidden", {}, None))
    assert not after(urllib.error.URLError(ConnectionRefusedError())) and not after(TimeoutError())


def test_a_table_without_the_text_column_says_which_it_has(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"], key="body")
    assert_refused(tmp_path / "a.parquet", tmp_path, "no column 'text' .it has id, body")
    assert_refused(tmp_path / "a.parquet", tmp_path, "'id' holds int64, not text", text_key="id")
    pq.write_table(pa.table({"text": [["a", "b"]]}), tmp_path / "b.parquet")
    assert_refused(tmp_path / "b.parquet", tmp_path, "not text")


def test_training_text_is_needed(tmp_path):
    (tmp_path / "source").mkdir()
    write_jsonl(tmp_path / "source" / "valid.jsonl", DOCUMENTS)
    assert_refused(tmp_path / "source", tmp_path, "no training text")


def from_hub(name, repositories, tmp_path, **kw):
    """`prepared` of a name, in a process that sees only the hub that serves the repositories."""
    code = ("import sys, json; sys.path.insert(0, 'tests')\n"
            "from test_texts import prepared; from pathlib import Path; from runtime.config import BadInput\n"
            "try: print(json.dumps(prepared(sys.argv[1], Path(sys.argv[2]), **json.loads(sys.argv[3]))))\n"
            "except BadInput as e: print(json.dumps(str(e)))")
    with local_hub.serve(repositories) as url:
        done = forked.run([sys.executable, "-c", code, name, str(tmp_path), json.dumps(kw)], capture_output=True, text=True,
                          timeout=120, cwd=ROOT, env=local_hub.environment(url, tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_name_on_the_hub(tmp_path):
    plain, configured = tmp_path / "hub/org/plain/data", tmp_path / "hub/org/configured"
    plain.mkdir(parents=True)
    configured.mkdir()
    write_parquet(plain / "train-00000-of-00002.parquet", DOCUMENTS[:70])
    write_parquet(plain / "train-00001-of-00002.parquet", DOCUMENTS[70:])
    train, valid = from_hub("org/plain", tmp_path / "hub", tmp_path)
    assert train + valid == DOCUMENTS and 10 <= len(valid) <= 30
    for name in ("small", "large"):
        (configured / name).mkdir()
        write_parquet(configured / name / "train.parquet", [f"{name} {i}" for i in range(30)], key="body")
        write_parquet(configured / name / "validation.parquet", [f"{name} held out"], key="body")
    (configured / "README.md").write_text("---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files:\n" + "".join(f"  - split: {split}\n    path: {name}/{split}.parquet\n"
                                                            for split in ("train", "validation"))
        for name in ("small", "large")) + "---\n")
    assert from_hub("org/configured:large", tmp_path / "hub", tmp_path, text_key="body") == [
        [f"large {i}" for i in range(30)], ["large held out"]]
    for name, kw, words in (("org/configured:large", {}, "no column 'text'"), ("org/configured:huge", {}, "'small', 'large'"),
                            ("org/configured", {}, "'small', 'large'"), ("org/absent", {}, "no dataset org/absent")):
        assert words in from_hub(name, tmp_path / "hub", tmp_path, **kw)


def test_wikitext_is_one_text_again(tmp_path):
    """The hub's rows are its lines, and empty where the text has a blank."""
    repository = tmp_path / "hub/Salesforce/wikitext/wikitext-103-raw-v1"
    repository.mkdir(parents=True)
    lines = [" \n", " = Title = \n", " \n", " A sentence with 漢字 . \n"] * 40
    for split in ("train", "validation", "test"):
        write_parquet(repository / f"{split}-00000-of-00001.parquet", [line if line.strip() else "" for line in lines])
    (repository.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n" + "".join(
            f"  - split: {split}\n    path: wikitext-103-raw-v1/{split}-*\n" for split in ("train", "validation", "test")) + "---\n")
    assert from_hub("wikitext", tmp_path / "hub", tmp_path) == [["".join(lines)], ["".join(lines)]]


def test_a_hub_that_does_not_answer_is_said_at_once(tmp_path):
    env = local_hub.environment("http://127.0.0.1:9", tmp_path / "home")
    began = time.monotonic()
    done = forked.run([sys.executable, "train.py", "--dataset=org/name", f"--out_dir={tmp_path}/out", f"--data_dir={tmp_path}/d"],
                          capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)
    assert done.returncode == 2 and time.monotonic() - began < 20
    assert "can't be reached, and the local cache" in done.stderr and "Offline" not in done.stderr
    assert "does not answer" in done.stderr and "give their path" in done.stderr and len(done.stderr.strip().splitlines()) == 1
