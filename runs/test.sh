#!/usr/bin/env bash
# Install missing packages and run the fast tests, or with --all every test; other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
also="pytest pytest-xdist matplotlib tensorboard transformers peft gguf chess rapidfuzz torchjd nbclient ipykernel"
source runs/setup.sh
# optional, since some of their dependencies are built from source
for package in reasoning-gym lm-eval; do
    "$python" -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('${package/-/_}'))" ||
        "$python" -m pip install --quiet --disable-pip-version-check $compile $package ||
        echo "$package can't be installed here, so its tests are skipped."
done

which=(-m "not slow")
if [ "${1:-}" = --all ]; then
    which=()
    shift
else
    echo "Skipping the $(grep -c . tests/slow.txt) slow tests of tests/slow.txt; --all runs them too."
fi
exec "$python" -m pytest -q -n 2 --dist worksteal ${which[@]+"${which[@]}"} tests "$@"
