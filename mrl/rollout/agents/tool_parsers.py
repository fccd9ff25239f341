"""How a tool call is recognised in what an assistant says. A parser is a plug-in: `__call__` and `stops`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    """One call: a tool's name, and its arguments by name, or its only argument as text."""

    tool: str
    arguments: Mapping[str, Any] | str


class ToolCallError(ValueError):
    """What was meant as a call cannot be read; the model is told why."""


class ToolParser(Protocol):
    """Any callable of this form can be named in `rollout.agent.parser._target_`."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts of single tokens that end a turn, besides the model's own end."""
        ...

    def __call__(self, text: str) -> list[ToolCall | ToolCallError]:
        """The calls of one assistant turn, in order; none: the conversation is over. `text` holds special tokens."""
        ...


@dataclass(frozen=True)
class MarkerParser:
    """A call is the text between two markers, for one tool: <call>12*34</call>. Its end stops the turn."""

    tool: str  # the name under which rollout.agent.tools has it
    start: str = "<call>"
    end: str = "</call>"

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise ValueError(f"start={self.start!r}, end={self.end!r}: both markers need at least one character.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The end of a call."""
        return (self.end,)

    def __call__(self, text: str) -> list[ToolCall | ToolCallError]:
        """The text between each start and the next end; a start without an end is no call."""
        return [ToolCall(self.tool, found.strip()) for found in self._pattern.findall(text)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(f"{re.escape(self.start)}(.*?){re.escape(self.end)}", re.DOTALL)


_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class HermesParser:
    """Calls as HermesParser and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several in one turn."""

    @property
    def stops(self) -> tuple[str, ...]:
        """None: the model ends its turn behind its calls."""
        return ()

    def __call__(self, text: str) -> list[ToolCall | ToolCallError]:
        """Every tagged call; one that is no JSON of this form is a ToolCallError."""
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
