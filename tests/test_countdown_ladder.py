"""runs/countdown.sh: the first steps of its stages beside the recorded curves of three seeds, and the record.

Tuning and reinforcement learning begin from the base of seed 0 and its verified searches, which stand beside
this file (the weights in bfloat16). test_shakespeare.py has the first steps of training from scratch."""
import dataclasses
import json
import tarfile

import pytest

import grpo
import train
from conftest import ROOT, metrics, near_the_seeds, options_of_the_curve, seeds
from runtime import config
from runs import countdown as runs_countdown
from tasks import countdown_search

RECORD = json.loads((ROOT / "expected/countdown.json").read_text())


def seed_0(name, key):
    """Return what the run of seed 0 had under `key`: {step: value}."""
    recorded = seeds(name)
    figures = recorded["figures"][key]
    return dict(zip(figures["steps"], figures["runs"][recorded["seeds"].index(0)]))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The first twenty steps of the second rung, from the base of seed 0, with its warm-up."""
    folder = tmp_path_factory.mktemp("ladder")
    with tarfile.open(ROOT / "tests/countdown_base.tar.xz") as file:
        file.extractall(folder)
    train.main([str(ROOT / "config/countdown_rft.py"), f"--init_from={folder / 'base'}",
                f"--dataset={folder / 'rft.json'}", f"--prompt={countdown_search.PROMPT}",
                f"--out_dir={folder / 'rft'}", f"--data_dir={folder}", "--max_steps=20", "--warmup_steps=5",
                "--lr_schedule=constant", "--device=cpu"])
    return folder / "rft"


def test_tuning_on_verified_searches_goes_as_recorded(tuned):
    """Closer to seed 0 than the other seeds are."""
    values = metrics(tuned)
    recorded = seed_0("countdown_rft", "loss")
    assert near_the_seeds("countdown_rft", "loss", values)
    assert values == pytest.approx({step: recorded[step] for step in (1, 10, 20)}, abs=0.004)


def test_reinforcement_learning_begins_as_recorded(tuned):
    """With the rewards that seed 0 had for the same questions, and as sure of its answers. From a model that
    was tuned for ten steps the rewards are 0.12 and 0.25. Whether updates are right, test_grpo.py says."""
    grpo.main([str(ROOT / "config/countdown_grpo.py"), f"--init_from={tuned}",
               f"--out_dir={tuned.parent / 'grpo'}", "--max_steps=2", "--lr_schedule=constant",
               "--eval_interval=0", "--device=cpu"])
    for key, near in (("reward", {"abs": 0.1}), ("entropy", {"rel": 0.25})):
        values = metrics(tuned.parent / "grpo", key)
        recorded = seed_0("countdown_grpo", key)
        assert [values[step] for step in (1, 2)] == pytest.approx([recorded[step] for step in (1, 2)], **near)


@pytest.mark.parametrize("name, module, file", [("countdown_base", train, "countdown.py"),
                                                ("countdown_rft", train, "countdown_rft.py"),
                                                ("countdown_grpo", grpo, "countdown_grpo.py")])
def test_the_seeds_are_of_the_recipe_as_it_stands(name, module, file):
    """In each knob that the file sets, but for the folder of rft.json."""
    recorded = seeds(name)
    assert recorded["seeds"] == [0, 1, 2]
    usual = options_of_the_curve(dataclasses.asdict(module.Config()))
    here = options_of_the_curve(dataclasses.asdict(config.load(module.Config, [str(ROOT / "config" / file)])))
    set_there = {key for key in here if here[key] != usual[key]} - {"dataset"}
    assert len(set_there) > 3
    assert {key: here[key] for key in set_there} == {key: recorded["knobs"][key] for key in set_there}


def test_what_the_ladder_promises_of_each_seed():
    assert sorted(RECORD["seeds"]) == ["0", "1", "2"]
    for seed in RECORD["seeds"].values():
        base = seed["stages"]["base"]["sampled"]
        last = seed["stages"]["grpo"]["sampled"]
        assert base >= 0.25 and last - base >= 0.2
        assert seed["gains"]["sampled"]["grpo"][0] == pytest.approx(last - base, abs=1e-4)
        assert seed["seconds"]["all"] <= 45 * 60
        solved, asked, share, low, high = seed["beyond"]["no_teacher_and_not_the_base"]["grpo"]
        assert solved == len(seed["solved_by_the_last"]) > 0
        assert share == pytest.approx(solved / asked, abs=1e-4)
        assert 0 < low < share < high
        assert {*seed["solved_by_the_last"]} <= {*RECORD["no_teacher_solves"]}


def test_the_pages_have_the_figures_of_the_record():
    page = (ROOT / "docs/countdown.md").read_text()
    prose = " ".join(page.split())
    seeds = [RECORD["seeds"][seed] for seed in ("0", "1", "2")]
    stages = [("base", "base"), ("after reinforcement learning", "grpo")]
    for label, name in [*stages, ("fine-tuned on its own verified searches", "rft")]:
        shares = [100 * seed["stages"][name]["sampled"] for seed in seeds]
        assert "| sampled: {} | {:.1f} | {:.1f} | {:.1f} |".format(label, *shares) in page
    for label, name in stages:
        for way, key in (("greedy", "greedy"), ("pass@8", "pass_at_8")):
            shares = [100 * seed["stages"][name][key] for seed in seeds]
            assert "| {}: {} | {:.1f} | {:.1f} | {:.1f} |".format(way, label, *shares) in page
    hard = [seed["beyond"]["no_teacher_and_not_the_base"] for seed in seeds]
    asked = " | ".join(str(row["base"][1]) for row in hard)
    assert f"| problems that no teacher and no try of the base solves | {asked} |" in page
    for label, name in (("by the base in 8 other tries (chance)", "base"), ("after fine-tuning", "rft"),
                        ("after reinforcement learning", "grpo"), ("by random search", "random_search")):
        solved = " | ".join(str(row[name][0]) for row in hard)
        assert f"| solved {label} | {solved} |" in page
    teachers = [100 * share for share in RECORD["teachers"]["solve"].values()]
    assert len(teachers) == 10
    assert f"In 400 bytes one teacher solves {min(teachers):.1f} to {max(teachers):.1f}%" in prose
    one, eight = (100 * share for share in RECORD["teachers"]["random_search"].values())
    assert f"In 800 bytes it solves {one:.1f}% in one try and {eight:.1f}% in eight." in prose
    gains = [[100 * x for x in seed["gains"]["sampled"]["grpo"]] for seed in seeds]
    assert " | ".join("{:+.1f} [{:+.1f}, {:+.1f}]".format(*gain) for gain in gains) in page
    minutes = [seed["seconds"]["all"] / 60 for seed in seeds]
    assert "{:.0f}, {:.0f} and {:.0f} minutes".format(*minutes) in prose
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{min(minutes):.0f} to {max(minutes):.0f} minutes" in readme
    assert f"{min(gains)[0]:.0f} to {max(gains)[0]:.0f} points" in readme


def test_the_problems_that_no_teacher_solves():
    """The list is what the teachers come to today, and each problem has a solution."""
    known = runs_countdown.teachers(500)
    recorded = RECORD["teachers"]
    assert known["together"] >= 0.5 and recorded["longer_than_the_limit"] == 0
    for key, value in recorded.items():
        assert known[key] == pytest.approx(value, abs=1e-4)
    today = {question["question"]: question for question in known["unsolved"]}
    listed = RECORD["no_teacher_solves"]
    assert [*today] == [*listed]
    for question, found in listed.items():
        target, numbers = question.split(" from ")
        asked = {"answer": target, "numbers": [int(number) for number in numbers.split()]}
        assert countdown_search.reward(asked, countdown_search.answer(found["a_solution"].split()))[0] == 1
        assert found["in_twice_the_room"] == today[question]["solved_in_twice_the_room"]
        assert found["at_random"] == today[question]["solved_at_random"]
