#!/usr/bin/env bash
# Installs all packages of a lock into an environment. scripts/setup.sh and the Dockerfile call this script.
#   scripts/install_lock.sh UV PYTHON LOCK [OPTIONS]     PYTHON: interpreter of the environment; OPTIONS: options of `uv pip install`
set -euo pipefail
uv=$1 python=$2 lock=$3
shift 3
parts=$(mktemp -d)
trap 'rm -r "$parts"' EXIT

# Byte code is compiled now, because a dozen processes of each run import these packages, and some of these processes cannot write
# byte code. uv refuses a file whose hash is not in the lock. Packages that are built use the versions of the lock.
install() {
    "$uv" pip install --quiet --compile-bytecode --python "$python" --no-deps --require-hashes --build-constraints "$lock" "$@"
}

# PyPI has no wheel of Transformer Engine's extension for torch. It is compiled after the other packages, because it needs the
# headers of CUDA, cuDNN and NCCL, which are in the wheels of the lock. An isolated build would not have all of them: torch does
# not depend on nvidia-cuda-crt and nvidia-cuda-cccl.
awk -v parts="$parts" '/^[^ ]/ { part = /^transformer-engine-torch==/ ? "compiled" : "wheels" } { print > (parts "/" part) }' "$lock"
install "$@" -r "$parts/wheels"
if [ -s "$parts/compiled" ]; then
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13/include
    # FORCE_BUILD: otherwise its setup.py downloads a wheel from GitHub, whose hash is not in the lock. USE_NVIDIA_WHEELS: take the
    # headers of the wheels, even if a CUDA toolkit is installed. The compiler does not look into the folder cccl by itself. A
    # wheel in uv's cache may have been compiled against another torch.
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 CPLUS_INCLUDE_PATH="$headers/cccl${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}" \
        install --no-cache --reinstall --no-build-isolation "$@" -r "$parts/compiled"
fi
