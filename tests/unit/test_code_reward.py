import json
import logging
import re
import threading
import time
from dataclasses import replace

import pytest

from mrl.config.instantiate import instantiate_callable
from mrl.core import metrics
from mrl.rewards import code_execution, sandbox
from mrl.rewards.code_execution import REASONS, CodeExecution, find_code, part_name, read_cases
from mrl.rewards.reward_types import Response, Score, Scores, Weighted
from mrl.rewards.rule_based import Overlong
from mrl.rewards.sandbox import SandboxLimits
from mrl.rewards.scorer import Scorer

pytestmark = pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason=str(sandbox.unavailable_reason()))

DOUBLE = {"inputs": ["1\n", "2\n", "5\n"], "outputs": ["2\n", "4\n", "10\n"]}
ASSERTS = {"asserts": ["assert double(1) == 2", "assert double(4) == 8\nassert double(0) == 0"]}
CALL = {"fn_name": "double", "inputs": [[1], [4]], "outputs": [2, 8]}


def fenced(program: str) -> str:
    return f"I think so:\n```python\n{program}\n```\nDone."


def score(program: str, tests: dict, **arguments) -> Score:
    row = Response(data_source="code", text=fenced(program), ground_truth=json.dumps(tests))
    return CodeExecution(**arguments)([row])[0]


def scored(value: float, reason: str | None = None) -> Score:
    """Return the score of a program that did not pass for this reason."""
    reasons = {part_name(each): float(each == reason) for each in REASONS}
    return Score(value, parts={"ended": float(reason is None), **reasons})


@pytest.mark.extended_after(2)
@pytest.mark.parametrize(
    "program, tests",
    [
        ("print(2 * int(input()))", DOUBLE),
        ("if __name__ == '__main__':\n    print('  ', 2 * int(input()), '\\n\\n')", DOUBLE),
        ("def double(x): return 2 * x", ASSERTS),
        ("print('hello', end='')\ndef double(x): return 2 * x", ASSERTS),
        ("def double(x): return 2 * x", {"functional": "assert double(1) == 2"}),
        ("def double(x): return 2 * x", CALL),
        ("class Solution:\n    def double(self, x): return 2 * x", CALL),
        ("def add(a, b): return a + b", {"fn_name": "add", "inputs": ["[1, 2]\n[3]"], "outputs": ["[1, 2, 3]"]}),
        ("def pair(x): return (x, None)", {"fn_name": "pair", "inputs": [["a"]], "outputs": [[["a", None]]]}),
        ("def text(x): return x", {"fn_name": "text", "inputs": [["100"], ["hello"]], "outputs": ["100", "hello"]}),
    ],
)
def test_a_correct_program_scores_one(program, tests):
    assert score(program, tests) == scored(1.0)
    assert score(program, tests, partial=True) == scored(1.0)


@pytest.mark.extended_after(2)
@pytest.mark.parametrize(
    "program, tests, fraction",
    [
        ("x = int(input())\nprint(2 * x if x < 5 else 0)", DOUBLE, 2 / 3),
        ("print(2)", DOUBLE, 1 / 3),
        ("print('two')", DOUBLE, 0),
        ("", DOUBLE, 0),
        ("def double(x): return 2", ASSERTS, 1 / 2),
        ("def double(x): return 2", CALL, 1 / 2),
        ("def double(x): return float('nan')", CALL, 0),
    ],
)
def test_a_wrong_answer_is_not_a_scoring_failure(program, tests, fraction):
    assert score(program, tests) == scored(0.0)
    assert score(program, tests, partial=True) == scored(pytest.approx(fraction))


@pytest.mark.parametrize(
    "program, reason, detail",
    [
        ("import os\nos.fork()", "forbidden", "PermissionError: [Errno 1] Operation not permitted"),
        ("bytearray(1 << 40)", "memory", "MemoryError"),
        ("print(1 / 0)", "wrong exit", "status 1, ZeroDivisionError: division by zero"),
        ("while True: print(1)", "too much output", "more than 1048576 bytes"),
        ("def double(x):", "wrong exit", "IndentationError: expected an indented block after function definition"),
    ],
)
def test_a_program_that_does_not_end_normally_scores_zero_with_the_reason(program, reason, detail, caplog):
    caplog.set_level(logging.DEBUG, logger="mrl.rewards.code_execution")
    assert score(program, DOUBLE) == scored(0.0, reason)
    assert f"a program did not end normally: {reason}: " in caplog.text and detail in caplog.text
    assert f"1 programs did not end normally: {reason} 1" in caplog.text


def test_an_endless_program_is_stopped_at_the_configured_limit():
    assert score("while True: pass", DOUBLE, limits=SandboxLimits(wall_s=0.3)) == scored(0.0, "time limit")


def test_a_crash_in_one_test_case_does_not_affect_the_others():
    result = score("x = int(input())\nassert x < 5, 'too large'\nprint(2 * x)", DOUBLE, partial=True)
    assert result == scored(pytest.approx(2 / 3), "wrong exit")
    crash = "x = int(input())\nif x == 5: raise SystemExit(1)\nprint(2 * x)"
    row = Response("code", fenced(crash), json.dumps(DOUBLE), num_tokens=100)
    with Scorer(CodeExecution(partial=True), workers=1) as scorer:
        assert scorer([row]) == [scored(pytest.approx(2 / 3), "wrong exit")], "a worker process keeps it too"


def test_a_crash_counts_like_a_wrong_answer_in_a_weighted_sum():
    reward = Weighted({"code": CodeExecution(), "long": Overlong(100, 10)})
    crash, wrong = (
        Response("code", fenced(program), json.dumps(DOUBLE), num_tokens=95) for program in ("1 / 0", "print(0)")
    )
    scores = reward([crash, wrong])
    assert [s.value for s in scores] == [-0.5, -0.5] and [s.failure for s in scores] == [None, None]
    assert scores[0].parts["code_code_wrong_exit"] == 1.0 and scores[1].parts["code_ended"] == 1.0


