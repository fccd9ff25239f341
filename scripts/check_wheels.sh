#!/usr/bin/env bash
# Checks that PyPI has a wheel for this platform of each package of a lock. Exceptions are the packages that are built during the
# installation. The check fails if a new version of another package must be built, because it may need a compiler or headers.
# Then checks that the wheels contain the headers that Transformer Engine is compiled with (scripts/check_headers.py).
# `make lock` runs this script after it has resolved the locks. The script needs the network and installs nothing.
#   scripts/check_wheels.sh UV PYTHON LOCK     PYTHON: interpreter that must be able to use the wheels
set -euo pipefail
uv=$1 python=$2 lock=$3
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

# scripts/install_lock.sh compiles this package. To read its metadata, uv would need torch.
awk '/^[^ ]/ { keep = !/^transformer-engine-torch==/ } keep' "$lock" >"$folder/packages"
# PyPI has only the sources of these packages, which are pure Python.
pure_python=(antlr4-python3-runtime yattag)
"$uv" pip install --dry-run --quiet --no-deps --require-hashes --only-binary :all: "${pure_python[@]/#/--no-binary=}" \
    --python "$python" --target "$folder/target" -r "$folder/packages" ||
    { echo "check_wheels: $lock: see the package above. If it has only sources and they are pure Python, add it to pure_python in $0;" \
        "if it must be compiled, scripts/install_lock.sh needs its compiler and headers" >&2; exit 1; }

awk '/^nvidia-/ { print $1 }' "$lock" >"$folder/nvidia"
"$uv" pip compile --quiet --no-deps --format pylock.toml --python "$python" -o "$folder/pylock.toml" "$folder/nvidia"
"$python" "$(dirname "$0")/check_headers.py" "$folder/pylock.toml"
