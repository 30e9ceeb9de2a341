"""The task chess_world. Where Stockfish is on the PATH it is hidden: evaluations are those of the task's own search."""
import json
import random
import re
import subprocess
import sys
import time
from statistics import fmean

import pytest

pytest.importorskip("chess")
pytest.importorskip("rapidfuzz")

import forked
import tasks
from conftest import ROOT, environment
from tasks import _questions, chess_world

SPECS = "chess_world", "chess_world:A", "chess_world:P"
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"


@pytest.fixture(autouse=True)
def no_stockfish(monkeypatch):
    monkeypatch.setattr(chess_world.shutil, "which", lambda name: None)


@pytest.fixture(scope="module")
def environments():
    """{split: questions of A}"""
    return {split: tasks.load("chess_world:A").questions(split, n=600 if split == "train" else 300) for split in tasks.SPLITS}


@pytest.fixture(scope="module")
def policies():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chess_world.shutil, "which", lambda name: None)
        return {split: tasks.load("chess_world:P").questions(split, n=60) for split in tasks.SPLITS}


def environment_question(fen, move):
    return {"question": f"A: {fen}+{move}+{move}+", "answer": chess_world.step(fen, move), "kind": "A", "fen": fen, "move": move}


def policy_question(fen):
    evaluations = chess_world.search(chess_world.chess.Board(fen))
    return {"question": f"P: {fen}", "answer": chess_world.policy(evaluations), "kind": "P", "fen": fen, "evaluations": evaluations}


def test_gold_is_paid_in_full(environments, policies):
    task = tasks.load("chess_world")
    for q in sum([*environments.values(), *policies.values()], []):
        solution = task.solution(q)
        score, parts = task.reward(q, solution)
        assert task.verified(score, parts) and len(parts) == 4 and task.cut(solution) == solution and task.signature(solution), q
        assert len(solution) < 150 and json.loads(json.dumps(q)) == q


def test_a_line_is_what_the_docstring_says(environments):
    illegal, ended = 0, 0
    for q in environments["train"]:
        fen, move, history, nothing = q["question"].removeprefix("A: ").split("+")
        new, reward, terminated, truncated = q["answer"].split("+")
        board, after, moves = chess_world.chess.Board(fen), chess_world.chess.Board(new), history.split()
        assert nothing == "" and 1 <= len(moves) <= chess_world.HISTORY and moves[-1] == q["move"] == move and fen == q["fen"]
        assert len(moves) == chess_world.HISTORY or len(moves) == board.ply() + 1
        if (terminated, truncated) == ("0", "0"):
            assert reward == "0.001" and after.ply() == board.ply() + 1 < chess_world.LONGEST_GAME
        assert (reward == "-1.0") == (new == fen)
        illegal, ended = illegal + (reward == "-1.0"), ended + (terminated == "1" or truncated == "1")
    assert 12 <= illegal <= 60 and ended > illegal + 20


def test_splits_share_no_position(environments, policies):
    for found in (environments, policies):
        asked = {split: {chess_world.position_of(q["fen"]) for q in questions} for split, questions in found.items()}
        assert not asked["train"] & asked["valid"] and not asked["train"] & asked["test"] and not asked["valid"] & asked["test"]
        assert all(len(asked[split]) == len(found[split]) for split in asked)
    assert not {chess_world.position_of(q["fen"]) for q in environments["test"]} & {
        chess_world.position_of(q["fen"]) for q in policies["train"]}
    assert chess_world.position_of(START) == chess_world.position_of(START.replace("0 1", "7 9"))


