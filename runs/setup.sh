# Sourced by the other scripts. Sets $python to an interpreter that has what is needed (and the package named in $also): the
# running one if it has torch, whatever build that is, else one in .venv with the pinned requirements.
python=${PYTHON:-python3}
"$python" -c "import sys; sys.exit(sys.version_info < (3, 10))" || { echo "error: Python 3.10 or newer is needed." >&2; exit 2; }
wanted="numpy tiktoken safetensors ${also:-}"
if ! "$python" -c "import torch" 2>/dev/null; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    python=.venv/bin/python
    wanted="-r requirements.txt ${also:-}"
fi
"$python" -c "import torch, numpy, tiktoken, safetensors${also:+, $also}" 2>/dev/null ||
    "$python" -m pip install --quiet --disable-pip-version-check $wanted
