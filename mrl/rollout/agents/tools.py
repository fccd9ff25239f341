"""Tools and tool parsers, which are plug-ins. A parser finds the calls in a turn. A tool returns the result of a call as text.

If a call fails, the model reads the error message as the result of the call. A failed call does not end the response.
"""

import ast
import asyncio
import json
import operator
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    """One tool call."""

    tool: str  # name of the tool
    arguments: Mapping[str, Any] | str  # name -> argument; or the text of the only argument


class ToolCallError(ValueError):
    """A malformed tool call. The model reads the error message."""


class ToolParser(Protocol):
    """Interface of tool parsers. `rollout.agent.parser._target_` names a class with this interface."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a turn, in addition to the model's end-of-turn token. Each text must be a single token."""
        ...

    def __call__(self, text: str) -> list[ToolCall | ToolCallError]:
        """Return the calls in an assistant turn, in order. A turn without calls ends the response.

        `text`: the decoded turn, with special tokens.
        """
        ...


@dataclass(frozen=True)
class MarkerParser:
    """Parser for one tool. A call is the text between two markers, as in <call>12*34</call>. The end marker ends the turn."""

    tool: str  # name of the tool in `rollout.agent.tools`
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
        """Parse the text between each start marker and the next end marker. A start marker without an end marker is ignored."""
        return [ToolCall(self.tool, found.strip()) for found in self._pattern.findall(text)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(f"{re.escape(self.start)}(.*?){re.escape(self.end)}", re.DOTALL)


_TAGGED_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class HermesParser:
    """Parser for the format of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    A turn may have several calls.
    """

    @property
    def stops(self) -> tuple[str, ...]:
        """Empty, because the model ends its turn itself after its calls."""
        return ()

    def __call__(self, text: str) -> list[ToolCall | ToolCallError]:
        """Parse every tagged call. A call in another format becomes a ToolCallError."""
        return [_from_json(found) for found in _TAGGED_CALL.findall(text)]


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


class Tool(Protocol):
    """Interface of tools. `rollout.agent.tools.NAME._target_` names a class or a function.

    Each call runs in its own thread, and several calls run at the same time. If a call raises an exception, the model reads the
    exception as an error message. A call that exceeds `tool_timeout_s` is abandoned, but its thread continues. Code that could
    block the interpreter must therefore run in another process.
    """

    def __call__(self, *args: Any, **arguments: Any) -> str: ...


@dataclass(frozen=True)
class ToolResult:
    """Result of a tool call."""

    text: str  # the result, or an error message, as the model reads it
    failed: bool = False


async def run_call(tools: Mapping[str, Tool], call: ToolCall | ToolCallError, timeout_s: float) -> ToolResult:
    """Run one call. Returns within `timeout_s` seconds. Never raises, because an error becomes the result of the call."""
    if isinstance(call, ToolCallError):
        return ToolResult(f"error: {call}", failed=True)
    if call.tool not in tools:
        return ToolResult(f"error: no tool {call.tool!r}; the tools are {', '.join(tools)}", failed=True)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[ToolResult] = loop.create_future()

    def work() -> None:
        result = _run(tools[call.tool], call.arguments)
        with suppress(RuntimeError):  # raised if the event loop was closed in the meantime
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(result))

    threading.Thread(target=work, name=f"tool-{call.tool}", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except TimeoutError:
        return ToolResult(f"error: {call.tool} did not answer within {timeout_s:g} s", failed=True)


def _run(tool: Tool, arguments: Mapping[str, Any] | str) -> ToolResult:
    """Call a tool. Any exception becomes an error message."""
    try:
        text = tool(arguments) if isinstance(arguments, str) else tool(**arguments)
        return ToolResult(text if isinstance(text, str) else str(text))
    except BaseException as error:  # also SystemExit, which a tool may raise
        return ToolResult(
            f"error: {type(error).__name__}: {error}" if str(error) else f"error: {type(error).__name__}", True
        )


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class Calculator:
    """Tool that computes an arithmetic expression with numbers, brackets and the operators + - * / // % **."""

    max_characters: int = 200  # maximal length of the expression
    max_bits: int = 1024  # maximal size of every intermediate integer, in bits

    def __call__(self, expression: str) -> str:
        """Return the value of an expression. Raises ValueError if the expression is not arithmetic or too large.

        Raises ArithmeticError if Python cannot compute the value, for example for a division by zero.
        """
        if len(expression) > self.max_characters:
            raise ValueError(f"longer than {self.max_characters} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except (SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{expression!r} is not arithmetic") from None
        return str(self._value(tree.body))

    def _value(self, node: ast.AST) -> int | float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return self._bounded(node.value)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self._value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._value(node.left), self._value(node.right)
            if isinstance(node.op, ast.Pow):
                self._check_power(left, right)
            return self._bounded(_OPERATORS[type(node.op)](left, right))
        raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")

    def _check_power(self, base: int | float, exponent: int | float) -> None:
        """Raise ValueError if the result of `base ** exponent` would be too large."""
        if (
            isinstance(base, int)
            and isinstance(exponent, int)
            and base.bit_length() * abs(exponent) > 2 * self.max_bits
        ):
            raise ValueError("the power is too large")

    def _bounded(self, value: Any) -> int | float:
        if isinstance(value, int) and value.bit_length() > self.max_bits:
            raise ValueError("the number is too large")
        if not isinstance(value, int | float):  # a root of a negative number is complex
            raise ValueError("the result is not a real number")
        return value


@dataclass(frozen=True)
class PythonTool:
    """Tool that runs a Python program in a sandbox and returns the program's standard output.

    The sandbox, which rewards for code also use, is a separate process. `limits`: fields of mrl.rewards.sandbox.SandboxLimits.
    Raises ValueError if a field is unknown or if this machine does not support the sandbox.
    """

    limits: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from mrl.rewards import sandbox  # imported here because only this tool needs it

        sandbox.require_sandbox()
        object.__setattr__(self, "_limits", sandbox.SandboxLimits.of(self.limits))

    def __call__(self, code: str) -> str:
        """Run a program and return its standard output. If the program fails, raises RuntimeError with the reason."""
        from mrl.rewards import sandbox

        outcome = sandbox.run(code, "", vars(self)["_limits"])
        if outcome.failure:
            raise RuntimeError(outcome.failure)
        return outcome.stdout.strip() or "(no output)"