@pytest.mark.parametrize("spec", SPECS)
def test_all_is_a_function_of_split_and_seed(spec, monkeypatch):
    monkeypatch.setattr(_questions, "N_DOCUMENTS", {"train": 80, "valid": 80})
    monkeypatch.setattr(chess_world, "GAMES", 4)
    task = tasks.load(spec)
    assert task.questions("test", 1, n=20) == task.questions("test", 1, n=40)[:20] != task.questions("test", 2, n=20)
    texts = task.documents("valid", 1)
    assert texts == task.documents("valid", 1) != task.documents("valid", 2) and len(texts) == (80 if spec.endswith("A") else 20)
    assert all(text.endswith("\n") and text.count("\n") == 1 and len(text) < 256 for text in texts)
    assert {text[:3] for text in texts} == {f"{kind}: " for kind in task.argument or "AP"}
    assert task.examples(3) == task.examples(4)[:3] and len(set(task.examples(4))) == 4
    text, worked = task.examples(1)[0]
    assert task.prompt.format(text) + worked == text + worked and not {q["question"] for q in task.questions("test", n=20)} & {text}


def test_the_order_of_sets_does_not_matter():
    code = ("import tasks, shutil; shutil.which = lambda name: None\n"
            "print(tasks.load('chess_world').questions('train', n=60))")
    found = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(PYTHONHASHSEED=seed), capture_output=True,
                            check=True).stdout for seed in ("0", "1")}
    assert len(found) == 1 and len(found.pop()) > 10_000


@pytest.mark.parametrize("fen, move, answer", [
    (START, "e2e4", "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1+0.001+0+0"),            # no capture: no square
    ("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 4 9", "e1g1", "r3k2r/8/8/8/8/8/8/R4RK1 b kq - 5 9+0.001+0+0"),
    ("r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 4 9", "e8c8", "2kr3r/8/8/8/8/8/8/R3K2R w KQ - 5 10+0.001+0+0"),
    ("8/P6k/8/8/8/8/8/K7 w - - 3 40", "a7a8q", "Q7/7k/8/8/8/8/8/K7 b - - 0 40+0.001+0+0"),
    ("8/P6k/8/8/8/8/8/K7 w - - 3 40", "a7a8n", "N7/7k/8/8/8/8/8/K7 b - - 0 40+0.5+1+0"),               # not enough to mate with
    ("8/P6k/8/8/8/8/8/K7 w - - 3 40", "a7a8", "8/P6k/8/8/8/8/8/K7 w - - 3 40+-1.0+1+0"),               # to what?
    ("4k3/8/8/8/3p4/8/4P3/4K3 w - - 0 5", "e2e4", "4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 5+0.001+0+0"),
    ("4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 5", "d4e3", "4k3/8/8/8/8/4p3/8/4K3 w - - 0 6+0.001+0+0"),
    ("rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2", "d8h4",
     "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3+1.0+1+0"),
    ("7k/8/6K1/8/8/8/8/5Q2 w - - 0 30", "f1f7", "7k/5Q2/6K1/8/8/8/8/8 b - - 1 30+0.5+1+0"),             # stalemate
    ("7k/8/6K1/8/8/8/8/5Q2 w - - 99 30", "f1e1", "7k/8/6K1/8/8/8/8/4Q3 b - - 100 30+0.5+1+0"),          # fifty moves
    ("7k/8/6K1/8/8/8/8/5Q2 w - - 99 30", "f1f8", "5Q1k/8/6K1/8/8/8/8/8 b - - 100 30+1.0+1+0"),          # and a mate is a mate
    ("7k/8/6K1/8/8/8/8/5Q2 b - - 3 50", "h8g8", "6k1/8/6K1/8/8/8/8/5Q2 w - - 4 51+0.001+0+1"),          # the hundredth ply
    ("4k3/8/8/8/7b/8/5N2/4K3 w - - 2 7", "f2g4", "4k3/8/8/8/7b/8/5N2/4K3 w - - 2 7+-1.0+1+0"),          # pinned
    (START, "e7e5", f"{START}+-1.0+1+0")])
def test_what_the_environment_answers(fen, move, answer):
    assert chess_world.step(fen, move) == answer
    q = environment_question(fen, move)
    assert chess_world.reward(q, chess_world.solution(q)) == (1.0, dict.fromkeys(("formatted", "legal_fen", "fen", "flags"), True))


