"""Reads and writes the rows of data files; every mistake in a file is named by file, row, column, reason and value."""

import difflib
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

Columns = dict[str, list[Any]]
Check = Callable[[Any], str | None]  # a value -> why it is wrong, or None

_SHOWN = 200  # characters of a wrong value in a message


def read_columns(path: str | Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Columns:
    """Columns of a parquet or jsonl file, each a list with one value per row; absent optional ones are left out.

    Raises:
        ValueError: the file is missing or unreadable, has no rows, or lacks a needed column.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {what}; expected a .parquet or .jsonl file.")
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise ValueError(f"{path}: ending {path.suffix!r} is not supported; expected .parquet or .jsonl.")
    columns = readers[path.suffix](path, needed, optional)
    if not len(columns[needed[0]]):
        raise ValueError(f"{path} has no rows.")
    return columns


def _read_parquet(path: Path, needed: Sequence[str], optional: Sequence[str]) -> Columns:
    # pyarrow costs 0.3 CPU-s, and commands that read no parquet import this module too
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        found = file.schema_arrow.names
        _need(path, needed, found)
        table = file.read(columns=[name for name in (*needed, *optional) if name in found])
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _read_jsonl(path: Path, needed: Sequence[str], optional: Sequence[str]) -> Columns:
    rows = read_jsonl(path)
    found = list(dict.fromkeys(name for row in rows for name in row))
    _need(path, needed, found if rows else needed)
    for name in needed:
        check_rows(path, name, (row.get(name, _ABSENT) for row in rows), lambda v: "missing" if v is _ABSENT else None)
    return {name: [row.get(name) for row in rows] for name in (*needed, *optional) if name in found or name in needed}


_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "no such key"})()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a jsonl file, blank lines skipped; raises ValueError naming the line that is not a JSON object."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{path} line {number}: not JSON ({error}), got {shown(line.decode(errors='replace'))}.")
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number}: expected a JSON object, got {shown(row)}.")
        rows.append(row)
    return rows


def _need(path: Path, needed: Sequence[str], found: Sequence[str]) -> None:
    for name in needed:
        if name not in found:
            near = difflib.get_close_matches(name, found, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}? Rename it" if near else "; see docs/data.md for the columns"
            raise ValueError(f"{path}: column {name!r} is missing, found {', '.join(found) or 'none'}{hint}.")


def check_rows(path: str | Path, column: str, values: Iterable[Any], check: Check) -> None:
    """Raise ValueError at the first value (rows count from 0) for which `check` gives a reason."""
    for row, value in enumerate(values):
        reason = check(value)
        if reason:
            raise ValueError(f"{path} row {row} (the first is 0), column {column!r}: {reason}; got {shown(value)}.")


def shown(value: Any) -> str:
    """A value as it appears in a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def text_reason(value: Any) -> str | None:
    """Why `value` is no text with something in it."""
    if not isinstance(value, str):
        return f"expected text, found {type(value).__name__}"
    return None if value.strip() else "the text is empty"


def messages_reason(value: Any) -> str | None:
    """Why `value` is no conversation: a list of {role, content}, both text."""
    if isinstance(value, str):
        return "expected a list of messages, found text; write it as [{'role': 'user', 'content': TEXT}]"
    if not isinstance(value, list) or not value:
        return "expected a list of at least one message {'role': ..., 'content': ...}"
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            return f"message {index}: expected {{'role': ..., 'content': ...}}, found {type(message).__name__}"
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                found = type(message[name]).__name__ if name in message else "nothing"
                return f"message {index}: expected text under {name!r}, found {found}"
    return None


def prompt_rows(
    data_source: str, ability: str, split: str, contents: Sequence[str], ground_truths: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows with the five columns: one user message each, judged by a rule against its ground truth."""
    return [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": content}],
            "ability": ability,
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index},
        }
        for index, (content, truth) in enumerate(zip(contents, ground_truths, strict=True))
    ]


def write_parquet(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Write rows, each with the same columns; readers see the whole file or none of it."""
    import pyarrow as pa  # 0.3 CPU-s, see above
    import pyarrow.parquet as pq

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        pq.write_table(pa.Table.from_pylist(rows), draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
