"""notebooks/quickstart.ipynb, run whole: with models that learn nothing, in a minute."""
import json
import re
import subprocess
import sys
import time

import pytest

from conftest import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"

# Every answer is right, so that a model which knows nothing has some to learn from; half of them have a reward to tell apart
EASY = '''
def questions(split, seed=0, n=None):
    return [{"question": f"{i}?", "answer": "1"} for i in range({"train": 30, "valid": 8, "test": 8}[split])][:n]

def reward(question, completion):
    return 1.0

def signature(completion):
    return completion
'''


def cells():
    return nbformat.read(NOTEBOOK, as_version=4).cells


def test_the_whole_notebook_runs(tmp_path, monkeypatch):
    (tmp_path / "easy.py").write_text(EASY)
    monkeypatch.setenv("NANORFT_FAST", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()
    for name in ("base", "rft", "grpo", "brief", "pages"):
        assert (tmp_path / name / "metrics.jsonl").exists(), name
    rows = json.loads((tmp_path / "rft.json").read_text())
    assert rows
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
    assert len(pictures) >= 5
    compared = next(cell for cell in notebook.cells if "eval.py --compare" in cell.source)
    assert "grpo" in compared.outputs[0].text and "test questions" in compared.outputs[0].text


def test_what_is_committed_comes_from_a_real_run_and_names_no_machine():
    for cell in cells():
        for output in cell.get("outputs", ()):
            assert output.output_type != "error"
            text = output.get("text", "") + "".join(output.get("data", {}).get("text/plain", ""))
            assert not re.search(r"(^|[\s'\"])/(home|root|work|tmp|usr)/", text), text


def test_no_code_of_the_project_is_copied_into_it():
    for cell in cells():
        assert not re.search(r"backward\(|advantage|zero_grad", cell.source)


# --- its helper ---

@pytest.fixture
def helper():
    from runtime import notebook
    return notebook


def test_a_command_that_fails_is_an_error_with_its_sentence(helper):
    with pytest.raises(RuntimeError, match="There is no task nothing"):
        helper.run(f"{ROOT}/eval.py {ROOT}/nowhere", task="nothing")


def test_a_run_that_goes_on_elsewhere_is_followed(helper, tmp_path, capsys):
    helper.follow(tmp_path)
    (tmp_path / "training.log").write_text("".join(f"line {i}\n" for i in range(20)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    began = time.monotonic()
    helper.follow(tmp_path, minutes=0.02, every=0.5)
    assert time.monotonic() - began >= 1
    said = capsys.readouterr().out
    assert "line 19" in said and "line 11" not in said and "Image" in said


def test_the_stop_button_ends_a_command_as_ctrl_c_does(helper, tmp_path, monkeypatch):
    script = tmp_path / "slow.py"
    script.write_text("import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('saved')\n    raise SystemExit(130)\n")

    def pressed(process, seconds):
        time.sleep(1)
        raise KeyboardInterrupt
    monkeypatch.setattr(helper, "wait", pressed)
    shown = []
    monkeypatch.setattr(helper, "show", lambda said, out_dir: shown.append(list(said)))
    helper.run(str(script))
    assert shown[-1] == ["saved\n"]