def test_the_nearer_to_the_truth_the_better_paid():
    q = environment_question(START, "g1f3")
    flag = q["answer"][:-1] + "1"
    square = q["answer"].replace("5N2", "6N1")
    old = f"{START}+0.001+0+0"
    rows = [(text, *chess_world.reward(q, text)) for text in (q["answer"], flag, square, old, "x+0.001+0+0", "junk")]
    scores = [score for _, score, _ in rows]
    assert scores[:4] == sorted(set(scores[:4]), reverse=True) and scores[3:] == [0.0] * 3        # a copy, no position, no form
    assert scores[0] == 1.0 and 0.9 < scores[1] < 1.0
    assert [list(parts.values()) for _, _, parts in rows] == [[True] * 4, [True, True, True, False], [True, True, False, True],
                                                            [True, True, False, True], [True, False, False, True], [False] * 4]
    for move in ("g1f3", "e7e5"):                    # nothing but the truth is paid in full, wherever it differs
        q = environment_question(START, move)
        for i in range(len(q["answer"])):
            for c in "0+ kK8":
                if c != q["answer"][i]:
                    assert chess_world.reward(q, q["answer"][:i] + c + q["answer"][i + 1:])[0] < 1.0


def test_a_choice_is_paid_by_what_it_gives_up():
    q = policy_question("4k3/8/8/3q4/8/4N3/8/4K3 w - - 0 1")        # the knight takes the queen
    assert q["answer"].endswith("B: e3d5")
    start, second = q["answer"][:-4], q["answer"].split()[1]
    right = chess_world.reward(q, q["answer"])
    other = chess_world.reward(q, f"{start}{second}")
    outside = chess_world.reward(q, f"{start}e3g2")
    tied = chess_world.reward(q | {"evaluations": q["evaluations"] | {"e3g2": max(q["evaluations"].values())}}, f"{start}e3g2")
    none = chess_world.reward(q, f"{start}e3e5")
    truth = q["evaluations"].values()
    blind = 0.2 + 0.3 * chess_world.graded(fmean(map(abs, truth)) - chess_world.NEAR) + 0.5 * fmean(
        chess_world.graded(max(truth) - pawns - chess_world.BEST) for pawns in truth)
    half = pytest.approx((0.5 - blind) / (1 - blind))        # everything but the choice
    assert right[0] == 1.0 and other[0] == half and not other[1]["best"] and other[1]["legal"]
    assert not none[1]["legal"] and not outside[1]["legal"] and none[0] == half
    assert 0 < tied[0] <= 0.5 and not tied[1]["legal"]       # as good as the best, but not one of the five
    off = re.sub(r"E: \S+", "E: 99.00", q["answer"])         # the first evaluation is wrong by much
    score, parts = chess_world.reward(q, off)
    assert score == pytest.approx((0.7 - blind) / (1 - blind)) and parts == {"formatted": True, "legal": True, "evaluations": False, "best": True}
    twice = q["answer"].replace(second, q["answer"].split()[2], 1)
    assert chess_world.reward(q, twice)[0] < 1.0 and not chess_world.reward(q, twice)[1]["legal"]
    four = q["answer"].replace(f"M: {second}", "M:", 1)
    assert chess_world.reward(q, four) == (0.0, dict.fromkeys(parts, False))
    assert chess_world.signature(off) == chess_world.signature(q["answer"]) != chess_world.signature(f"{start}{second}")


def test_what_is_said_without_looking_earns_next_to_nothing(environments, policies):
    """A copy of the question's position with the tail that most moves have earned 0.27 once, one with side
    and counters moved on 0.136, five legal moves 0.52."""
    rng = random.Random(0)
    for q in environments["test"]:
        board, side, castling, _, clock, number = q["fen"].split()
        turned, after = f"{board} {'wb'[side == 'w']} {castling} -", int(number) + (side == "b")
        for tail in (f"{clock} {number}", f"0 {after}", f"{int(clock) + 1} {after}"):
            assert chess_world.reward(q, f"{turned} {tail}+0.001+0+0")[0] == 0.0
        assert chess_world.reward(q, f"{q['fen']}+0.001+0+0")[0] == 0.0
    scores, informed = [], []
    for q in policies["test"]:
        moves, n = sorted(q["evaluations"]), min(chess_world.CANDIDATES, len(q["evaluations"]))
        best = q["answer"].rpartition(" ")[2]
        for five in (moves[:n], moves[-n:], sorted(rng.sample(moves, n))):
            form = f"M: {' '.join(five)}  E: {' '.join(['0.00'] * n)}  B: "
            scores.append(chess_world.reward(q, form + five[0])[0])
            informed += [chess_world.reward(q, form + best)[0]] if best in five else []
    assert fmean(scores) < 0.2 < 0.3 < fmean(informed)


