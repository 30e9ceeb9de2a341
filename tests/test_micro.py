"""micro.py: the four stages in one short file, each of which improves the model."""
import re
import subprocess
import sys

import micro
from conftest import ROOT


def test_it_is_short_and_imports_torch_and_the_standard_library_alone():
    text = (ROOT / "micro.py").read_text()
    assert len(text.splitlines()) <= 200 and all(len(line) <= 110 for line in text.splitlines())
    modules = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert modules - set(sys.stdlib_module_names) == {"torch"}
    files = re.findall(r"\((\S+\.(?:py|sh))\)", text)
    assert len(files) >= 6 and all((ROOT / name).exists() for name in files)


def test_the_verifier_reads_every_step_and_the_questions_of_the_test_are_none_of_training():
    assert micro.reward("247+385:", " 7+5=12 4+8+1=13 2+3+1=6 632\n") == 1
    for wrong in (" 7+5=12 4+8+1=13 2+3+1=6 633\n", " 7+5=12 4+8=13 2+3+1=6 632\n", " 7+5=12 4+8+1=13 2+3+1=6 632", "1632\n"):
        assert micro.reward("247+385:", wrong) == 0
    asked = [{tuple(sorted(question[:-1].split("+"))) for question in micro.questions(split, 2000)} for split in ("train", "test")]
    assert not asked[0] & asked[1]
    right = [micro.reward(question, micro.document(question)[micro.PROMPT:]) for question in micro.questions("train", 2000)]
    assert 0.1 < sum(right) / 2000 < 0.5


def test_each_stage_improves_the_model():
    table = micro.main(seed=0, base_steps=400, grpo_steps=60)
    for figures in zip(table["base"], table["rft"], table["grpo"]):
        assert figures[0] < figures[1] < figures[2]


def test_another_word_than_a_seed_prints_the_help():
    done = subprocess.run([sys.executable, ROOT / "micro.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "python micro.py --seed=3" in done.stdout
