#!/usr/bin/env bash
# Sets up what is missing and runs the tests that are quick, or with --all every one; other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
also="pytest pytest-xdist matplotlib tensorboard transformers peft chess rapidfuzz reasoning-gym"; source runs/setup.sh

which=(-m "not slow")
if [ "${1:-}" = --all ]; then
    which=()
    shift
else
    echo "Without the $(grep -c . tests/slow.txt) slow tests that tests/slow.txt names: those are for --all."
fi
exec "$python" -m pytest -q -n 2 --dist worksteal "${which[@]}" tests "$@"