def test_the_search_mates_takes_what_hangs_and_minds_what_is_guarded():
    def best(fen):
        return policy_question(fen)["answer"].split()[-1]
    assert best("6k1/5ppp/8/8/8/8/8/K2R4 w - - 0 1") == "d1d8"
    assert "10.00" in policy_question("6k1/5ppp/8/8/8/8/8/K2R4 w - - 0 1")["answer"]
    assert best("rnb1kbnr/pppp1ppp/8/4p1q1/3P4/8/PPP1PPPP/RNBQKBNR w KQkq - 0 3") == "c1g5"
    assert best("4k3/8/2p5/3p4/8/8/3Q4/4K3 w - - 0 1") != "d2d5"
    assert policy_question("7k/8/6K1/8/8/8/8/5Q2 w - - 0 1")["evaluations"]["f1f7"] == 0.0          # stalemate
    only = policy_question("7k/8/8/8/8/8/1r6/K7 w - - 0 1")
    assert only["answer"] == f"M: a1b2  E: {only['evaluations']['a1b2']:.2f}  B: a1b2"


def test_junk_is_paid_next_to_nothing_and_costs_nothing(environments, policies):
    rng, slowest = random.Random(0), 0.0
    alphabet = ["+", "0", "1", "0.001", "-1.0", "9**9**9", "\0", "漢", "\ud800", "²", "nan", "1e999", " ", "/", "k", "K", "8",
                "w KQkq - 0 1", "M:", "  E:", "  B:", " e2e4", " 0.10", "__import__('os')", "-", "\n", "\t", START, "9" * 50, START[:30]]
    longest = ["", "+" * 5000, "9" * 10**6, "9**9**9", "x" * 10**6, "k/" * 10**5, "+0.001+0+0" * 10**5, "M:" + " e2e4" * 10**5,
               f"{'9' * 90}+0.001+0+0", "M:" + " e2e4" * 5 + "  E:" + " 0.10" * 5 + "  B: z9z9", " " * 10**6, "\n" * 10**6,
               f"8/8/8/8/8/8/8/8 w - - {'9' * 60} 1+0.001+0+0", f"{START.replace('w', '²')}+0.001+0+0", "\ud800/k/\0 w - 1+0.001+0+0"]
    wheres = [environments["test"][0], policies["test"][0], next(q for q in environments["train"] if "-1.0" in q["answer"])]
    for i in range(3000):
        junk = "".join(rng.choices(alphabet, k=rng.randrange(12))) * (1 if i % 20 else 20_000) if i >= len(longest) else longest[i]
        for q in wheres:
            began = time.process_time()
            score, parts = chess_world.reward(q, junk)
            chess_world.signature(junk)
            slowest = max(slowest, time.process_time() - began)
            assert score < 0.1 and not all(parts.values()), junk[:200]
    assert slowest < 0.05


def test_a_missing_argument_or_package_is_named():
    with pytest.raises(ValueError, match="A, the environment, or P, the policy, and Q was given"):
        tasks.load("chess_world:Q")
    code = "import sys; sys.modules['rapidfuzz'] = None\nimport tasks\ntry: tasks.load('chess_world:A')\nexcept ValueError as e: print(e)"
    said = forked.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True).stdout
    assert said == "The task chess_world needs chess and rapidfuzz, and the package rapidfuzz is missing: pip install rapidfuzz.\n"


def test_a_stockfish_that_fails_is_a_sentence(monkeypatch, tmp_path):
    broken = tmp_path / "stockfish"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(chess_world.shutil, "which", lambda name: str(broken))
    with pytest.raises(ValueError, match="take it off the PATH"):
        tasks.load("chess_world:P").questions("test", n=1)
