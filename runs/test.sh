#!/usr/bin/env bash
# Sets up what is missing and runs the tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
also="pytest pytest-xdist matplotlib tensorboard transformers peft chess rapidfuzz"; source runs/setup.sh

exec "$python" -m pytest -q -n 2 --dist worksteal tests "$@"
