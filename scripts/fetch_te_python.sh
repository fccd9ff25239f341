#!/usr/bin/env bash
# Downloads the Python code of Transformer Engine into build/te_python, in the version and with the hash of requirements-gpu.txt.
# tests/te_process.py uses it. Without a network, the script prints a message and succeeds, and the tests are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1} PATH=".uv/bin:$PATH"
folder=build/te_python
requirement=$(sed -n '/^transformer-engine==/,/[^\\]$/p' requirements-gpu.txt) # the version, and one hash per line

if [ -f "$folder/.requirement" ] && [ "$(cat "$folder/.requirement")" = "$requirement" ]; then exit 0; fi
rm -rf "$folder" "$folder.new"
# This package of 1 MB contains only Python code. The compiled libraries are in other packages, which the tests do not need.
if uv pip install --quiet --python .venv/bin/python --target "$folder.new" --no-deps --only-binary :all: --require-hashes -r - <<<"$requirement"; then
    echo "$requirement" >"$folder.new/.requirement"
    mv "$folder.new" "$folder"
else
    rm -rf "$folder.new"
    echo "fetch_te_python: no ${requirement%% *}; the tests of tests/distributed/test_transformer_engine.py will be skipped" >&2
fi
