"""Builds the sources of prompts from the config: files, weighted mixtures, held-out sets, or user-defined data sets."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mrl.config.data_schema import DataConfig
from mrl.config.instantiate import instantiate
from mrl.config.process_schema import Node
from mrl.core.code_locations import describe_error
from mrl.data.columns import Columns, PromptExample
from mrl.data.row_files import BadRow, Row, RowTable, read_table

HELD_OUT_KEYS = (
    "reward",
    "rows",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "max_response_tokens",
)
"""Keys of a held-out set: its number of rows, and how its responses are sampled (mrl.rollout.client.SAMPLING_KEYS) and scored."""


def _no_reason(example: PromptExample) -> str:
    """Default of PromptSource.unusable_reason: every checked row can be used."""
    return ""


class UserDataset(Protocol):
    """Interface of a user-defined data set (`data.dataset`), such as a list of dicts or a Hugging Face Dataset.

    A row has `prompt` (text or messages) and `ground_truth`, and may have `data_source` and `extra_info`. `data.columns` can
    set other names. All rows are read once, in order, before any process starts. Rows are checked like the rows of a file.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class PromptSource:
    """One source of prompts: files, or a user-defined data set."""

    files: tuple[str, ...] = ()
    columns: Columns = field(default_factory=Columns)
    system: str | None = None  # system message for prompts without one
    name: str = ""  # key in data.mixture or data.test_sets; empty for a source under another config key
    weight: float = 1.0  # number of rows that are drawn from this source, relative to other sources
    user_dataset: UserDataset | None = None  # a user-defined data set, in place of files
    target: str = ""  # `_target_` of the user-defined data set, for error messages
    # returns why a row with valid columns cannot be used, for example because no reward can score it; "" if the row can be used
    unusable_reason: Callable[[PromptExample], str] = _no_reason
    max_prompt_tokens: int | None = (
        None  # largest number of tokens in a prompt; None: PromptConstraints.max_prompt_tokens
    )

    def tables(self) -> Iterator[RowTable]:
        """Yield the rows, file by file. Raises ValueError if a file cannot be read."""
        if self.user_dataset is not None:
            yield _read_user_dataset(self.user_dataset, self.target)
        for path in self.files:
            yield read_table(path)

    def split_by_file(self) -> Iterator["PromptSource"]:
        """Yield one source for each file. A source with a user-defined data set is yielded unchanged."""
        yield from ([replace(self, files=(file,)) for file in self.files] if self.files else [self])

    def data_source(self, table: RowTable) -> str:
        """Return PromptExample.data_source for the rows of `table` that have no column data_source."""
        return self.name or (Path(table.file).stem if self.files else "dataset")


def train_sources(data: DataConfig) -> list[PromptSource]:
    """Return the sources of training prompts.

    Raises ValueError if none or several of data.train, data.mixture and data.dataset are set.
    """
    given = {"data.train": data.train, "data.mixture": data.mixture, "data.dataset": data.dataset}
    chosen = [key for key, value in given.items() if value]
    if not chosen:
        raise ValueError(
            "data.train must name at least one parquet or jsonl file of prompts, or a folder (see docs/tutorials/data.md); "
            "or set data.mixture or data.dataset instead."
        )
    if len(chosen) > 1:
        raise ValueError(
            f"{' and '.join(chosen)} are set, but exactly one must be set; empty the others, as in data.train=[]."
        )
    if data.train:
        return [_source(dict(files=list(data.train)), "data.train", data)]
    if data.dataset:
        return [_source(dict(dataset=data.dataset), "data.dataset", data)]
    return [_named(name, node, "data.mixture", data, ["weight"]) for name, node in data.mixture.items()]


def test_sources(data: DataConfig) -> list[PromptSource]:
    """Return the sources of held-out prompts: data.test, which has no name, and each named set of data.test_sets.

    Raises ValueError if a source is invalid.
    """
    unnamed = [_source(dict(files=list(data.test)), "data.test", data)] if data.test else []
    return unnamed + [
        _named(name, node, "data.test_sets", data, HELD_OUT_KEYS) for name, node in data.test_sets.items()
    ]


def _named(name: str, node: Any, key: str, data: DataConfig, further_keys: Sequence[str]) -> PromptSource:
    node = node if isinstance(node, dict) else dict(files=node)
    return _source(node, f"{key}.{name}", data, name, further_keys)


def _source(node: Node, key: str, data: DataConfig, name: str = "", further_keys: Sequence[str] = ()) -> PromptSource:
    """Return the source of a config node. `further_keys`: keys that the node may have in addition to those of every source."""
    known = ("files", "dataset", "columns", "system", *further_keys)
    for unknown in node.keys() - set(known):
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(known)}."
        raise ValueError(f"{key}.{unknown}: unknown key; {hint}")
    if bool(node.get("files")) == bool(node.get("dataset")):
        raise ValueError(f"{key}: expected either files or a dataset with a _target_, got {node}.")
    weight = node.get("weight", 1.0)
    if not isinstance(weight, int | float) or not (math.isfinite(weight) and weight > 0):
        raise ValueError(
            f"{key}.weight={weight!r}: expected a number greater than 0; remove a source that should not be drawn."
        )
    base = Columns(ground_truth="ground_truth") if node.get("dataset") else Columns()
    columns = Columns.of(node.get("columns") or {}, f"{key}.columns", Columns.of(data.columns, "data.columns", base))
    own = dict(columns=columns, system=node.get("system", data.system), name=name, weight=float(weight))
    if node.get("dataset"):
        dataset = _construct_dataset(node["dataset"], key if key == "data.dataset" else f"{key}.dataset")
        return PromptSource(**own, user_dataset=dataset, target=node["dataset"]["_target_"])
    return PromptSource(**own, files=_files(node["files"], key))


def _files(value: Any, key: str) -> tuple[str, ...]:
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ValueError(f"{key}={value!r}: expected a list of files.")
    return tuple(files)


def _construct_dataset(node: Any, key: str) -> UserDataset:
    """Return the user's object, or the result of the user's function.

    Raises ValueError if the object or result is not a data set, or has no rows.
    """
    if not isinstance(node, dict):
        raise ValueError(f"{key}={node!r}: expected a _target_ and its arguments.")
    built = instantiate(node, key)
    if callable(built) and not hasattr(type(built), "__getitem__"):  # a function or an object that returns the rows
        built = _call(built, key, node["_target_"])
    for method in ("__len__", "__getitem__"):
        if not hasattr(type(built), method):
            raise ValueError(
                f"{key}: {node['_target_']} gives {type(built).__name__}, which has no {method} (see docs/tutorials/data.md)."
            )
    if not len(built):
        raise ValueError(f"{key}: {node['_target_']} has no rows.")
    return built


def _call(built: Callable[[], Any], key: str, target: str) -> Any:
    try:
        return built()
    except Exception as error:  # user code may raise anything; the message names the config key
        raise ValueError(f"{key}: {target} failed: {describe_error(error)}") from error


def _read_user_dataset(dataset: UserDataset, target: str) -> RowTable:
    rows: list[Row] = []
    row_numbers, bad = [], []
    for number in range(len(dataset)):
        try:
            rows.append(dict(dataset[number]))
            row_numbers.append(number)
        except Exception as error:  # user code may raise anything; it is reported as a bad row
            bad.append(BadRow(target, number, "", f"expected a row, but the data set raised {describe_error(error)}"))
    return RowTable(target, rows, row_numbers, bad)
