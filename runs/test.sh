#!/usr/bin/env bash
# Install missing packages and run the fast tests, or with --all every test; other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
also="pytest pytest-xdist matplotlib tensorboard transformers peft gguf chess rapidfuzz torchjd nbclient ipykernel"
source runs/setup.sh
# optional, since one of its dependencies needs a compiler
"$python" -c "import reasoning_gym" 2>/dev/null ||
    "$python" -m pip install --quiet --disable-pip-version-check reasoning-gym ||
    echo "reasoning-gym can't be installed here, so its tests are skipped."

which=(-m "not slow")
if [ "${1:-}" = --all ]; then
    which=()
    shift
else
    echo "Skipping the $(grep -c . tests/slow.txt) slow tests of tests/slow.txt; --all runs them too."
fi
exec "$python" -m pytest -q -n 2 --dist worksteal "${which[@]}" tests "$@"