def test_reasons_are_metrics():
    row = Response("code", fenced("1 / 0"), json.dumps(DOUBLE))
    found = Scores.of(CodeExecution()([row, replace(row, text="no code")])).metrics()
    metrics.check(found)
    assert found["reward/code_wrong_exit_mean"] == found["reward/code_no_code_mean"] == 0.5
    assert found["reward/ended_mean"] == found["reward/code_time_limit_mean"] == found["reward/failed_fraction"] == 0.0


@pytest.mark.extended_after(3)
@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def double(x): raise SystemExit(0)",
        "print = lambda *a: None",
        "'''",
        "if False:",
        "import sys\nsys.stdin.read()\nexit()",
    ],
)
@pytest.mark.parametrize("tests", [ASSERTS, CALL], ids=["asserts", "call"])
def test_exiting_before_the_test_does_not_pass(program, tests):
    assert score(program, tests, partial=True).value == 0.0


def test_the_marker_of_a_pass_is_different_in_each_run():
    codes = {case.appended_code for _ in range(5) for case in read_cases(json.dumps(ASSERTS))}
    assert len(codes) == 10


def test_an_object_that_equals_everything_does_not_pass_a_call():
    program = "class Anything(int):\n    def __eq__(self, other): return True\ndef double(x): return Anything(3)"
    assert score(program, CALL) == scored(0.0)


def test_a_result_that_cannot_be_read_does_not_pass_a_call():
    program = "import json\njson.dumps = lambda value: '[' * 100_000\ndef double(x): return 2 * x"
    assert score(program, CALL) == scored(0.0)


def test_the_last_complete_python_block_is_the_program():
    assert find_code("```python\n1\n```\n```py\n2\n```\n```\n3\n```\n```python\n4") == "2\n"
    assert find_code("```Python3 \n1\n```") == "1\n"
    assert find_code("print(1)") is None and find_code("```bash\nls\n```") is None


def test_a_response_without_code_scores_zero_with_a_reason():
    row = Response("code", "print(2 * int(input()))", json.dumps(DOUBLE))
    assert CodeExecution()([row]) == [scored(0.0, "no code")]
    assert CodeExecution(whole_text=True)([row]) == [scored(1.0)]


@pytest.mark.extended_after(3)
@pytest.mark.parametrize(
    "ground_truth, message",
    [
        ("72", "no test cases in '72'; expected"),
        ("{", "test cases cannot be read"),
        ("{}", "no test cases"),
        ('{"inputs": ["1"], "outputs": []}', "as many outputs as inputs"),
        ('{"asserts": []}', "no test cases"),
        ('{"inputs": 1, "outputs": 2}', "test cases cannot be read"),
        ('{"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}', "test cases cannot be read"),
        ('{"fn_name": "f", "inputs": [1], "outputs": [1]}', "arguments are 1, not a list"),
        ({"asserts": [1]}, "1 is not a text with statements"),
        ({"input": ["1"]}, r"no test cases in \{'input': \['1'\]\}; expected"),
        (["1"], r"no test cases in \['1'\]; expected"),
    ],
)
def test_a_row_without_test_cases_is_a_failure_of_that_row(ground_truth, message):
    with pytest.raises(ValueError, match=message):
        read_cases(ground_truth)
    row = Response("code", fenced("print(2 * int(input()))"), DOUBLE)
    bad, good = CodeExecution()([replace(row, ground_truth=ground_truth), row])
    assert bad.value == 0.0 and re.search(message, bad.failure)
    assert good == scored(1.0), "a ground truth may be an object"


def test_a_sandbox_that_cannot_be_locked_is_a_failure(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("the restrictions of the sandbox could not be applied")

    monkeypatch.setattr(code_execution, "run", broken)
    assert score("print(1)", DOUBLE).failure == "the restrictions of the sandbox could not be applied"


def test_the_number_of_concurrent_programs_is_the_number_of_workers(monkeypatch):
    running, most, lock = 0, 0, threading.Lock()
    real = code_execution.run

    def counted(*arguments):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return real(*arguments)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(code_execution, "run", counted)
    tests = json.dumps({"inputs": [""], "outputs": ["1"]})
    rows = [Response("code", fenced(f"import time\ntime.sleep(0.1)\nprint({i})"), tests) for i in range(6)]
    begun = time.monotonic()
    scores = CodeExecution(workers=3)(rows)
    assert [each.value for each in scores] == [0, 1, 0, 0, 0, 0]
    assert most == 3 and time.monotonic() - begun < 20


def test_a_config_can_name_the_reward_with_limits():
    node = {
        "_target_": "mrl.rewards.code_execution.CodeExecution",
        "partial": True,
        "limits": {"wall_s": 1.5, "threads": 4},
    }
    assert instantiate_callable(node, "reward") == CodeExecution(
        partial=True, limits=SandboxLimits(wall_s=1.5, threads=4)
    )
    with pytest.raises(ValueError, match=r"(?s)rejects its arguments: .*wal_s.* is not a limit of the sandbox"):
        instantiate_callable({**node, "limits": {"wal_s": 1}}, "reward")
    with pytest.raises(ValueError, match="workers=0: expected a number of at least 1"):
        CodeExecution(workers=0)


def test_an_unsupported_machine_is_an_error_before_anything_starts(monkeypatch):
    monkeypatch.setattr(sandbox, "unavailable_reason", lambda: "the kernel offers no Landlock")
    with pytest.raises(ValueError, match="untrusted code cannot be run on this machine: the kernel offers no Landlock"):
        CodeExecution()
