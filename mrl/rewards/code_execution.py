"""Rewards for programs: the code in a response is run against the test cases of its row, in the sandbox."""

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
from mrl.rewards.sandbox import Reason, SandboxLimits, SandboxResult, require, run

logger = logging.getLogger(__name__)

_BLOCK = re.compile(r"```(?:python3?|py)[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_FORMS = '{"inputs": [...], "outputs": [...]}, with "fn_name" to call a function, or {"asserts": [...]}'


class CodeTestCase(Protocol):
    """One test: what the program reads, what is run after it, and whether what was printed is right."""

    @property
    def stdin(self) -> str: ...
    @property
    def tail(self) -> str: ...
    def accepts(self, stdout: str) -> bool: ...


@dataclass(frozen=True)
class StdoutTestCase:
    """Reads `stdin` and prints `expected`, whatever the space between words and the empty lines."""

    stdin: str
    expected: str
    tail: str = ""

    def accepts(self, stdout: str) -> bool:
        return _words(stdout) == _words(self.expected)


@dataclass(frozen=True)
class AssertTestCase:
    """The statements of `check` run after the program without an exception, to their end."""

    check: str
    stdin: str = ""
    mark: str = field(default_factory=lambda: secrets.token_hex(16))  # printed at the end: `sys.exit(0)` is no pass

    @property
    def tail(self) -> str:
        return f"\n{self.check}\nprint('\\n{self.mark}')\n"

    def accepts(self, stdout: str) -> bool:
        return self.mark in stdout.splitlines()


@dataclass(frozen=True)
class FunctionTestCase:
    """The function, or the method of class Solution, gives `expected` for `arguments`; compared outside the sandbox.

    Both may be wrapped as the data sets have it: an `expected` of one element also matches that element.
    """

    function: str
    arguments: list[Any]
    expected: Any
    stdin: str = ""
    mark: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def tail(self) -> str:
        arguments = repr(json.dumps(self.arguments))
        return (
            "\nimport json\n"
            f"_call = getattr(Solution(), {self.function!r}) if 'Solution' in globals() else {self.function}\n"
            f"print('\\n{self.mark}' + json.dumps(_call(*json.loads({arguments}))))\n"
        )

    def accepts(self, stdout: str) -> bool:
        said = [line.removeprefix(self.mark) for line in stdout.splitlines() if line.startswith(self.mark)]
        try:
            result = json.loads(said[-1]) if said else None
        except (ValueError, RecursionError):  # the program may have put its own json.dumps in place
            return False
        return bool(said) and (result == self.expected or [result] == self.expected)


def read_cases(ground_truth: str | Mapping[str, Any]) -> list[CodeTestCase]:
    """The test cases of a row.

    ground_truth: an object or its JSON, {"inputs": [stdin], "outputs": [stdout]}; the same with "fn_name", where an input is
        a list of arguments and its output a value, or both are texts: one JSON value per line, and one; or {"asserts":
        [statements]}, for which "functional" is another name.
    Raises: ValueError for anything else.
    """
    shown = repr(ground_truth[:80] if isinstance(ground_truth, str) else ground_truth)[:90]
    try:
        tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        cases = _cases(tests) if isinstance(tests, Mapping) else []
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"test cases cannot be read ({error}): {shown}; expected {_FORMS}.") from error
    if not cases:
        raise ValueError(f"no test cases in {shown}; expected {_FORMS}, as many outputs as inputs.")
    return cases


def _cases(tests: Mapping[str, Any]) -> list[CodeTestCase]:
    if checks := tests.get("asserts") or tests.get("functional"):
        return [AssertTestCase(_statements(check)) for check in ([checks] if isinstance(checks, str) else checks)]
    inputs, outputs = tests.get("inputs") or [], tests.get("outputs") or []
    if len(inputs) != len(outputs):
        return []
    pairs = zip(inputs, outputs, strict=True)
    if name := tests.get("fn_name"):
        return [_returns(name, given, out) for given, out in pairs]
    return [StdoutTestCase(_text(given), _text(expected)) for given, expected in pairs]


