"""What became of every row that was read: kept, or left out with file, row, column and reason."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

SHOWN = 5  # rows that an error message quotes; the file has all


class RowError(ValueError):
    """One row cannot be used: its column (empty: the row as a whole), and why. Turned into a `BadRow` by the reader."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(f"column {column!r}: {reason}" if column else reason)
        self.column, self.reason = column, reason


@dataclass(frozen=True)
class BadRow:
    """A row that is left out. Rows count from 0 as they stand in the file; in jsonl, blank lines count."""

    file: str
    row: int
    column: str  # empty: the row as a whole
    reason: str
    overlong: bool = False  # a good row but for its length

    def __str__(self) -> str:
        where = f"{self.file}, row {self.row}" + (f", column {self.column!r}" if self.column else "")
        return f"{where}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """The rows of a data set: rows = kept + bad + overlong."""

    rows: int
    kept: int
    left_out: tuple[BadRow, ...] = ()

    def __post_init__(self) -> None:
        assert self.rows == self.kept + len(self.left_out), f"{self.rows} rows, {self.kept} kept, {len(self.left_out)}"

    def __add__(self, other: "Report") -> "Report":
        return Report(self.rows + other.rows, self.kept + other.kept, self.left_out + other.left_out)

    @property
    def num_overlong(self) -> int:
        return sum(row.overlong for row in self.left_out)

    @property
    def num_bad(self) -> int:
        return len(self.left_out) - self.num_overlong

    def __str__(self) -> str:
        return f"{self.kept} of {self.rows} rows kept, {self.num_bad} bad, {self.num_overlong} overlong"

    def settle(self, path: Path, *, bad_rows: str, overlong: str) -> None:
        """Write every row left out to `path`, one JSON object a line; no file where there is none.

        Raises:
            ValueError: there are bad rows under bad_rows="error", or overlong ones under overlong="error".
        """
        path.unlink(missing_ok=True)
        if self.left_out:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in self.left_out))
        refused = [row for row in self.left_out if (overlong if row.overlong else bad_rows) == "error"]
        if refused:
            keys = [("data.bad_rows", self.num_bad, bad_rows), ("data.overlong", self.num_overlong, overlong)]
            skip = " and ".join(f"{key}=skip" for key, count, policy in keys if count and policy == "error")
            raise ValueError(f"{quoted(refused, self.rows)}\nAll are in {path}. Mend or remove them, or set {skip}.")


def quoted(bad: Iterable[BadRow], rows: int) -> str:
    """How many rows cannot be used, and the first of them, for an error message."""
    bad = list(bad)
    lines = [f"{len(bad)} of {rows} rows cannot be used:", *(f"  {row}" for row in bad[:SHOWN])]
    return "\n".join(lines + ([f"  ... and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []))
