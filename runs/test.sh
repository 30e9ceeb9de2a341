#!/usr/bin/env bash
# Sets up what is missing and runs the tests that are quick, or with --all every one; other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
also="pytest pytest-xdist matplotlib tensorboard transformers peft chess rapidfuzz torchjd nbclient ipykernel"; source runs/setup.sh
# It has a package to compile, for which there may be no compiler: its tests are skipped then.
"$python" -c "import reasoning_gym" 2>/dev/null || "$python" -m pip install --quiet --disable-pip-version-check reasoning-gym ||
    echo "reasoning-gym can't be installed here, so its tests are skipped."

which=(-m "not slow")
if [ "${1:-}" = --all ]; then
    which=()
    shift
else
    echo "Without the $(grep -c . tests/slow.txt) slow tests that tests/slow.txt names: those are for --all."
fi
exec "$python" -m pytest -q -n 2 --dist worksteal "${which[@]}" tests "$@"
