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


def test_it_finds_this_python_complete():
    script = "also=pytest; source runs/setup.sh; echo $python"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.stdout == f"{sys.executable}\n" and not done.stderr
