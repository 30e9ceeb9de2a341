# Sourced by the other scripts. Sets $python to an interpreter with the required packages and those in $also:
# python3 or $PYTHON if its torch, of any build, has Muon (2.9 or newer), else one in .venv with the pinned
# requirements. --no-compile: Python compiles only what it imports.
python=${PYTHON:-python3}
"$python" -c "import sys; sys.exit(sys.version_info < (3, 10))" ||
    { echo "error: Python 3.10 or newer is needed: install it, or set PYTHON= to one." >&2; exit 2; }
needed="numpy tiktoken safetensors datasets ${also:-}"
wanted=$needed
if ! "$python" -c "from torch.optim import Muon" 2>/dev/null; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    python=.venv/bin/python
    wanted="-r requirements.txt ${also:-}"
    echo "Using $python (source .venv/bin/activate to do so yourself)."
fi
"$python" -c "import sys
from importlib.util import find_spec
sys.exit(not all(find_spec(name.removeprefix('pytest-')) for name in sys.argv[1:]))" torch $needed ||
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile $wanted
