#!/usr/bin/env bash
# Downloads the packages of verl and trl into build/peers, in the versions and with the hashes of requirements/peers.txt.
# tests/peers compares mrl's algorithms with these packages. Without a network, the script prints a message and succeeds, and the
# tests are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1} PATH=".uv/bin:$PATH"
folder=build/peers lock=requirements/peers.txt

if cmp -s "$folder/.requirement" "$lock"; then exit 0; fi
rm -rf "$folder" "$folder.new"
# The packages have 15 MB. The other packages that they import are in .venv.
if uv pip install --quiet --python .venv/bin/python --target "$folder.new" --no-deps --only-binary :all: --require-hashes -r "$lock"; then
    cp "$lock" "$folder.new/.requirement"
    mv "$folder.new" "$folder"
else
    rm -rf "$folder.new"
    echo "fetch_peers: no verl and trl; the tests of tests/peers will be skipped" >&2
fi
