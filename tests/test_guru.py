"""tasks/guru.py on small parquet files that have GURU's columns."""
import pytest

import tasks

pa = pytest.importorskip("pyarrow", reason="pip install pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow")


def raw(source, asked, right, **rest):
    """A row as GURU has it."""
    return {"data_source": source, "prompt": [{"role": "user", "content": asked}],
            "reward_model": {"ground_truth": right, "style": "rule"}, "ability": source.split("__")[0],
            "extra_info": {"index": 0, "split": "train"}} | rest


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("guru")
    write(top / "train" / "math__combined_54.4k.parquet", [raw("math__deepscaler", f"How much is {i} + 1?", str(i + 1)) for i in range(200)])
    write(top / "train" / "logic__ordering_puzzle_1.9k.parquet", [raw("ordering_puzzle_dataset", "Order the birds.", ["hawk", "Blue Jay"])])
    write(top / "train" / "codegen__taco.parquet", [raw("codegen__taco", f"Write program {i}.", '{"inputs": [1]}') for i in range(7)])
    write(top / "offline_eval" / "math__math_500.parquet", [raw("math__math", f"How much is {i} + 1?", str(i + 1)) for i in range(190, 220)])
    return top


def test_splits_of_the_published_layout(folder, capsys):
    task = tasks.load(f"guru:{folder}")
    found = {split: task.questions(split) for split in tasks.SPLITS}
    assert len(found["test"]) == 30 and len(found["train"]) + len(found["valid"]) == 191 and found["valid"]
    texts = [q["question"] for questions in found.values() for q in questions]
    assert len(texts) == len(set(texts))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "7 questions" in said and "7 of codegen__taco" in said and "executed" in said
    assert found["test"][0].keys() == {"question", "answer", "source"}
    for q in found["test"] + found["train"][:20]:
        assert task.verified(*task.reward(q, task.solution(q)))
    assert task.examples(2) and task.documents("valid")


def test_the_first_questions_are_not_all_of_one_file(tmp_path):
    """grpo.py validates on the first of them."""
    for name in ("logic", "math"):
        write(tmp_path / "train" / f"{name}.parquet", [raw(name, f"{name} {i}?", str(i)) for i in range(400)])
    task = tasks.load(f"guru:{tmp_path}")
    assert {q["source"] for q in task.questions("valid")[:15]} == {"logic", "math"}
    assert task.questions("valid") == task.questions("valid") != task.questions("valid", seed=1)


def test_several_folders_are_read_once_each(tmp_path, capsys):
    for name in "ab":
        write(tmp_path / name / "x.parquet", [raw("math", f"{name} {i}?", str(i)) for i in range(100)] + [raw("codegen", "?", "1")])
    task = tasks.load(f"guru:{tmp_path / 'a'}+guru:{tmp_path / 'b'}")
    assert all(task.questions(split) for split in tasks.SPLITS)
    assert capsys.readouterr().err.count("are left out") == 2


@pytest.mark.parametrize("right, paid, unpaid", [
    ("1,000", ["<answer>1000</answer>", "So \\boxed{1000}.", "<answer>\\boxed{1,000}</answer>", "<answer>$1000$</answer>"],
     ["1000", "<answer>1000 or 7</answer>", "<answer>1001</answer><answer>1000</answer>", "\\boxed{1000} or \\boxed{7}", "<answer></answer>",
      "\\boxed{1000", "<answer>1000.0001</answer>"]),
    ("1/2", ["<answer>0.5</answer>", "\\boxed{\\frac{1}{2}}"], ["<answer>2/4</answer>", "\\boxed{\\frac{1}{3}}"]),
    ("x^{2}+1", ["\\boxed{x^{2} + 1}"], ["\\boxed{x^{2}}", "<answer>x^{2} + 1, I think</answer>"]),
    ("Supported", ["<answer>supported.</answer>"], ["<answer>not supported</answer>", "<answer>Supported Refuted</answer>"]),
    ('["hawk", "Blue Jay"]', ["<answer>['hawk', 'blue jay']</answer>"], ["<answer>['blue jay', 'hawk']</answer>", "<answer>hawk</answer>"]),
    ("[[1, 2], [3, 4]]", ["<answer>[[1,2],\n[3,4]]</answer>"], ["<answer>[[1, 2], [3, 5]]</answer>", "<answer>__import__('os')</answer>"]),
])
def test_reward(folder, right, paid, unpaid):
    task = tasks.load(f"guru:{folder}")
    question = {"question": "?", "answer": right, "source": "x"}
    assert [task.reward(question, text)[0] for text in paid] == [1.0] * len(paid)
    assert [task.reward(question, text)[0] for text in unpaid] == [0.0] * len(unpaid)


def test_reward_takes_no_time(folder):
    import time
    task = tasks.load(f"guru:{folder}")
    began = time.process_time()
    for text in ("\\boxed{" * 1400, "<answer>" * 1200, "{" * 10_000, "<answer>" + "9" * 9000 + "</answer>", "<answer>" + "$" * 9000 + "</answer>"):
        assert task.reward({"question": "?", "answer": "7", "source": "x"}, text)[0] == 0
        assert task.reward({"question": "?", "answer": "seven", "source": "x"}, text)[0] == 0
    assert time.process_time() - began < 1


def test_json_in_reward_model(tmp_path):
    path = write(tmp_path / "a.parquet", [raw("stem_web", f"Q{i}?", "", reward_model='{"ground_truth": "7"}') for i in range(50)])
    assert {q["answer"] for q in tasks.load(f"guru:{path}").questions("train")} == {"7"}


def test_bad_files_are_a_sentence(tmp_path):
    with pytest.raises(OSError, match="There is no parquet file at .*: guru:PATH names"):
        tasks.load(f"guru:{tmp_path}")
    with pytest.raises(OSError, match="There is no parquet file"):
        tasks.load("guru")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    other = write(tmp_path / "other.parquet", [{"question": "?", "answer": "7"}])
    empty = write(tmp_path / "empty.parquet", [raw("math__x", "Q?", "")])
    code = write(tmp_path / "code.parquet", [raw("codegen__x", "Q?", "7")])
    for path, says in ((tmp_path / "torn.parquet", "can't be read"), (other, "row 1, is not one of GURU's"), (empty, "row 1, is not"),
                       (code, "no question that can be graded")):
        with pytest.raises(ValueError, match=says) as e:
            tasks.load(f"guru:{path}").questions("train")
        assert "\n" not in str(e.value) and ": " in str(e.value)
