"""Reward for code: runs the program of a response on test cases, in a sandbox."""

import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

from mrl.rewards.reward_types import Response, Score
from mrl.rewards.sandbox import Reason, SandboxLimits, SandboxResult, require_sandbox, run

logger = logging.getLogger(__name__)

_BLOCK = re.compile(r"```(?:python3?|py)[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)  # Python code
_TEST_CASE_FORMS = '{"inputs": [...], "outputs": [...]}, with "fn_name" to call a function, or {"asserts": [...]}'


class CodeTestCase(Protocol):
    """Interface of a test case."""

    @property
    def stdin(self) -> str:
        """Standard input of the program."""
        ...

    @property
    def appended_code(self) -> str:
        """Code that is appended to the program."""
        ...

    def accepts(self, stdout: str) -> bool:
        """Return whether the program passes the test case. `stdout` is its standard output."""
        ...


@dataclass(frozen=True)
class StdoutTestCase:
    """Test case: the program reads `stdin` and must print `expected`. Empty lines and the amount of white space are ignored."""

    stdin: str
    expected: str
    appended_code: str = ""

    def accepts(self, stdout: str) -> bool:
        return _words(stdout) == _words(self.expected)


@dataclass(frozen=True)
class AssertTestCase:
    """Test case: the statements `check`, which are executed after the program, must not raise an exception."""

    check: str
    stdin: str = ""
    # Secret text that is printed after the statements, so that a program that calls sys.exit(0) does not pass.
    marker: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def appended_code(self) -> str:
        return f"\n{self.check}\nprint('\\n{self.marker}')\n"

    def accepts(self, stdout: str) -> bool:
        return self.marker in stdout.splitlines()


@dataclass(frozen=True)
class FunctionTestCase:
    """Test case: a function, or a method of class Solution, must return `expected` for `arguments`.

    The results are compared outside the sandbox. If `expected` is a list with one element, this element is also accepted as the
    result, because some data sets wrap the result in a list.
    """

    function: str  # name
    arguments: list[Any]
    expected: Any
    stdin: str = ""
    # Secret text that is printed before the result, so that other output of the program is not read as the result.
    marker: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def appended_code(self) -> str:
        arguments = repr(json.dumps(self.arguments))
        return (
            "\nimport json\n"
            f"_call = getattr(Solution(), {self.function!r}) if 'Solution' in globals() else {self.function}\n"
            f"print('\\n{self.marker}' + json.dumps(_call(*json.loads({arguments}))))\n"
        )

    def accepts(self, stdout: str) -> bool:
        printed = [line.removeprefix(self.marker) for line in stdout.splitlines() if line.startswith(self.marker)]
        try:
            value = json.loads(printed[-1]) if printed else None
        except (ValueError, RecursionError):  # the program may have replaced json.dumps
            return False
        return bool(printed) and (value == self.expected or [value] == self.expected)


def read_cases(ground_truth: str | Mapping[str, Any]) -> list[CodeTestCase]:
    """Return the test cases of a ground truth, which is a dict or the JSON text of a dict.

    The dict has one of these forms:

    - {"inputs": [stdin, ...], "outputs": [stdout, ...]}: the program reads an input and prints an output.
    - {"inputs": [...], "outputs": [...], "fn_name": name}: the function is called. If an input is a list, it is the list of
      arguments, and the output is the expected result. If an input is a text, each line is one argument as JSON, and the
      output is the expected result as JSON.
    - {"asserts": [statements, ...]}: the statements must not raise. The key may also be "functional".

    Raises ValueError for any other form.
    """
    shown = repr(ground_truth[:80] if isinstance(ground_truth, str) else ground_truth)[:90]
    try:
        tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        cases = _cases(tests) if isinstance(tests, Mapping) else []
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the test cases cannot be read ({error}): {shown}; expected {_TEST_CASE_FORMS}.") from error
    if not cases:
        raise ValueError(
            f"there are no test cases in {shown}; expected {_TEST_CASE_FORMS}, with as many outputs as inputs."
        )
    return cases


def _cases(tests: Mapping[str, Any]) -> list[CodeTestCase]:
    if checks := tests.get("asserts") or tests.get("functional"):
        return [AssertTestCase(_statements(check)) for check in ([checks] if isinstance(checks, str) else checks)]
    inputs, outputs = tests.get("inputs") or [], tests.get("outputs") or []
    if len(inputs) != len(outputs):
        return []
    pairs = zip(inputs, outputs, strict=True)
    if name := tests.get("fn_name"):
        return [_function_case(name, given, out) for given, out in pairs]
    return [StdoutTestCase(_text(given), _text(expected)) for given, expected in pairs]


def _function_case(name: str, given: list[Any] | str, out: Any) -> FunctionTestCase:
    """Return a test case that calls a function. An output that is a text is parsed as JSON only if the input is also a text."""
    if isinstance(given, str):
        lines = [json.loads(line) for line in given.splitlines() if line.strip()]
        return FunctionTestCase(name, lines, json.loads(out) if isinstance(out, str) else out)
    if not isinstance(given, list):
        raise TypeError(f"the arguments are {given!r:.40}, not a list")
    return FunctionTestCase(name, given, out)


def _statements(check: Any) -> str:
    if not isinstance(check, str):
        raise TypeError(f"{check!r:.40} is not a text with statements")
    return check


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def find_code(text: str) -> str | None:
    """Return the last fenced block of Python code, or None if the text has no such block."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


NO_CODE = "no code"  # the response has no complete code block
REASONS = (*(reason for reason in get_args(Reason) if reason != "ok"), NO_CODE)
"""Reasons why a program did not end normally: the reasons of the sandbox, and NO_CODE."""


def part_name(reason: str) -> str:
    """Return the part name under which a score records a reason: `time limit` -> `code_time_limit`."""
    return "code_" + reason.replace(" ", "_")


@dataclass(frozen=True)
class CodeExecution:
    """Gives the score 1 if the program in the response passes all test cases of the ground truth, else 0.

    With `partial`, the score is the fraction of the test cases that the program passes. The parts of the score say how the
    program ended. The parts are logged, but are not added to the score. `ended` is 1 if the program ended normally in all test
    cases that were run. Otherwise `code_<reason>` is 1 for the first reason that occurred; REASONS lists the reasons. Scoring
    fails only if the test cases cannot be read or the sandbox does not start.

    Raises ValueError for unknown or invalid limits, and on a machine that does not support the sandbox.
    """

    partial: bool = False  # False: stop at the first failed test case
    whole_text: bool = False  # True: the program is the whole response. False: it is the last ```python block
    workers: int = 4  # number of programs that run in parallel
    # resource limits of each run of a program
    limits: SandboxLimits | Mapping[str, float] = field(default_factory=SandboxLimits)

    def __post_init__(self) -> None:
        require_sandbox()
        if self.workers < 1:
            raise ValueError(f"workers={self.workers}: expected a number of at least 1.")
        if not isinstance(self.limits, SandboxLimits):
            object.__setattr__(self, "limits", SandboxLimits.of(self.limits))

    def __call__(self, responses: list[Response]) -> list[Score]:
        with ThreadPoolExecutor(self.workers, thread_name_prefix="code") as pool:
            scores = list(pool.map(self.score, responses))
        reasons = Counter(reason for score in scores for reason in REASONS if score.parts.get(part_name(reason)))
        counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        logger.info("%d programs did not end normally%s", reasons.total(), f": {counts}" if counts else "")
        return scores

    def score(self, response: Response) -> Score:
        """Run the program of one response on its test cases."""
        try:
            cases = read_cases(response.ground_truth)
            code = response.text if self.whole_text else find_code(response.text)
            passed, reason = (0, NO_CODE) if code is None else self._run_cases(code, cases)
        except (ValueError, RuntimeError, OSError) as error:
            # The error is in the ground truth or in the sandbox. An exception in the program is not raised here.
            return Score.failed(str(error))
        parts = {"ended": float(reason is None)} | {part_name(each): float(each == reason) for each in REASONS}
        return Score(passed / len(cases) if self.partial else float(passed == len(cases)), parts=parts)

    def _run_cases(self, code: str, cases: list[CodeTestCase]) -> tuple[int, str | None]:
        """Return the number of passed test cases, and the first reason for an abnormal end (None: all runs ended normally)."""
        passed, reason = 0, None
        for case in cases:
            result = self._run(code, case)
            is_passed = result.reason == "ok" and case.accepts(result.stdout)
            passed += is_passed
            if not reason and (reason := _reason(result, case)):
                logger.debug("a program did not end normally: %s", result.failure)
            if not is_passed and not self.partial:
                break
        return passed, reason

    def _run(self, code: str, case: CodeTestCase) -> SandboxResult:
        assert isinstance(self.limits, SandboxLimits), "__post_init__ builds the limits"
        return run(code + case.appended_code, case.stdin, self.limits)


def _reason(result: SandboxResult, case: CodeTestCase) -> str | None:
    """Return why the program did not end normally, or None if it did. A failed assertion of the test case is a normal end."""
    if isinstance(case, AssertTestCase) and result.reason == "wrong exit" and "AssertionError" in result.detail:
        return None
    return None if result.reason == "ok" else result.reason
