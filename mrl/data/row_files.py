"""Reads rows of jsonl and parquet files and of saved data sets, and reports rows that cannot be used.

Every row that cannot be used is omitted. It is reported with file, row number, column and reason.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

SHOWN = 5  # an error message describes at most this many bad rows; the report file lists all bad rows


class RowError(ValueError):
    """A row cannot be used. `column` is empty if the whole row is invalid. `convert_rows` turns the error into a BadRow."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(f"column {column!r}: {reason}" if column else reason)
        self.column, self.reason = column, reason


@dataclass(frozen=True)
class BadRow:
    """A row that is omitted. Row numbers start at 0. In a jsonl file, blank lines are counted, too."""

    file: str
    row: int  # row number in the file
    column: str  # empty if the whole row is invalid
    reason: str
    overlong: bool = False  # True: the row is valid, but too long

    def __str__(self) -> str:
        position = f"{self.file}, row {self.row}" + (f", column {self.column!r}" if self.column else "")
        return f"{position}: {self.reason}"


@dataclass(frozen=True)
class RowReport:
    """Counts of the rows of a data set, and the omitted rows: rows = kept + num_bad + num_overlong."""

    rows: int  # number of all rows
    kept: int  # number of rows that can be used
    omitted: tuple[BadRow, ...] = ()

    def __post_init__(self) -> None:
        assert self.rows == self.kept + len(self.omitted), f"{self.rows} rows, {self.kept} kept, {len(self.omitted)}"

    def __add__(self, other: "RowReport") -> "RowReport":
        return RowReport(self.rows + other.rows, self.kept + other.kept, self.omitted + other.omitted)

    @property
    def num_overlong(self) -> int:
        return sum(row.overlong for row in self.omitted)

    @property
    def num_bad(self) -> int:
        return len(self.omitted) - self.num_overlong

    def __str__(self) -> str:
        return f"{self.kept} of {self.rows} rows kept, {self.num_bad} bad, {self.num_overlong} overlong"

    def enforce_row_policies(self, path: Path, *, bad_rows: str, overlong: str) -> None:
        """Write the omitted rows to `path`, one JSON object per line. If no row is omitted, delete the file of an earlier run.

        Raises:
            ValueError: bad_rows="error" and there are bad rows, or overlong="error" and there are overlong rows.
        """
        path.unlink(missing_ok=True)
        if self.omitted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in self.omitted))
        refused = [row for row in self.omitted if (overlong if row.overlong else bad_rows) == "error"]
        if refused:
            keys = [("data.bad_rows", self.num_bad, bad_rows), ("data.overlong", self.num_overlong, overlong)]
            skip = " and ".join(f"{key}=skip" for key, count, policy in keys if count and policy == "error")
            raise ValueError(
                f"{describe_bad_rows(refused, self.rows)}\nAll are listed in {path}. Correct or remove these rows, or set {skip}."
            )


