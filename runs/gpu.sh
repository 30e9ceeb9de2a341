#!/usr/bin/env bash
# Verifies and measures everything on this machine's GPU in so many seconds (480), with what is installed: no network, no data.
#
#     bash runs/gpu.sh [seconds] [--only=card,engine] [--output=bench_results/gpu.jsonl]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c "import sys; from importlib.util import find_spec; sys.exit(not find_spec('torch'))" || python=.venv/bin/python
[ -x "$(command -v "$python")" ] || { echo "error: There is no PyTorch here: install a CUDA build of 2.11 or newer, or say with PYTHON= which Python has one." >&2; exit 2; }
seconds=480
case ${1:-} in "" | --*) ;; *) seconds=$1; shift ;; esac
exec "$python" -m studies.gpu.run --seconds="$seconds" "$@"
