"""doctor.page and doctor.regrade on records that are made up here: what the page holds, and that nothing in a completion is executed."""
import gzip
import html.parser
import json

import pytest

from conftest import trained
from doctor import page, regrade
from rollouts import records
from runtime.config import BadInput

HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"'`${alert(1)}&amp;<!--", "nul \0 and \u2028 and \ud800",
           "x" * 10**6, "&lt;b&gt; ]]> \\u003cscript>"]


def record(number=0, sample=0, step=1, split="train", text="so 4", score=1.0, **more):
    return {"step": step, "split": split, "rank": 0, "number": number, "sample": sample, "question": f"2 + {number}", "answer": "4", "keys": {},
            "completion": text, "ids": list(text.encode(errors="replace"))[:50], "millinats": [-100] * min(50, len(text)), "end": "stop",
            "score": score, "parts": {"correct": score == 1}, "figures": {}, "error": None, "reward": score, "advantage": score - 0.5,
            "trained": True} | more


def write(run, rows, name="train_00000001"):
    (run / "rollouts").mkdir(exist_ok=True)
    (run / f"rollouts/{name}.0.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))


class Reader(html.parser.HTMLParser):
    """Collects a page's tags, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, content):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += content


@pytest.fixture
def run(tmp_path, text):
    trained(tmp_path / "run", text, max_steps=2, tokenizer="bytes")
    return tmp_path / "run"


def test_nothing_in_a_completion_is_executed(run, capsys):
    write(run, [record(i, text=text) for i, text in enumerate(HOSTILE)])
    assert page.main([str(run)]) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    read = Reader(text)
    assert [attributes for tag, attributes in read.tags if tag == "script"] == [{"type": "application/json", "id": "data"}, {}]
    assert not [tag for tag, attributes in read.tags if tag in ("img", "b") or any(name.startswith("on") for name in attributes)]
    data = json.loads(read.scripts[0])
    samples = data["runs"][0]["samples"]
    assert [sample["text"] for sample in samples] == [text[:page.MOST_CHARACTERS] for text in HOSTILE]
    assert samples[4]["more"] == 10**6 - page.MOST_CHARACTERS and "innerHTML" not in read.scripts[1] and len(text) < 100_000
    assert page.main([str(run)]) == 0                        # it replaces its own page, and no other file
    (run / "report.html").write_text("mine")
    with pytest.raises(BadInput, match="report.html exists and is not a page of doctor.page"):
        page.main([str(run)])


def test_a_folder_of_runs_is_one_page(run, tmp_path):
    (tmp_path / "greedy.txt").write_text("words\n" + json.dumps({"models": [{"model": "out/run", "accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}]}))
    (tmp_path / "rft.attempts.jsonl").write_text(json.dumps({"prompt": "{}"}) + "\n" + json.dumps(record(verdict="verified") | {"split": None, "step": None}) + "\n")
    for step in range(0, 50, 10):
        write(run, [record(i, step=step, split="valid", score=float(i < step / 5)) for i in range(10)], f"valid_{step:08}")
    for step in range(1, 51):
        write(run, [record(10 * step + i, k, step, text="y" * 500) for i in range(5) for k in range(8)], f"train_{step:08}")
    assert page.main([str(tmp_path), "--megabytes=1"]) == 0
    size = (tmp_path / "report.html").stat().st_size
    first, log = json.loads(Reader((tmp_path / "report.html").read_text()).scripts[0])["runs"]
    assert first["total"] == 2050 and log["name"] == "rft, rejection sampling" and log["samples"][0]["verdict"] == "verified"
    steps = sorted({sample["step"] for sample in first["samples"] if sample["split"] == "train"})
    assert steps[0] == 1 and steps[-1] == 50 and 3 < len(steps) < 50 and size < 1_300_000
    assert len([s for s in first["samples"] if s["split"] == "valid"]) == 50 and first["curves"][0]["series"][0]["y"]
    with pytest.raises(BadInput, match="holds no run"):
        page.main([str(tmp_path / "run" / "checkpoints")])


def test_a_run_without_records_has_a_page_too(run):
    assert page.main([str(run), f"--output={run / 'a.html'}"]) == 0
    assert json.loads(Reader((run / "a.html").read_text()).scripts[0])["runs"][0]["total"] == 0


TASK = """
def reward(question, completion):
    return (float(completion.endswith(question["answer"])), {"ends": True}, {"characters": len(completion)})
"""


def test_another_verifier_s_opinion(run, tmp_path, capsys):
    (tmp_path / "ends.py").write_text(TASK)
    texts = [("so 4", 1.0), ("so 5", 1.0), ("4 is it", 0.0), ("also 4", 0.0)]
    write(run, [record(sample=i, text=text, score=score) for i, (text, score) in enumerate(texts)])
    assert regrade.main([str(run), f"--task={tmp_path / 'ends.py'}", "--reward_workers=1"]) == 0
    said = capsys.readouterr().out
    assert "4 completions: 2 rewards differ (50.0%), 1 of them higher" in said and "2 advantages change their sign" in said
    assert "score 1, by the other 0" in said and said.count("2 + 0") == 1
    page.main([str(run)])
    samples = json.loads(Reader((run / "report.html").read_text()).scripts[0])["runs"][0]["samples"]
    assert [sample["other"] for sample in samples] == [1.0, 0.0, 0.0, 1.0]
    for argv, words in (([str(run)], "Name records and a task"), ([str(tmp_path), "--task=gsm8k"], "no recorded completions")):
        with pytest.raises(BadInput, match=words):
            regrade.main(argv)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "rollouts").mkdir()
    path = tmp_path / "rollouts/train_00000001.0.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}')[:-4])
    with pytest.raises(BadInput, match="train_00000001.0.jsonl.gz can't be read"):
        list(records.read(tmp_path))
