#!/usr/bin/env bash
# Sets up what is missing and runs the tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
also="pytest matplotlib tensorboard transformers peft"; source runs/setup.sh

exec "$python" -m pytest -q tests "$@"
