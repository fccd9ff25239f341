"""Where prompts come from, as the config says: files, mixtures of them, named sets, or an object of the user's own."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mrl.config.instantiate import construct
from mrl.config.schema import DataConfig, Node
from mrl.data.columns import Columns
from mrl.data.row_files import BadRow, Row, RowTable, read_table


class Rows(Protocol):
    """What `data.dataset` must give: rows by number. A list of dicts is one, and so is a Hugging Face `Dataset`.

    A row has `prompt` (text or messages) and `ground_truth`, and may have `data_source` and `extra_info`; `data.columns`
    gives them other names. Rows are read once, in order, before any process starts, and checked like those of a file.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class PromptSource:
    """One source of prompts and its share in a mixture."""

    files: tuple[str, ...] = ()
    columns: Columns = field(default_factory=Columns)
    system: str | None = None  # system message of prompts that begin with none
    name: str = ""  # of a mixture or of a set; also data_source of rows that have none. Empty: the file's name
    weight: float = 1.0  # rows drawn, relative to other sources
    rows: Rows | None = None  # a user's own, in place of files
    origin: str = ""  # what gave them, for messages

    def tables(self) -> Iterator[RowTable]:
        """The rows, file by file; raises ValueError at a file that cannot be read."""
        if self.rows is not None:
            yield _read_own(self.rows, self.origin)
        for path in self.files:
            yield read_table(path)

    def split_by_file(self) -> Iterator["PromptSource"]:
        """The same with one file each; a user's own rows as they are."""
        yield from ([replace(self, files=(file,)) for file in self.files] if self.files else [self])

    def data_source(self, table: RowTable) -> str:
        """Of rows that do not say."""
        return self.name or (Path(table.file).stem if self.files else "dataset")


def train_sources(data: DataConfig) -> list[PromptSource]:
    """The sources of training prompts; raises ValueError unless exactly one of data.train, mixture and dataset is set."""
    given = {"data.train": data.train, "data.mixture": data.mixture, "data.dataset": data.dataset}
    chosen = [key for key, value in given.items() if value]
    if not chosen:
        raise ValueError(
            "data.train must name at least one parquet or jsonl file of prompts, or a folder (see docs/tutorials/data.md); "
            "data.mixture and data.dataset may stand in its place."
        )
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are set, one at most can be; empty the others: data.train=[].")
    if data.train:
        return [_source(dict(files=list(data.train)), "data.train", data)]
    if data.dataset:
        return [_source(dict(dataset=data.dataset), "data.dataset", data)]
    return [_named(name, node, "data.mixture", data) for name, node in data.mixture.items()]


def test_sources(data: DataConfig) -> list[PromptSource]:
    """The held-out sets: the files of data.test without a name, and each of data.test_sets by its own; raises ValueError."""
    unnamed = [_source(dict(files=list(data.test)), "data.test", data)] if data.test else []
    return unnamed + [_named(name, node, "data.test_sets", data) for name, node in data.test_sets.items()]


def _named(name: str, node: Any, key: str, data: DataConfig) -> PromptSource:
    node = node if isinstance(node, dict) else dict(files=node)
    return _source(node, f"{key}.{name}", data, name)


def _source(node: Node, key: str, data: DataConfig, name: str = "") -> PromptSource:
    fits = ("files", "dataset", "weight", "columns", "system")
    for unknown in node.keys() - set(fits):
        near = difflib.get_close_matches(unknown, fits, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(fits)}."
        raise ValueError(f"{key}.{unknown}: no such key of a source; {hint}")
    if bool(node.get("files")) == bool(node.get("dataset")):
        raise ValueError(f"{key}: expected either files or a dataset with a _target_, got {node}.")
    weight = node.get("weight", 1.0)
    if not isinstance(weight, int | float) or not (math.isfinite(weight) and weight > 0):
        raise ValueError(
            f"{key}.weight={weight!r}: expected a number greater than 0; leave out what is not to be drawn."
        )
    base = Columns(ground_truth="ground_truth") if node.get("dataset") else Columns()
    columns = Columns.of(node.get("columns") or {}, f"{key}.columns", Columns.of(data.columns, "data.columns", base))
    own = dict(columns=columns, system=node.get("system", data.system), name=name, weight=float(weight))
    if node.get("dataset"):
        rows = _construct_rows(node["dataset"], key if key == "data.dataset" else f"{key}.dataset")
        return PromptSource(**own, rows=rows, origin=node["dataset"]["_target_"])
    return PromptSource(**own, files=_files(node["files"], key))


def _files(value: Any, key: str) -> tuple[str, ...]:
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ValueError(f"{key}={value!r}: expected a list of files.")
    return tuple(files)


def _construct_rows(node: Any, key: str) -> Rows:
    """The user's object, or what the user's function returns; raises ValueError where it does not give rows."""
    if not isinstance(node, dict):
        raise ValueError(f"{key}={node!r}: expected a _target_ and its arguments.")
    built = construct(node, key)
    if callable(built) and not hasattr(
        type(built), "__getitem__"
    ):  # a function, or an object that is called for its rows
        built = _called(built, key, node["_target_"])
    for method in ("__len__", "__getitem__"):
        if not hasattr(type(built), method):
            raise ValueError(
                f"{key}: {node['_target_']} gives {type(built).__name__}, which has no {method} (see docs/tutorials/data.md)."
            )
    if not len(built):
        raise ValueError(f"{key}: {node['_target_']} has no rows.")
    return built


def _called(built: Callable[[], Any], key: str, target: str) -> Any:
    try:
        return built()
    except Exception as error:  # any failure of a user's code: shown with the key that named it
        raise ValueError(f"{key}: {target} failed: {error!r}") from error


def _read_own(source: Rows, origin: str) -> RowTable:
    rows: list[Row] = []
    numbers, bad = [], []
    for number in range(len(source)):
        try:
            rows.append(dict(source[number]))
            numbers.append(number)
        except Exception as error:  # any failure of a user's code is that row's, and is shown with its number
            bad.append(BadRow(origin, number, "", f"expected a row, the data set raised {error!r:.200}"))
    return RowTable(origin, rows, numbers, bad)
