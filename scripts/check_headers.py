"""Checks that wheels contain the header files with which the extension of Transformer Engine is compiled.

    python scripts/check_headers.py PYLOCK      PYLOCK: pylock.toml with the addresses of the wheels for this platform

It reads only the list of files at the end of each wheel, and installs nothing. scripts/check_wheels.sh runs it for a new lock.
"""

import io
import sys
import tomllib
import urllib.request
import zipfile
from pathlib import Path

# Header -> its package. The extension includes these headers, directly or through other headers.
HEADERS = {
    "cuda_runtime.h": "nvidia-cuda-runtime",
    "crt/host_defines.h": "nvidia-cuda-crt",
    "nv/target": "nvidia-cuda-cccl",
    "cublas_v2.h": "nvidia-cublas",
    "cusolverDn.h": "nvidia-cusolver",
    "cusparse.h": "nvidia-cusparse",
    "nvrtc.h": "nvidia-cuda-nvrtc",
    "nvtx3/nvToolsExt.h": "nvidia-nvtx",
    "cudnn.h": "nvidia-cudnn-cu13",
    "nccl.h": "nvidia-nccl-cu13",
}


class RemoteFile(io.RawIOBase):
    """A file on a web server. Each read requests only the bytes that it returns."""

    def __init__(self, url: str) -> None:
        self._url, self._position = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self._size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        part = {"Range": f"bytes={self._position}-{end - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self._url, headers=part), timeout=60) as answer:
            if answer.status != 206:
                raise OSError(f"{self._url}: the server sends only whole files (status {answer.status}, expected 206)")
            buffer[: end - self._position] = answer.read()
        count, self._position = end - self._position, end
        return count


def missing_headers(pylock: Path) -> list[str]:
    """Return one sentence for each header that is not in an include folder of the wheels of its package."""
    packages = {package["name"]: package for package in tomllib.loads(pylock.read_text())["packages"]}
    missing = []
    for header, name in HEADERS.items():
        wheels = [wheel["url"] for wheel in packages.get(name, {}).get("wheels", [])]
        if not wheels:
            missing.append(f"{header}: the lock has no wheel of {name}")
        for url in wheels:
            with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), 1 << 16)) as wheel:
                files = wheel.namelist()
            if not any(file.endswith((f"/include/{header}", f"/include/cccl/{header}")) for file in files):
                missing.append(f"{header}: not in {url}")
    return missing


if __name__ == "__main__":
    sys.exit("\n".join(f"check_headers: {line}" for line in missing_headers(Path(sys.argv[1]))) or 0)
