"""Parsers of tool calls in assistant turns. A parser is a plug-in with `__call__` and `stops`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    """One tool call: the tool's name, and its arguments by name or its only argument as text."""

    tool: str
    arguments: Mapping[str, Any] | str


class ToolCallError(ValueError):
    """A malformed tool call; the model sees the message."""


class ToolParser(Protocol):
    """Interface of a parser, which `rollout.agent.parser._target_` names."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts of one token each that end a turn, in addition to the model's end of turn."""
        ...

    def __call__(self, text: str) -> list[ToolCall | ToolCallError]:
        """Parse the calls of an assistant turn, in order; without calls the response ends. `text` includes special tokens."""
        ...


@dataclass(frozen=True)
class MarkerParser:
    """Calls of one tool as text between two markers, such as <call>12*34</call>. The end marker ends the turn."""

    tool: str  # name of the tool in rollout.agent.tools
    start: str = "<call>"
    end: str = "</call>"

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise ValueError(f"start={self.start!r}, end={self.end!r}: both markers need at least one character.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The end marker."""
        return (self.end,)

    def __call__(self, text: str) -> list[ToolCall | ToolCallError]:
        """Parse the text between each start marker and the next end marker. A start without an end is not a call."""
        return [ToolCall(self.tool, found.strip()) for found in self._pattern.findall(text)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(f"{re.escape(self.start)}(.*?){re.escape(self.end)}", re.DOTALL)


_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class HermesParser:
    """Calls in the format of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several per turn."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Empty: the model ends its turn after its calls."""
        return ()

    def __call__(self, text: str) -> list[ToolCall | ToolCallError]:
        """Parse every tagged call. One that is not JSON of this form becomes a ToolCallError."""
        return [_from_json(found) for found in _TAGGED.findall(text)]


def _from_json(text: str) -> ToolCall | ToolCallError:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCallError(f"the call is not JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCallError('expected {"name": ..., "arguments": {...}}')
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCallError(f"arguments of {found['name']} should be a JSON object")
    return ToolCall(found["name"], arguments)
