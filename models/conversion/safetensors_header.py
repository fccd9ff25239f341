"""The head of a safetensors file: names, types, shapes and places of its tensors. Pure: no torch, no tensor is read.

A file is 8 bytes (little-endian length of the header), the header (JSON), and the tensors' bytes without gaps.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types that weights may have, with the bytes of one number."""
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # as the safetensors library has it


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str  # as safetensors spells it: F32, BF16, ...
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    nbytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of the file by name; raises ValueError when the file is cut short or is no safetensors file."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if file_bytes < _LENGTH_BYTES or length > min(_LARGEST_HEADER, file_bytes - _LENGTH_BYTES):
            raise _damaged(path, f"it has {file_bytes} bytes, and its header would have {length}")
        text = file.read(length)
    try:
        fields = json.loads(text)
        fields.pop("__metadata__", None)
        first = _LENGTH_BYTES + length
        entries = {name: _entry(field, first) for name, field in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read ({error!r})") from None
    end = max((entry.start + entry.nbytes for entry in entries.values()), default=first)
    if end > file_bytes:
        cut = next(name for name, entry in entries.items() if entry.start + entry.nbytes > file_bytes)
        raise _damaged(path, f"it has {file_bytes} bytes, its header says {end}; the first tensor cut is {cut}")
    for name, entry in entries.items():
        _check_bytes(path, name, entry)
    return entries


def _entry(field: dict, first: int) -> Entry:
    begin, end = field["data_offsets"]
    return Entry(field["dtype"], tuple(map(int, field["shape"])), first + begin, end - begin)


def _check_bytes(path: Path, name: str, entry: Entry) -> None:
    if entry.dtype in ITEM_BYTES and entry.nbytes != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
        raise _damaged(path, f"{name} has {entry.nbytes} bytes, which is not {list(entry.shape)} of {entry.dtype}")


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path}: the file is damaged or incomplete: {what}. Fetch or write it again.")


def layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Entry]]:
    """(the bytes before the first tensor, each tensor's place) of a file with these (type, shape) in this order."""
    fields: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    del fields["__metadata__"]
    return head, {name: _entry(field, len(head)) for name, field in fields.items()}
