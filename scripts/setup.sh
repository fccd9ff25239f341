#!/usr/bin/env bash
# Creates or updates .venv from a lock. If .venv is up to date, the script takes milliseconds and needs no network.
#   scripts/setup.sh [LOCK]     LOCK: requirements.txt (default), or requirements-gpu.txt on a cluster
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=${1:-requirements.txt}
stamp=.venv/.set-up
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1} # use the certificates of the machine, for example those of a company's proxy

say() { echo "setup: $*" >&2; }

# Prints the folder of the checkout, and a checksum of the files from which .venv is made. A moved checkout needs a new .venv.
fingerprint() {
    pwd
    cat "$lock" setup.py | cksum
}

# Prints the path of interpreter $1 if its version is $2 (3.12, or 3 for any Python 3). The interpreter is run, because a pyenv shim
# may exist but fail.
is_python() {
    "$1" -c 'import sys; print(sys.executable) if sys.version.startswith(sys.argv[1] + ".") else sys.exit(1)' "$2" 2>/dev/null
}

find_uv() {
    local python
    if command -v uv; then return; fi
    if [ ! -x .uv/bin/uv ]; then
        say "uv is not on PATH: installing it into .uv"
        python=$(find_python || is_python python3 3) || return 1
        "$python" -m venv .uv && echo '*' >.uv/.gitignore &&
            .uv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt >&2 || return 1
    fi
    echo .uv/bin/uv
}

find_python() {
    local candidate
    for candidate in python3.12 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12*/bin/python; do
        is_python "$candidate" 3.12 && return
    done
    return 1
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then exit 0; fi

uv=$(find_uv) || { say "uv is needed, but pip could not install it; install uv and run this again"; exit 1; }
python=$(find_python || "$uv" python find --system 3.12 2>/dev/null || { "$uv" python install 3.12 >&2 && "$uv" python find --system 3.12; }) ||
    { say "Python 3.12 is needed, but it is not on PATH or in pyenv, and uv could not install it; install it and run this again"; exit 1; }

if ! is_python .venv/bin/python 3.12 >/dev/null || { [ -f "$stamp" ] && [ "$(head -1 "$stamp")" != "$(pwd)" ]; }; then
    "$uv" venv --quiet --clear --python "$python" .venv
fi
say "installing $lock into .venv with $("$python" --version)"
scripts/install_lock.sh "$uv" .venv/bin/python "$lock"
"$uv" pip install --quiet --python .venv/bin/python --no-deps --build-constraints "$lock" -e .
fingerprint >"$stamp"
