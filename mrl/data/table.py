"""Rows of parquet and jsonl files, and errors that name file, row, column and reason."""

import difflib
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: str | Path, columns: tuple[str, ...]) -> list[Row]:
    """All rows of a .parquet or .jsonl file.

    Raises:
        ValueError: the file is missing, of another kind, not readable, empty, or lacks one of `columns`.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a .parquet or .jsonl file.")
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise ValueError(f"{path}: files of kind {path.suffix!r} are not read; expected .parquet or .jsonl.")
    rows = readers[path.suffix](path)
    if not rows:
        raise ValueError(f"{path}: the file has no rows.")
    for number, row in enumerate(rows):
        for column in columns:
            if column not in row:
                raise ValueError(_missing(path, number, column, list(row)))
    return rows


def _missing(path: Path, number: int, column: str, found: list[str]) -> str:
    near = difflib.get_close_matches(column, found, n=1)
    hint = f"; did you name it {near[0]!r}?" if near else ""
    return f"{path}, row {number}: column {column!r} is missing; found {', '.join(found)}{hint}"


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}).") from error


def _read_jsonl(path: Path) -> list[Row]:
    import orjson

    rows = []
    for number, line in enumerate(path.read_bytes().splitlines()):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{path}, row {number}: not a JSON object ({error}): {line[:80]!r}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: expected a JSON object, got {type(row).__name__}.")
        rows.append(row)
    return rows


def check_messages(path: str | Path, number: int, value: Any) -> None:
    """Raise ValueError unless `value` is a list of {role, content} messages with text in both."""
    where = f"{path}, row {number}, column 'prompt'"
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: expected a list of {{role, content}} messages, got {value!r:.80}.")
    for message in value:
        texts = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: expected a message with role and content, got {message!r:.80}.")
