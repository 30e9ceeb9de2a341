# Sourced by the other scripts. Sets $python to an interpreter with the required packages and those in $also:
# python3 or $PYTHON if it has them. Packages are installed into an environment alone: into that of $python if
# it has one with torch, of any build, else into .venv, which shows the system's torch or gets the pinned one.
# --no-compile: Python compiles what it imports, once, unless PYTHONDONTWRITEBYTECODE lets it keep nothing.
python=${PYTHON:-python3}
needed="numpy tiktoken safetensors datasets ${also:-}"
wanted=$needed compile=--no-compile
[ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile

has_torch() { "$python" -c "from torch.optim import Muon" 2>/dev/null; }
has_all() {
    "$python" -c "import sys
from importlib.util import find_spec
sys.exit(not all(find_spec(name.removeprefix('pytest-')) for name in sys.argv[1:]))" torch $needed
}
is_environment() {
    "$python" -c "import os, sys
sys.exit(sys.prefix == sys.base_prefix and 'CONDA_PREFIX' not in os.environ)"
}
say_next() {                             # the last line of a script whose user may go on by hand
    [ "$python" != .venv/bin/python ] || echo "For further commands: source .venv/bin/activate"
}

"$python" -c "import sys; sys.exit(sys.version_info < (3, 10))" ||
    { echo "error: Python 3.10 or newer is needed: install it, or set PYTHON= to one." >&2; exit 2; }
if ! has_torch || ! { has_all || is_environment; }; then
    seen=--system-site-packages
    has_torch || { seen= wanted="-r requirements.txt ${also:-}"; }
    # also where an environment was left unfinished
    .venv/bin/python -c "import importlib.util as i; raise SystemExit(not i.find_spec('pip'))" 2>/dev/null ||
        "$python" -m venv $seen .venv
    python=.venv/bin/python
fi
if ! has_all; then
    echo "Installing the packages that $python lacks ..."
    if "$python" -c "import pip" 2>/dev/null; then
        "$python" -m pip install --quiet --disable-pip-version-check $compile $wanted
    elif command -v uv > /dev/null; then     # whose environments have no pip
        uv pip install --quiet --python "$python" $wanted
    else
        echo "error: $python has no pip: install $wanted." >&2; exit 2
    fi
fi
