"""Reads prompt, ground truth and metadata from the columns of a row, and checks their values."""

import difflib
import math
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

from mrl.config.schema import Node
from mrl.data.images import ImageFile, read_images
from mrl.data.row_files import Row, RowError, column_value, text_value
from mrl.data.tokenizer import Messages

GroundTruth = str | list[Any] | dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")  # allowed roles of messages


@dataclass(frozen=True)
class PromptExample:
    """One checked prompt with its ground truth and metadata."""

    messages: Messages
    ground_truth: GroundTruth
    data_source: str  # name of the data set that the row comes from, such as gsm8k
    extra_info: dict[str, Any]  # further values for rewards
    ability: str = ""  # kind of task, such as math; empty: the row has none
    style: str = ""  # how verl scores the response: rule or model; empty: the row does not say how
    images: tuple[ImageFile, ...] = ()  # in the order of the placeholders in the messages


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a file. The defaults are verl's columns. A dotted name means a field inside a column.

    A column that the user names (`named`) must exist in every row. The default columns of `data_source`, `extra_info`, `ability`,
    `style`, `images` and `videos` may be absent from a row. If `data_source` is absent, PromptExample gets the default that
    `__call__` receives. If another of these columns is absent, the field of PromptExample with the same name is empty. If a
    field of Columns is None, the file has no such column. If `ground_truth` is None, PromptExample.ground_truth is "".
    """

    prompt: str = "prompt"  # text, or a list of messages
    ground_truth: str | None = "reward_model.ground_truth"  # text, number, list or object
    data_source: str | None = "data_source"
    # One column with an object, or several columns that become the fields of an object.
    extra_info: str | tuple[str, ...] | None = "extra_info"
    ability: str | None = "ability"
    style: str | None = "reward_model.style"
    images: str | None = "images"  # list of images: paths, bytes, or objects with bytes or path
    videos: str | None = "videos"  # must be empty
    named: frozenset[str] = frozenset()  # names of the fields above that the user has set

    @classmethod
    def of(cls, node: Node, key: str, base: Self | None = None) -> Self:
        """Return a copy of `base` (default: verl's columns) with the columns that `node` names (field of Columns -> column).

        `key`: config key of `node`. Raises ValueError if `node` has an unknown field or an invalid value.
        """
        known = [f.name for f in fields(cls) if f.name != "named"]
        for name, column in node.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}."
                raise ValueError(f"{key}.{name}: unknown key; {hint}")
            several = name == "extra_info" and isinstance(column, list) and all(isinstance(c, str) for c in column)
            if not (isinstance(column, str) or several or (column is None and name != "prompt")):
                raise ValueError(f"{key}.{name}={column!r}: expected the name of a column of your file.")
        chosen: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in node.items()
        }
        base = base or cls()
        named = base.named - node.keys() | {name for name, value in node.items() if value is not None}
        return replace(base, **chosen, named=named)

    def __call__(
        self, row: Row, default_data_source: str, system: str | None = None, folder: Path = Path()
    ) -> PromptExample:
        """Return the prompt of a row. `system` is the system message for a prompt that has none.

        Relative paths of images are relative to `folder`.

        Raises:
            RowError: a column is missing or has an invalid value.
        """
        return PromptExample(
            with_system_message(read_messages(column_value(row, self.prompt), self.prompt), system),
            "" if self.ground_truth is None else _ground_truth(column_value(row, self.ground_truth), self.ground_truth),
            text_value(row, self.data_source)
            if self.data_source and self._has(row, "data_source")
            else default_data_source,
            self._extra_info(row),
            self._optional_text(row, "ability"),
            self._optional_text(row, "style"),
            self._images(row, folder),
        )

    def _has(self, row: Row, name: str) -> bool:
        return name in self.named or str(vars(self)[name]).partition(".")[0] in row

    def _optional_text(self, row: Row, name: str) -> str:
        """Return the text in the column `ability` or `style`; "" if a default column is absent or has no text."""
        column = vars(self)[name]
        if column is None:
            return ""
        if name in self.named:
            return text_value(row, column)
        try:
            value = column_value(row, column)
        except RowError:
            return ""
        return value if isinstance(value, str) else ""

    def _images(self, row: Row, folder: Path) -> tuple[ImageFile, ...]:
        if self.videos and self._has(row, "videos") and column_value(row, self.videos):
            raise RowError(self.videos, "videos are not supported; remove the row, or use single frames as images.")
        if not self.images or not self._has(row, "images"):
            return ()
        return read_images(column_value(row, self.images), self.images, folder)

    def _extra_info(self, row: Row) -> dict[str, Any]:
        name = self.extra_info
        if isinstance(name, tuple):
            return {column: column_value(row, column) for column in name}
        if name is None or not self._has(row, "extra_info"):
            return {}
        value = column_value(row, name)
        if not isinstance(value, dict | None):
            raise RowError(name, f"expected an object, got {value!r:.80}.")
        return value or {}


def read_messages(value: Any, name: str) -> Messages:
    """Return the messages of a prompt. A text becomes one user message.

    Raises:
        RowError: `value` is neither a text nor a list of messages {role, content}, or a role is unknown.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise RowError(name, f"expected a text or a list of {{role, content}} messages, got {value!r:.80}.")
    for message in value:
        texts = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not texts or not all(isinstance(part, str) for part in texts):
            raise RowError(name, f"expected a message with text in role and content, got {message!r:.80}.")
        if message["role"] not in ROLES:
            raise RowError(name, f"unknown role {message['role']!r:.40}; expected one of {', '.join(ROLES)}.")
    return value


def with_system_message(messages: Messages, system: str | None) -> Messages:
    """Return `messages`. If they begin with no system or developer message, put the system message `system` in front of them."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _ground_truth(value: Any, name: str) -> GroundTruth:
    """Return a text, list or object unchanged, and a number as text. Raises RowError for other values, NaN and infinity."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | list | dict):
        raise RowError(name, f"expected text, a number, a list or an object, got {value!r:.80}.")
    if not _all_finite(value):
        raise RowError(name, f"expected finite numbers, got {value!r:.80}.")
    return value if isinstance(value, list | dict) else str(value)


def _all_finite(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(_all_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float | Decimal) or math.isfinite(value)
