#!/usr/bin/env bash
# Prints a message for each script fetch_*.sh whose download is missing: tests that need the download were skipped. `make test-all`
# runs this script at its end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for script in scripts/fetch_*.sh; do
    folder=$(sed -En 's/^folder=(\S+).*/\1/p' "$script")
    if [ ! -f "$folder/.requirement" ]; then
        echo "make test-all: $folder is missing, so tests that need it were skipped; run $script with a network" >&2
    fi
done
