"""Crash-safe writes (fsync, atomic replacement of files, folders that appear only when they are complete), and hashes of files.

The functions write under a temporary name in the same parent folder, and rename the result at the end. A reader sees either
the old content or the complete new content, even if the writer is killed.

Readers use the hashes (xxh3, 128 bits) to find files that are damaged, replaced or missing. In a folder that mrl writes,
HASHES_FILE maps the name of every other file to [size in bytes, hash]. A JSON file such as run.json contains the hash of its own
text instead.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import xxhash


def fsync_path(path: Path) -> None:
    """Wait until the bytes of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_umask(path: Path) -> None:
    """Give a file, or a folder and everything in it, the mode that new files and folders get.

    The mode is 0o666 for a file and 0o777 for a folder, without the bits of the umask. This function is needed because
    tempfile.mkdtemp and safetensors create folders and files that only their owner can read.
    """
    umask = _umask()
    for entry in [path, *path.rglob("*")] if path.is_dir() else [path]:
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~umask)


def _umask() -> int:
    """Return the umask. os.umask is not used: it would change the umask for a moment, also for files of other threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`; if the block ends without an error, the temporary file replaces `path`.

    With `durable`, the bytes are on the disk before the rename. If the block fails, `path` stays as it was, and the temporary
    file is removed. The temporary name has the suffix of `path`, because some writers append a missing suffix. Two processes
    must not write the same path at the same time.
    """
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        if durable:
            fsync_path(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: Path, content: bytes | str, *, durable: bool = False) -> None:
    """Replace the content of `path` atomically; `str` is written as UTF-8. For `durable` see `atomic_file`."""
    with atomic_file(path, durable=durable) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path | None]:
    """Yield a temporary folder that becomes `folder` when the block ends, or None if `folder` exists already.

    If two processes create the same folder at the same time, the folder that is finished first stays, and the second folder is
    removed. If the block fails, the temporary folder is removed.
    """
    folder = Path(folder)
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield partial
        apply_umask(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # if the folder exists, another process has completed it
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder and wait until the new name is on the disk. The caller must already have synced the content."""
    source.rename(target)
    fsync_path(target.parent)


type FileHash = tuple[int, str]  # (size in bytes, hash)

HASHES_FILE = "mrl_hashes.json"
MAX_THREADS = 16  # largest number of files that are read at the same time
_CHUNK_BYTES = 1 << 18  # fits into the cache of a core
_SEAL = re.compile(r',\n "xxh3": "([0-9a-f]{32})"\n}\n\Z')  # matches the end of a text of `sealed_json`


def hash_stream(file: BinaryIO, stop: Event | None = None) -> FileHash:
    """Return the number of bytes from the position of `file` to its end, and their hash.

    Raises InterruptedError soon after another thread has set `stop`.
    """
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
    while count := file.readinto(buffer):  # type: ignore[missing-attribute]
        if stop and stop.is_set():
            raise InterruptedError("the hashes are not needed any more")
        digest.update(buffer[:count])
        size += count
    return size, digest.hexdigest()


def hash_file(path: Path, stop: Event | None = None) -> FileHash:
    """Return size and hash of a file. For `stop` see `hash_stream`."""
    with path.open("rb", buffering=0) as file:
        return hash_stream(file, stop)  # type: ignore[bad-argument-type]


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileHash]:
    """Return name -> (size, hash) of files in `folder`. Several files are read at the same time.

    After an error or a signal, the function stops without reading the rest of the files.
    """
    names, stop = list(names), Event()
    with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(names), os.cpu_count() or 1))) as pool:
        try:
            return dict(zip(names, pool.map(lambda name: hash_file(folder / name, stop), names), strict=True))
        finally:
            stop.set()


def write_hashes(folder: Path, known: Mapping[str, FileHash], *, leave_out: str = "") -> None:
    """Write HASHES_FILE with the hashes `known`, and with new hashes of all other files in `folder` except `leave_out`."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    missing = [name for name in names if name not in known and name not in (HASHES_FILE, leave_out)]
    hashes = {**known, **hash_files(folder, missing)}
    write_file(folder / HASHES_FILE, sealed_json({"files": dict(sorted(hashes.items()))}), durable=True)


def read_hashes(folder: Path) -> dict[str, FileHash]:
    """Return name -> (size, hash) from HASHES_FILE, or {} if there is no such file. Raises ValueError if it is damaged."""
    path = folder / HASHES_FILE
    if not path.is_file():
        return {}
    return {name: (size, digest) for name, (size, digest) in read_sealed_json(path, {"files"})["files"].items()}


def find_damage(folder: Path, hashes: Mapping[str, FileHash], *, content: bool = True) -> str | None:
    """Describe the first file that differs from its entry in `hashes`. Return None if all files match.

    The function compares the sizes of all files first. Without `content`, it compares only the sizes.
    """
    for name, (size, _) in hashes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            return f"{name} {'is missing' if found is None else f'has {found} bytes'} but was written with {size} bytes"
    if content:
        for name, (_, digest) in hash_files(folder, hashes).items():
            if digest != hashes[name][1]:
                return f"{name} is damaged: its hash is {digest} but was {hashes[name][1]} when it was written"
    return None


def check_folder(folder: str | Path) -> None:
    """Raise ValueError if a file in `folder` differs from HASHES_FILE. A folder without HASHES_FILE is not checked."""
    folder = Path(folder)
    if damage := find_damage(folder, read_hashes(folder)):
        raise ValueError(
            f"{folder}: {damage}. Copy or write the folder again; if you changed the file on purpose, remove {HASHES_FILE}."
        )


def sealed_json(content: Mapping[str, Any]) -> str:
    """Return the JSON text of `content`, with the hash of the text as its last entry."""
    assert content, "an empty object is never written"
    body = json.dumps(content, indent=1).removesuffix("\n}")
    return f'{body},\n "xxh3": "{_hash_text(body)}"\n}}\n'


def read_sealed_json(path: Path, keys: Set[str]) -> dict[str, Any]:
    """Read a file that contains a text of `sealed_json`. Its content must have exactly the keys `keys`.

    Raises FileNotFoundError if there is no file, and ValueError if the file is damaged or has the content of another file.
    """
    failed = partial(_damaged_json, path)
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise failed(str(error)) from None
    if not text:
        raise failed("it is empty")
    seal = _SEAL.search(text)
    if seal is None:
        raise failed("its last line has no hash, so it is truncated or of an older version of mrl")
    if seal[1] != (found := _hash_text(text[: seal.start()])):
        raise failed(f"its hash is {found} but was {seal[1]} when it was written")
    content = json.loads(text)
    del content["xxh3"]
    if content.keys() != keys:
        raise failed(f"it has the keys {sorted(content)} of another file instead of {sorted(keys)}")
    return content


def _damaged_json(path: Path, cause: str) -> ValueError:
    return ValueError(f"{path} is damaged: {cause}.")


def _hash_text(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
