"""notebooks/quickstart.ipynb: executed whole with settings that make it small, and the helper that its cells call."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import forked
from conftest import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
SHAPE = dict(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, batch_size=4, eval_tokens=300)

# Of all answers about half are right, so that a model which knows next to nothing has some to learn from.
EASY = """
STOP = " "

def questions(split, seed=0, n=None):
    return [{"question": f"{split} {i}?", "answer": "1"} for i in range(20)][:n]

def reward(question, completion):
    return len(completion) % 2 and not completion.isspace()

def signature(completion):
    return completion
"""

# Commands start as forks of a process that has imported PyTorch (tests/forked.py), in half of the time.
FORKED = f"""
import subprocess
import sys
import types
sys.path += [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import forked
from doctor import notebook
notebook.subprocess = types.SimpleNamespace(**vars(subprocess) | {{"Popen": forked.Popen}})
"""


def small(folder):
    """Return the settings that take the place of the notebook's, {name: value}."""
    shape = SHAPE | {"max_steps": 20, "data_dir": f"{folder}/data"}
    steps = dict(max_steps=2, prompts_per_step=2, num_questions=20, eval_questions=4)
    return {
        "OUT": f"{folder}", "RANKS": 1, "TASK": dict(task=f"{folder}/easy.py", max_new_tokens=16),
        "MICRO": dict(base_steps=100, grpo_steps=1), "BASE": shape | {"dataset": f"{folder}/letters.txt"}, "DATAGEN": dict(oversample=8, temperature=1),
        "RFT": dict(max_steps=1), "GRPO": steps, "TEST": dict(num_questions=4), "OWN_REWARD": steps,
        "OWN_TEXT": shape | {"max_steps": 1}, "SAMPLE": dict(max_new_tokens=4),
    }


def cells():
    return nbformat.read(NOTEBOOK, as_version=4).cells


def cell_with(cells, text):
    return next(cell for cell in cells if text in cell.source and cell.cell_type == "code")


def shown(cell):
    """Return the text that a cell has put out, and how many pictures."""
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(texts), sum("image/png" in output.get("data", {}) for output in cell.outputs)


def test_the_whole_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "easy.py").write_text(EASY)
    (tmp_path / "letters.txt").write_text("".join(random.Random(0).choices("ab ", k=20_000)))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    settings = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    assert set(re.findall(r"^(\w+) =", settings.source, re.M)) == small(tmp_path).keys() | {"REPOSITORY"}
    given = "\n".join(f"{name} = {value!r}" for name, value in small(tmp_path).items())
    notebook.cells.insert(notebook.cells.index(settings) + 1, nbformat.v4.new_code_cell(FORKED + given))
    # The first run as a disconnect left it, and at the end again, as when all cells are.
    base = cell_with(notebook.cells, "out_dir=f\"{OUT}/base\"")
    before = base.source.replace("**BASE", "**BASE | {'max_steps': 8}")
    assert before != base.source
    notebook.cells.insert(notebook.cells.index(base), nbformat.v4.new_code_cell(before))
    notebook.cells.append(nbformat.v4.new_code_cell(base.source))
    folder = {"metadata": {"path": f"{NOTEBOOK.parent}"}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=folder).execute()

    for name in ("base", "rft", "grpo", "my_reward", "text", "okadfa"):
        text, pictures = shown(cell_with(notebook.cells, f"out_dir=f\"{{OUT}}/{name}\""))
        assert "step 1/" in text or "step 20/20" in text, text
        assert pictures == 1, name
    steps = [json.loads(line)["step"] for line in (tmp_path / "base/metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == [1, 8, 10, 20] and "steps 8 to 20" in (tmp_path / "base/training.log").read_text()
    assert (tmp_path / "base/training.log").read_text().count("| loss") == 4             # the last cell trained nothing
    for name in ("easy", "my_reward"):
        lines = [json.loads(line) for line in (tmp_path / {"easy": "grpo"}.get(name, name) / "metrics.jsonl").read_text().splitlines()]
        assert lines[0]["config"]["task"] == f"{tmp_path}/{name}.py" and any("parts/short" in line for line in lines) == (name == "my_reward")
    assert "grpo: " in shown(cell_with(notebook.cells, "import micro"))[0]
    compared, _ = shown(cell_with(notebook.cells, "eval.py --compare"))
    assert all(f"{tmp_path}/{name}" in compared for name in ("base", "rft", "grpo")) and "test questions" in compared
    judged, _ = shown(cell_with(notebook.cells, "-m doctor "))
    assert "nothing is wrong" in judged or "!" in judged
    assert "seeds" in judged and "curves.png" in judged
    assert shown(cell_with(notebook.cells, "QUESTION ="))[0].count("Question: How many gram") == 3
    assert "parameters; 409.6M tokens" in shown(cell_with(notebook.cells, "CONFIG ="))[0]
    followed, pictures = shown(notebook.cells[-2])
    assert "a100_production does not exist" in followed and "step 2/2" in followed and pictures == 1


# --- what is committed ---

def test_what_is_committed_comes_from_a_real_run_and_names_no_machine():
    for cell in cells():
        for output in cell.get("outputs", ()):
            assert output.output_type != "error"
            text = output.get("text", "") + "".join(output.get("data", {}).get("text/plain", ""))
            assert not re.search(r"(^|[\s'\"=])/(home|root|work|tmp|usr)/", text), text


def test_in_colab_it_is_cloned_and_what_it_needs_installed(tmp_path):
    """With stand-ins for Colab's module and for pip."""
    project = tmp_path / "project"
    for path, text in {"grpo.py": "", "pyproject.toml": '[project]\ndependencies = ["torch>=2.11", "numpy"]\n'}.items():
        (project / path).parent.mkdir(exist_ok=True)
        (project / path).write_text(text)
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run(git + command, check=True)
    (tmp_path / "fake/google/colab").mkdir(parents=True)
    (tmp_path / "fake/google/colab/__init__.py").write_text("")
    (tmp_path / "fake/google/colab/drive.py").write_text("def mount(path): print('mounted', path)\n")
    (tmp_path / "fake/pip.py").write_text("import sys\nprint('pip', *sys.argv[1:])\n")
    set_up = cell_with(cells(), "google.colab").source
    program = f"import os, google.colab\nOUT = ''\nREPOSITORY = os.environ['REPOSITORY']\nos.makedirs = lambda path, exist_ok: None\n{set_up}\nprint(os.getcwd(), OUT)"

    def done(repository):
        return subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": f"{tmp_path}/fake", "REPOSITORY": repository})
    assert "set REPOSITORY above to its URL" in done("").stderr
    for _ in range(2):                       # the second time, in a new kernel, it is there
        said = done(str(project))
        assert said.returncode == 0, said.stderr
        assert "pip install --quiet torch>=2.11 numpy matplotlib" in said.stdout and "mounted /content/drive" in said.stdout
        assert said.stdout.endswith(f"{tmp_path}/nanorft /content/drive/MyDrive/nanorft\n")


# --- its helper ---

@pytest.fixture
def helper(monkeypatch):
    """doctor.notebook, with what it has shown in `helper.displayed`."""
    from doctor import notebook

    class Handle:
        def display(self, what):
            notebook.displayed.append(what)
        update = display
    monkeypatch.setattr(notebook, "displayed", [], raising=False)
    monkeypatch.setattr(notebook, "DisplayHandle", Handle)
    monkeypatch.setattr(notebook, "display", notebook.displayed.append)
    return notebook


def texts(helper):
    return [what.data for what in helper.displayed if isinstance(what, helper.Pretty)]


def test_a_command_that_fails_is_an_error_with_its_sentence(helper, monkeypatch, tmp_path):
    monkeypatch.setattr(helper.subprocess, "Popen", forked.Popen)
    with pytest.raises(RuntimeError, match="^error: --out_dir is empty"):
        helper.run(f"{ROOT}/train.py", out_dir="")
    (tmp_path / "fails.py").write_text("print('error: one sentence.')\nprint('torchrun has')\nprint('more to say')\nraise SystemExit(1)\n")
    with pytest.raises(RuntimeError, match="^error: one sentence.$"):
        helper.run(f"{tmp_path}/fails.py")


def test_the_last_lines_are_shown_while_a_command_runs(helper, tmp_path):
    (tmp_path / "counts.py").write_text("import sys\nfor i in range(20): print('line', i)\nprint(sys.argv[1:], file=sys.stderr)\n")
    helper.run(f"{tmp_path}/counts.py", lines=2, temperature=1, stop_early=True)
    assert "line 3\nline 4" in texts(helper) and texts(helper)[-1] == "line 19\n['--temperature=1', '--stop_early=True']"


def test_a_run_that_is_elsewhere_is_shown_as_it_is_now(helper, tmp_path, capsys):
    helper.follow(tmp_path / "nowhere")
    assert "There is no run in" in texts(helper)[-1] and "is not a run folder" in capsys.readouterr().out
    (tmp_path / "training.log").write_text("".join(f"line {i}\n" for i in range(20)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    helper.follow(tmp_path)
    *_, lines, picture = helper.displayed
    assert lines.data.split("\n") == [f"line {i}" for i in range(12, 20)] and picture.data.startswith(b"\x89PNG")


def test_each_configuration_names_its_command(helper, monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in ROOT.glob("config/*.py"):
        stage = "grpo.py" if re.search(r"\ntask = ", path.read_text()) else "train.py"
        stage += " config/a100_fast.py" * (path.stem == "okadfa")               # which it is laid over
        assert helper.command_of(path.stem) == f"{stage} config/{path.name}"


# A second Ctrl-C ends a run before it has saved.
COUNTS = """
import signal, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
open("ready.txt", "w").close()
while not seen:
    time.sleep(0.05)
time.sleep(1)
print(len(seen), "received", file=open("seen.txt", "w"))
raise SystemExit(130)
"""


def test_the_stop_button_is_one_ctrl_c_for_the_command(tmp_path):
    """Jupyter interrupts the whole group of the kernel's processes."""
    (tmp_path / "counts.py").write_text(COUNTS)
    # As a kernel has it, also where these tests run in the background of a shell, which then ignores Ctrl-C.
    handler = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program = f"sys.path.append({str(ROOT)!r}); from doctor.notebook import run; run('counts.py')"
    program = handler + program
    kernel = forked.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready.txt").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(kernel.pid, signal.SIGINT)
    assert kernel.wait(60) == 0
    assert kernel.stdout.read().endswith("Stopped. Run this cell again to resume.\n")
    assert (tmp_path / "seen.txt").read_text() == "1 received\n"


def test_pressed_again_it_ends_at_once(helper, tmp_path, monkeypatch):
    (tmp_path / "stubborn.py").write_text("import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)\n")
    main = threading.main_thread().ident
    ended = threading.Event()
    presses = threading.Thread(target=press_again, args=[helper, main, ended])
    presses.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        try:
            helper.run(f"{tmp_path}/stubborn.py")
        finally:
            ended.set()
    presses.join()
    assert time.monotonic() - began < 30


def press_again(helper, thread, ended):
    """Press twice, and later once more if a busy machine has taken two for one."""
    while "ready" not in texts(helper):
        time.sleep(0.05)
    signal.pthread_kill(thread, signal.SIGINT)
    time.sleep(1)
    signal.pthread_kill(thread, signal.SIGINT)
    while not ended.wait(5):
        signal.pthread_kill(thread, signal.SIGINT)
