#!/usr/bin/env bash
# Test and measure everything on this machine's GPU within a number of seconds (540), without network or data.
#
#     bash runs/gpu.sh [seconds] [--only=card,engine] [--output=bench_results/gpu.jsonl]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c "import sys; from importlib.util import find_spec; sys.exit(not find_spec('torch'))" ||
    python=.venv/bin/python
[ -x "$(command -v "$python")" ] || {
    echo "error: PyTorch is not installed: install a CUDA build of torch >= 2.11, or set PYTHON=." >&2
    exit 2
}
seconds=540
case ${1:-} in "" | --*) ;; *) seconds=$1; shift ;; esac
exec "$python" -m measure.gpu.run --seconds="$seconds" "$@"
