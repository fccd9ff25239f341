"""Tools: callables from a call's arguments to text. What goes wrong in one is told to the model, and harms nothing else."""

import ast
import asyncio
import operator
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from mrl.rollout.agents.tool_parsers import ToolCall, ToolCallError


class Tool(Protocol):
    """Any callable of this form can be named in `rollout.agent.tools.NAME._target_`.

    It is called from a thread of its own, several at a time. An exception is shown to the model as an error. One that does
    not return in time is left behind in its thread; code that could seize the interpreter belongs in a process.
    """

    def __call__(self, *args: Any, **arguments: Any) -> str: ...


@dataclass(frozen=True)
class ToolResult:
    """What a call came to, as the model reads it."""

    text: str
    failed: bool = False


async def run_call(tools: Mapping[str, Tool], call: ToolCall | ToolCallError, timeout_s: float) -> ToolResult:
    """Run one call; ends within `timeout_s` seconds, and never raises."""
    if isinstance(call, ToolCallError):
        return ToolResult(f"error: {call}", failed=True)
    if call.tool not in tools:
        return ToolResult(f"error: no tool {call.tool!r}; there is {', '.join(tools)}", failed=True)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[ToolResult] = loop.create_future()

    def work() -> None:
        result = _run(tools[call.tool], call.arguments)
        with suppress(RuntimeError):  # too late: the loop is closed
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(result))

    threading.Thread(target=work, name=f"tool-{call.tool}", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except TimeoutError:
        return ToolResult(f"error: {call.tool} did not answer within {timeout_s:g} s", failed=True)


def _run(tool: Tool, arguments: Mapping[str, Any] | str) -> ToolResult:
    try:
        text = tool(arguments) if isinstance(arguments, str) else tool(**arguments)
        return ToolResult(text if isinstance(text, str) else str(text))
    except BaseException as error:  # a tool's failure is the model's to deal with, also SystemExit
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
    """Arithmetic on numbers: + - * / // % ** and brackets; nothing else is evaluated."""

    max_characters: int = 200  # of an expression
    max_bits: int = 1024  # of any whole number on the way

    def __call__(self, expression: str) -> str:
        """The value of an expression. Raises: ValueError where it is no arithmetic or too large, ArithmeticError."""
        if len(expression) > self.max_characters:
            raise ValueError(f"longer than {self.max_characters} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except (SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{expression!r} is no arithmetic") from None
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
        raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")

    def _check_power(self, base: int | float, exponent: int | float) -> None:
        """Raise ValueError before a power is computed that would be too large."""
        if (
            isinstance(base, int)
            and isinstance(exponent, int)
            and base.bit_length() * abs(exponent) > 2 * self.max_bits
        ):
            raise ValueError("the power is too large")

    def _bounded(self, value: Any) -> int | float:
        if isinstance(value, int) and value.bit_length() > self.max_bits:
            raise ValueError("the number is too large")
        if not isinstance(value, int | float):  # the root of a negative number
            raise ValueError("the result is no real number")
        return value


@dataclass(frozen=True)
class PythonTool:
    """Runs a program in the sandbox of code rewards, each in a process of its own, and gives what it prints.

    `limits`: fields of mrl.rewards.sandbox.SandboxLimits. Raises ValueError for one that there is not, and where the machine cannot
    lock a program in.
    """

    limits: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from mrl.rewards import sandbox  # it asks what the kernel offers: only where code is run

        sandbox.require()
        object.__setattr__(self, "_limits", sandbox.SandboxLimits.of(self.limits))

    def __call__(self, code: str) -> str:
        """Standard output of the program. Raises: RuntimeError with why it ended, where it did not end well."""
        from mrl.rewards import sandbox

        outcome = sandbox.run(code, "", vars(self)["_limits"])
        if outcome.failure:
            raise RuntimeError(outcome.failure)
        return outcome.stdout.strip() or "(no output)"
