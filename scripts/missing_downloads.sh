#!/usr/bin/env bash
# Names each download of a script fetch_*.sh that is missing, because tests that need it were skipped. `make test-all` ends with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for script in scripts/fetch_*.sh; do
    folder=$(sed -En 's/^folder=(\S+).*/\1/p' "$script")
    if [ ! -f "$folder/.requirement" ]; then
        echo "make test-all: $folder is missing, so tests that need it were skipped; run $script with a network" >&2
    fi
done