def describe_bad_rows(bad: Iterable[BadRow], rows: int) -> str:
    """Return a text for an error message: the number of bad rows, and a line for each of the first SHOWN bad rows."""
    bad = list(bad)
    lines = [f"{len(bad)} of {rows} rows cannot be used:", *(f"  {row}" for row in bad[:SHOWN])]
    return "\n".join(lines + ([f"  ... and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []))


Row = dict[str, Any]

# What `read_table` can read, for error messages
EXPECTED = "a .jsonl or .parquet file, or a folder written by datasets' save_to_disk"

MAX_DEPTH = 100  # largest nesting depth of JSON values, because rows are traversed and pickled recursively


@dataclass(frozen=True)
class RowTable:
    """The rows of one file. Row numbers start at 0. In a jsonl file, a blank line has a row number, but is not in `rows`."""

    file: str
    rows: list[Row]
    row_numbers: Sequence[int]  # row number of each row
    bad: list[BadRow] = field(default_factory=list)  # rows that cannot be read

    def __len__(self) -> int:
        return len(self.rows) + len(self.bad)


def read_table(path: str | Path) -> RowTable:
    """Read all rows of a file, or of a folder with a saved data set.

    Raises:
        ValueError: the file does not exist, has an unsupported type, cannot be read, or has no rows.
    """
    path = Path(path)
    if path.is_dir():
        table = _read_saved(path)
    elif not path.is_file():
        raise ValueError(f"{path}: no such file; expected {EXPECTED}.")
    elif path.suffix not in READERS:
        raise ValueError(f"{path}: files of type {path.suffix!r} are not supported; expected {EXPECTED}.")
    else:
        table = READERS[path.suffix](path)
    if not len(table):
        raise ValueError(f"{path}: the file has no rows.")
    return table


def read_all[T](path: str | Path, convert: Callable[[int, Row], T]) -> list[T]:
    """Return `convert(row number, row)` for every row of a file. All rows must be valid.

    Raises:
        ValueError: the file cannot be read, or a row cannot be read or converted. The message contains the number of bad
            rows, and describes the first ones.
    """
    table = read_table(path)
    converted, bad = convert_rows(table, convert)
    if bad:
        raise ValueError(describe_bad_rows(sorted(bad, key=lambda b: b.row), len(table)))
    return converted


def convert_rows[T](table: RowTable, convert: Callable[[int, Row], T]) -> tuple[list[T], list[BadRow]]:
    """Return the results of `convert(row number, row)` for all valid rows, and the bad rows. `convert` may raise RowError."""
    converted, bad = [], list(table.bad)
    for number, row in zip(table.row_numbers, table.rows, strict=True):
        try:
            converted.append(convert(number, row))
        except RowError as error:
            bad.append(BadRow(table.file, number, error.column, error.reason))
    return converted, bad


def column_value(row: Row, name: str) -> Any:
    """Return the value of a column. The name `a.b` means the column `a.b` if it exists, otherwise the field `b` of column `a`.

    Raises:
        RowError: the column does not exist; the message suggests the most similar name.
    """
    if name in row:
        return row[name]
    value: Any = row
    for depth, part in enumerate(parts := name.split(".")):
        if not isinstance(value, dict):
            raise RowError(".".join(parts[:depth]), f"expected an object with {part!r}, got {value!r:.80}.")
        if part not in value:
            raise RowError(".".join(parts[: depth + 1]), _missing_message(part, tuple(value)))
        value = value[part]
    return value


def text_value(row: Row, name: str) -> str:
    """Return the value of a text column. Raises RowError if the value is not a text."""
    value = column_value(row, name)
    if not isinstance(value, str):
        raise RowError(name, f"expected text, got {value!r:.80}.")
    return value


@lru_cache(1024)  # cached, because most files give the same message for every row
def _missing_message(name: str, found: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"is missing; found {', '.join(found) or 'nothing'}{hint}"


def _read_jsonl(path: Path) -> RowTable:
    rows, numbers, bad = [], [], []
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                rows.append(_parse(line))
                numbers.append(number)
            except ValueError as error:
                bad.append(BadRow(str(path), number, "", str(error)))
    return RowTable(str(path), rows, numbers, bad)


def _parse(line: bytes) -> Row:
    """Return the JSON object on a line. Raises ValueError if the line is not a valid JSON object."""
    import orjson

    try:
        orjson.loads(line)  # unlike json, this rejects lone surrogates, NaN and infinity
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not a JSON object ({error}): {line[:80]!r}") from error
    row = json.loads(line, object_pairs_hook=_unique_keys)  # unlike orjson, json keeps large integers exact
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}.")
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(row) > MAX_DEPTH:
        raise ValueError(f"objects and lists are nested {_depth(row)} deep, more than {MAX_DEPTH}.")
    return row


def _depth(value: Any) -> int:
    """Return the nesting depth of objects and lists in `value`."""
    level, depth = [value], 0
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        level = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        depth += 1
    return depth


def _unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} occurs more than once.")
    return found


def _read_parquet(path: Path) -> RowTable:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        return _read_arrow(str(path), pyarrow.parquet.read_table(path))
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}).") from error


def _read_saved(path: Path) -> RowTable:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in path.glob("*/state.json"))
        raise ValueError(
            f"{path}: holds the splits {', '.join(splits)}; name one of them: {path / (splits or ['x'])[0]}."
        )
    if not (path / "state.json").is_file():
        raise ValueError(f"{path}: a folder without state.json; expected {EXPECTED}.")
    import datasets  # imported here: the import takes a second
    import pyarrow.lib

    try:
        found = datasets.load_from_disk(str(path))
        assert isinstance(found, datasets.Dataset), f"{path} is a {type(found).__name__}"
        return _read_arrow(str(path), found.data.table)
    except (pyarrow.lib.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a readable saved data set ({error}).") from error


def _read_arrow(file: str, table: Any) -> RowTable:
    try:
        rows = table.to_pylist()
        return RowTable(file, rows, range(len(rows)))
    except UnicodeDecodeError:
        return _read_one_by_one(file, table)


def _read_one_by_one(file: str, table: Any) -> RowTable:
    """Read a table row by row. This finds the rows with bytes that are not UTF-8."""
    rows, numbers, bad = [], [], []
    for number in range(table.num_rows):
        values: Iterable[tuple[str, Any]] = zip(table.column_names, table.slice(number, 1).columns, strict=True)
        row, name = {}, ""
        try:
            for name, value in values:
                row[name] = value[0].as_py()
            rows.append(row)
            numbers.append(number)
        except UnicodeDecodeError as error:
            bad.append(BadRow(file, number, name, f"not UTF-8 ({error})."))
    return RowTable(file, rows, numbers, bad)


# Ending of a file name -> function that reads the file
READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
