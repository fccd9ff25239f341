"""Tools and parsers of tool calls: arithmetic without eval, malformed calls, tools that raise or hang."""

import asyncio
import threading
import time
from dataclasses import dataclass

import pytest

from mrl.rollout.agents.tools import (
    Calculator,
    HermesParser,
    MarkerParser,
    ToolCall,
    ToolCallError,
    ToolResult,
    run_call,
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("347*582", "201954"),
        (" 2 + 3 * 4 ", "14"),
        ("(2+3)*-4", "-20"),
        ("7/2", "3.5"),
        ("7//2", "3"),
        ("-7 % 4", "1"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("1.5e3 + +1", "1501.0"),
        ("9" * 150, "9" * 150),
    ],
)
def test_the_calculator_computes_arithmetic(expression, value):
    assert Calculator()(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "x",
        "max(1, 2)",
        "'a' * 9",
        "True + 1",
        "1j * 1j",
        "1 if 1 else 2",
        "[1][0]",
        "1 < 2",
        "~1",
        "1 << 9",
        "(-1) ** 0.5",
        "9**9**9",
        "(9**99)**99",
        "10**400",
        "2*",
        "",
        "1;2",
        "(" * 100,
        "1+" * 150 + "1",
        "\x00",
    ],
)
def test_other_code_and_large_numbers_are_refused_without_being_computed(expression):
    start = time.thread_time()
    with pytest.raises((ValueError, ArithmeticError)):
        Calculator()(expression)
    assert time.thread_time() - start < 0.5


def test_a_long_sum_within_the_limits_is_computed():
    assert Calculator(max_characters=2000)("1+" * 400 + "1") == "401"


def test_the_model_sees_a_division_by_zero():
    result = asyncio.run(run_call({"c": Calculator()}, ToolCall("c", "1/0"), 5))
    assert result == ToolResult("error: ZeroDivisionError: division by zero", failed=True)


@dataclass
class Hangs:
    release: threading.Event

    def __call__(self, text: str) -> str:
        self.release.wait(30)
        return text


def test_a_hanging_tool_is_abandoned_at_its_timeout_while_others_go_on():
    tools = {"slow": Hangs(threading.Event()), "quick": Calculator()}

    async def both() -> list[ToolResult]:
        return await asyncio.gather(
            run_call(tools, ToolCall("slow", "x"), 0.3), run_call(tools, ToolCall("quick", "1+1"), 5)
        )

    start = time.perf_counter()
    slow, quick = asyncio.run(both())
    tools["slow"].release.set()
    assert slow == ToolResult("error: slow did not answer within 0.3 s", failed=True) and quick == ToolResult("2")
    assert time.perf_counter() - start < 5


@dataclass
class Raises:
    what: BaseException

    def __call__(self, **arguments) -> str:
        raise self.what


@pytest.mark.parametrize("what", [ValueError("no"), KeyError("k"), SystemExit(3), RecursionError(), AssertionError()])
def test_a_tool_that_raises_fails_its_call_only(what):
    result = asyncio.run(run_call({"t": Raises(what)}, ToolCall("t", {}), 5))
    assert result.failed and result.text.startswith(f"error: {type(what).__name__}")


def test_calls_with_unknown_names_or_wrong_arguments_are_errors():
    tools = {"calculator": Calculator()}
    unknown = asyncio.run(run_call(tools, ToolCall("abacus", "1"), 5))
    assert unknown == ToolResult("error: no tool 'abacus'; the tools are calculator", failed=True)
    wrong = asyncio.run(run_call(tools, ToolCall("calculator", {"sum": "1+1"}), 5))
    assert wrong.failed and "unexpected keyword argument 'sum'" in wrong.text
    unread = asyncio.run(run_call(tools, ToolCallError("the call is not JSON"), 5))
    assert unread == ToolResult("error: the call is not JSON", failed=True)


def test_a_result_is_converted_to_text():
    assert asyncio.run(run_call({"length": len}, ToolCall("length", "four"), 5)) == ToolResult("4")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("no call", []),
        ("<call>1+1</call>", ["1+1"]),
        ("so <call> 1+1\n</call> and <call>2</call>", ["1+1", "2"]),
        ("<call>1+1", []),
        ("1+1</call>", []),
        ("<call></call>", [""]),
        ("<call>1<call>2</call>", ["1<call>2"]),
    ],
)
def test_marker_parser_finds_the_text_between_markers(text, found):
    assert MarkerParser("calculator")(text) == [ToolCall("calculator", argument) for argument in found]


def test_markers_may_be_any_text_except_the_empty_one():
    assert MarkerParser("t", start="(((", end=".*")("(((a.*") == [ToolCall("t", "a")]
    assert MarkerParser("t", end="=").stops == ("=",)
    with pytest.raises(ValueError, match="both markers"):
        MarkerParser("t", start="")


def test_hermes_calls_of_several_tools_in_one_turn():
    text = (
        'I look.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>\n'
        '<tool_call>{"name": "clock"}</tool_call><|im_end|>'
    )
    assert HermesParser()(text) == [ToolCall("calculator", {"expression": "1+1"}), ToolCall("clock", {})]


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        ("{", "not JSON"),
        ("[]", "expected"),
        ('{"name": 3}', "expected"),
        ('{"name": "c", "arguments": "1"}', "JSON object"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_hermes_call_is_an_error_that_the_model_sees(inner, why):
    (found,) = HermesParser()(f"<tool_call>{inner}</tool_call>")
    assert isinstance(found, ToolCallError) and why in str(found)


@pytest.fixture
def python():
    """Return a PythonTool, or skip the test if this machine does not support the sandbox."""
    sandbox = pytest.importorskip("mrl.rewards.sandbox")
    if lacks := sandbox.unavailable_reason():
        pytest.skip(lacks)
    from mrl.rollout.agents.tools import PythonTool

    return PythonTool({"wall_s": 5.0, "output_bytes": 1000})


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(sum(range(10)))", "45"),
        ("x = 1", "(no output)"),
        ("1/0", "error: RuntimeError: wrong exit: status 1, ZeroDivisionError: division by zero"),
        ("open('/etc/passwd')", "error: RuntimeError: forbidden: PermissionError"),
        ("print('x' * 2000)", "error: RuntimeError: too much output"),
    ],
)
def test_programs_run_in_the_sandbox(python, code, text):
    result = asyncio.run(run_call({"python": python}, ToolCall("python", {"code": code}), 20))
    assert result.text.startswith(text) and result.failed == text.startswith("error")


def test_unknown_sandbox_limits_are_refused(python):
    with pytest.raises(ValueError, match="'wall' is not a limit of the sandbox; did you mean 'wall_s'"):
        type(python)({"wall": 5.0})
