"""runs/setup.sh installs packages into an environment alone, and says so."""
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

# A Python that has `torch` and `all` if files of these names lie beside it, and is an environment's if `environment` does.
STUB = """#!/bin/sh
here=$(dirname "$0")
echo "$here/$(basename "$0") $*" | head -1 >> "$LOG"
case "$*" in
    *version_info*) ;;
    *Muon*) [ -e "$here/torch" ] ;;
    *find_spec*) [ -e "$here/all" ] ;;
    *base_prefix*) [ -e "$here/environment" ] ;;
    *venv*) mkdir -p .venv/bin && rm -f .venv/bin/python && cp "$0" .venv/bin/python && touch .venv/bin/environment &&
        case "$*" in *--system*) cp "$here/torch" .venv/bin/ ;; esac ;;
    *"import pip"*) [ ! -e "$here/nopip" ] ;;
    *pip*) touch "$here/all" ;;
esac
"""


@pytest.mark.parametrize("has, used, installs", [
    (["torch", "all"], "{}/bin/python3", None),
    (["torch", "environment"], "{}/bin/python3", "--no-compile numpy tiktoken"),
    (["torch"], ".venv/bin/python", "--no-compile numpy tiktoken"),
    (["environment"], ".venv/bin/python", "--compile -r requirements.txt"),
    ([], ".venv/bin/python", "-r requirements.txt")])
def test_packages_go_into_an_environment(tmp_path, has, used, installs):
    (tmp_path / "runs").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "runs/setup.sh", tmp_path / "runs")
    stub = tmp_path / "bin/python3"
    stub.write_text(STUB)
    stub.chmod(0o755)
    for name in has:
        (tmp_path / "bin" / name).touch()
    used = used.format(tmp_path)
    if not has:                              # ensurepip was missing: an environment without pip is left
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/python").symlink_to("/bin/false")
    kept = "" if "--no-compile" in (installs or "") else "1"
    environment = os.environ | {"PYTHON": str(stub), "LOG": str(tmp_path / "log"), "PYTHONDONTWRITEBYTECODE": kept}
    script = "set -euo pipefail; source runs/setup.sh; echo python=$python; say_next"
    for call in range(2):                    # the second installs nothing more
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and f"python={used}" in done.stdout, done
        assert ("source .venv/bin/activate" in done.stdout) == (used == ".venv/bin/python")
        assert ("Installing" in done.stdout) == (installs is not None and call == 0)
    pip = [line for line in (tmp_path / "log").read_text().splitlines() if " -m pip " in line]
    assert len(pip) == (installs is not None) and all(line.startswith(f"{used} ") for line in pip)
    assert all(installs in line for line in pip)


@pytest.mark.parametrize("has_uv", [True, False])
def test_an_environment_of_uv_has_no_pip(tmp_path, has_uv):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torch", "environment", "nopip"):
        (folder / name).touch()
    programs = {"python3": STUB} | ({"uv": f'#!/bin/sh\necho "uv $*" >> "$LOG"; touch {folder}/all\n'} if has_uv else {})
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "PYTHON": str(folder / "python3"), "LOG": str(tmp_path / "log")}
    done = subprocess.run(["bash", "-c", f"set -euo pipefail; source {ROOT}/runs/setup.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == (0 if has_uv else 2)
    if has_uv:
        assert f"uv pip install --quiet --python {folder}/python3 numpy tiktoken" in (tmp_path / "log").read_text()
    else:
        assert f"error: {folder}/python3 has no pip: install numpy tiktoken" in done.stderr


LADDER = """
set -euo pipefail
out=$1 python=python3
source runs/ladder.sh
stage base sh -c "mkdir -p $out/base && touch $out/base/model.json"
stage grpo sh -c "mkdir -p $out/grpo && touch $out/grpo/model.json"
stage greedy touch "$out/greedy.txt"
"""


def test_a_stage_whose_output_is_gone_is_repeated_with_those_after_it(tmp_path):
    def ran():
        done = subprocess.run(["bash", "-c", LADDER, "bash", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
        return [line.removeprefix("== ") for line in done.stdout.split("\n") if line]
    assert ran() == ["base", "grpo", "greedy"] and ran() == []
    shutil.rmtree(tmp_path / "grpo")
    assert ran() == ["grpo", "greedy"] and ran() == []
    (tmp_path / "base.done").unlink()
    assert ran() == ["base", "grpo", "greedy"]


def test_own_reward_keeps_an_edited_reward(tmp_path):
    stub = tmp_path / "python3"
    stub.write_text("#!/bin/sh\nexit 0\n")
    stub.chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    (out / "seconds").touch()                # the script's folder
    (out / "short.py").write_text("def reward(question, completion): return 1\n")
    subprocess.run(["bash", ROOT / "runs/own_reward.sh", f"--out_dir={out}", "--model=none"], env=os.environ | {"PYTHON": str(stub)}, check=True)
    assert (out / "short.py").read_text() == "def reward(question, completion): return 1\n"
    assert len((out / "questions.jsonl").read_text().splitlines()) == 20 and len((out / "held_out.jsonl").read_text().splitlines()) == 10


def test_it_finds_this_python_complete():
    script = "also=pytest; source runs/setup.sh; echo $python"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.stdout == f"{sys.executable}\n" and not done.stderr