def _returns(name: str, given: list[Any] | str, out: Any) -> FunctionTestCase:
    """A call; texts as output are JSON where the input is a text of JSON too, and themselves where it is a list."""
    if isinstance(given, str):
        lines = [json.loads(line) for line in given.splitlines() if line.strip()]
        return FunctionTestCase(name, lines, json.loads(out) if isinstance(out, str) else out)
    if not isinstance(given, list):
        raise TypeError(f"arguments are {given!r:.40}, no list")
    return FunctionTestCase(name, given, out)


def _statements(check: Any) -> str:
    if not isinstance(check, str):
        raise TypeError(f"{check!r:.40} is no text of statements")
    return check


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def find_code(text: str) -> str | None:
    """The last block that is fenced as Python; None if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


NO_CODE = "no code"
REASONS = (*(reason for reason in get_args(Reason) if reason != "ok"), NO_CODE)
"""Why a program may not end well: those of the sandbox, and a response without a closed block of code."""


def part_name(reason: str) -> str:
    """The part of a score that tells of a reason: `time limit` -> `code_time_limit`."""
    return "code_" + reason.replace(" ", "_")


@dataclass(frozen=True)
class CodeExecution:
    """1 for a program that passes all test cases of its row, else 0; `partial`: the fraction that it passes.

    How the program ended are parts of the score: `ended` (1: by itself, without an error, in every test case that was run) and
    `code_<reason>` for each of REASONS (1: that is why it first did not). A score has a failure only where nothing can be
    said of the program: test cases that cannot be read, or a sandbox that does not start.

    Raises: ValueError for limits that do not exist or cannot be kept, and where the machine cannot lock code in.
    """

    partial: bool = False  # False: also stops at the first test case that is not passed
    whole_text: bool = False  # True: all of the response is the program, not its last ```python block
    workers: int = 4  # programs that run at the same time
    limits: SandboxLimits | Mapping[str, float] = field(
        default_factory=SandboxLimits
    )  # of one program on one test case

    def __post_init__(self) -> None:
        require()
        if self.workers < 1:
            raise ValueError(f"workers={self.workers}: expected at least 1 program at a time.")
        if not isinstance(self.limits, SandboxLimits):
            object.__setattr__(self, "limits", SandboxLimits.of(self.limits))

    def __call__(self, responses: list[Response]) -> list[Score]:
        with ThreadPoolExecutor(self.workers, thread_name_prefix="code") as pool:
            scores = list(pool.map(self.score, responses))
        ends = Counter(reason for score in scores for reason in REASONS if score.parts.get(part_name(reason)))
        counts = ", ".join(f"{reason} {count}" for reason, count in ends.most_common())
        logger.info("%d programs did not end well%s", ends.total(), f": {counts}" if counts else "")
        return scores

    def score(self, response: Response) -> Score:
        """Run one response on its row's test cases."""
        try:
            cases = read_cases(response.ground_truth)
            code = response.text if self.whole_text else find_code(response.text)
            passed, reason = (0, NO_CODE) if code is None else self._passed(code, cases)
        except (ValueError, RuntimeError, OSError) as error:  # of the row, or of the sandbox; never of the program
            return Score.failed(str(error))
        parts = {"ended": float(reason is None)} | {part_name(each): float(each == reason) for each in REASONS}
        return Score(passed / len(cases) if self.partial else float(passed == len(cases)), parts=parts)

    def _passed(self, code: str, cases: list[CodeTestCase]) -> tuple[int, str | None]:
        """How many cases pass, and why the program first did not end normally (None: it always did)."""
        passed, reason = 0, None
        for case in cases:
            outcome = self._run(code, case)
            good = outcome.reason == "ok" and case.accepts(outcome.stdout)
            passed += good
            if not reason and (reason := _reason(outcome, case)):
                logger.debug("a program did not end well: %s", outcome.failure)
            if not good and not self.partial:
                break
        return passed, reason

    def _run(self, code: str, case: CodeTestCase) -> SandboxResult:
        assert isinstance(self.limits, SandboxLimits), f"limits={self.limits!r} were not built"
        return run(code + case.tail, case.stdin, self.limits)


def _reason(outcome: SandboxResult, case: CodeTestCase) -> str | None:
    """Why the program did not end normally; a test case whose own assertion fails is a wrong answer."""
    if isinstance(case, AssertTestCase) and outcome.reason == "wrong exit" and "AssertionError" in outcome.detail:
        return None
    return None if outcome.reason == "ok" else outcome.reason
