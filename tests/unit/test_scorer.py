"""The scorer: a reward that raises, hangs, crashes or returns invalid values fails only the responses that cause it."""

import asyncio
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import psutil
import pytest
from mrl_runs import is_alive, select_processes, signal_all

from mrl.core import metrics
from mrl.rewards.reward_types import Response, Score, Scores, Turn, Weighted, gather_scores
from mrl.rewards.rule_based import ExactMatch
from mrl.rewards.scorer import Scorer, check_reward


def of_texts(*texts: str, per_group: int = 2) -> list[Response]:
    return [Response("source", text, "1", group=i // per_group) for i, text in enumerate(texts)]


def misbehave(text: str) -> float:
    """Return the score that the text names, or fail in the way that the text names."""
    match text:
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            sys.exit(3)
        case "hang":
            time.sleep(600)
        case "spin":
            return float(9**9**9)  # never returns to the interpreter
        case "die":
            os._exit(7)
        case "crash":
            ctypes.string_at(0)
        case "fill":
            return float(len(bytearray(3 * 2**30)))
        case "nan":
            return math.nan
        case "text":
            return "0.5"  # type: ignore[return-value]
    return 1.0


@dataclass(frozen=True)
class Single:
    """Scores each response independently."""

    per_sample: ClassVar[bool] = True

    def __call__(self, responses):
        return [misbehave(r.text) for r in responses]


@dataclass(frozen=True)
class Batch:
    """A user-defined class without optional attributes: it is called with the whole batch."""

    def __call__(self, responses):
        return [misbehave(r.text) for r in responses]


REASONS = {
    "raise": "KeyError: 'no such thing'",
    "exit": "SystemExit: 3",
    "hang": "no score within 2.0 s",
    "spin": "no score within 2.0 s",
    "die": "died (exit code 7)",
    "crash": "died (exit code -11)",
    "fill": "MemoryError",
    "nan": "expected a finite number, got 'nan'",
    "text": "expected a finite number, got '0.5' (str)",
}


@pytest.fixture(scope="module")
def single():
    with Scorer(Single(), workers=2, sample_timeout_s=2.0, memory_gb=2) as scorer:
        yield scorer


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("fault", REASONS)
def test_only_the_response_that_causes_a_failure_fails(single, fault):
    scores = single(of_texts("fine", fault, "fine", "fine"))
    assert [s.value for s in scores] == [1.0, 0.0, 1.0, 1.0]
    assert [s.failure is None for s in scores] == [True, False, True, True]
    assert REASONS[fault] in scores[1].failure


def test_a_failing_batch_is_retried_in_smaller_parts():
    texts = ["fine"] * 12
    texts[3], texts[8] = "raise", "die"
    with Scorer(Batch(), workers=2, sample_timeout_s=5) as scorer:
        scores = scorer(of_texts(*texts))
    assert [i for i, s in enumerate(scores) if s.failure] == [3, 8]
    assert sum(s.value for s in scores) == 10


CALLS: list[int] = []


@dataclass(frozen=True)
class Counted:
    """Records the number of responses of each call; raises if a text says so."""

    in_process: ClassVar[bool] = True

    def __call__(self, responses):
        CALLS.append(len(responses))
        return [misbehave(r.text) for r in responses]


def test_scored_responses_are_not_scored_again():
    """The reward is called with all responses, with those of each prompt, and with each response of the prompt that failed.

    An invalid value is no reason for another call.
    """
    CALLS.clear()
    scores = Scorer(Counted())(of_texts("fine", "nan", "raise", "fine", "fine", "fine"))
    assert CALLS == [6, 2, 2, 2, 1, 1]
    assert [s.failure is None for s in scores] == [True, False, False, True, True, True]
    CALLS.clear()
    Scorer(Counted())(of_texts("raise", per_group=1))
    assert CALLS == [1], "one response cannot be narrowed down"


@pytest.mark.extended
def test_a_hanging_batch_is_ended_and_retried_in_smaller_parts():
    start = time.monotonic()
    with Scorer(Batch(), workers=2, sample_timeout_s=1.0) as scorer:
        scores = scorer(of_texts("fine", "hang", "fine", "fine"))
    assert [s.value for s in scores] == [1.0, 0.0, 1.0, 1.0]
    assert time.monotonic() - start < 30


def test_the_whole_call_has_a_deadline():
    """Without a deadline, ten hanging responses would take two workers 50 s."""
    with Scorer(Single(), workers=2, sample_timeout_s=10) as scorer:
        assert scorer(of_texts("fine"))[0].value == 1.0
        scorer.timeout_s = 1.5
        start = time.monotonic()
        scores = scorer(of_texts("fine", *["hang"] * 10))
        assert time.monotonic() - start < 25
        assert scores[0].value == 1.0 and all(s.failure for s in scores[1:])
        assert any("scoring.timeout_s" in s.failure for s in scores[1:])
        scorer.timeout_s = 60
        assert scorer(of_texts("fine", "fine"))[1].value == 1.0, "the pool is usable afterwards"


def test_calls_of_an_in_process_reward_that_start_after_the_deadline_fail():
    """Each response takes 0.3 s; all of them would take 9 s."""

    class Slow(Single):
        in_process: ClassVar[bool] = True

        def __call__(self, responses):
            time.sleep(0.3)
            return super().__call__(responses)

    start = time.monotonic()
    scores = Scorer(Slow(), timeout_s=1.0)(of_texts(*["fine"] * 30))
    assert time.monotonic() - start < 6
    done = sum(s.failure is None for s in scores)
    assert 1 <= done <= 4, "the one that began last is waited for"
    assert all("scoring.timeout_s" in s.failure for s in scores[done:])


def test_workers_can_be_started_in_advance():
    with Scorer(Single(), workers=2) as scorer:
        scorer.start()
        assert len(workers_of(os.getpid())) >= 2
        assert scorer(of_texts("fine"))[0].value == 1.0
    Scorer(ExactMatch()).start()  # needs no workers


def test_an_empty_list_has_no_scores(single):
    assert single([]) == []


def test_megabytes_of_text_pass(single):
    scores = single(of_texts("x" * 20_000_000, "\x00\ud7ff🦆" * 1000))
    assert [s.value for s in scores] == [1.0, 1.0]


@dataclass(frozen=True)
class Forgetful:
    """Returns one value too few if the text of a response is "forget"."""

    in_process: ClassVar[bool] = True

    def __call__(self, responses):
        return [1.0] * (len(responses) - any(r.text == "forget" for r in responses))


def test_a_wrong_number_of_values_fails_only_the_responses_that_cause_it():
    scores = Scorer(Forgetful())(of_texts("a", "b", "forget", "d"))
    assert [s.value for s in scores] == [1.0, 1.0, 0.0, 1.0]
    assert scores[2].failure == "the reward returned 0 values for 1 responses."


@dataclass(frozen=True)
class BestOfGroup:
    """Scores the longest response of each group with 1. This is wrong if it gets only a part of a group."""

    whole_groups: ClassVar[bool] = True

    def __call__(self, responses):
        [misbehave(r.text) for r in responses]
        longest = {r.group: max(len(o.text) for o in responses if o.group == r.group) for r in responses}
        return [float(len(r.text) == longest[r.group]) for r in responses]


def test_a_reward_of_whole_groups_never_gets_a_part_of_a_group():
    with Scorer(BestOfGroup(), workers=1) as scorer:
        scores = scorer(of_texts("short", "longer", "raise", "quite long", "long", "longest"))
    assert [s.value for s in scores] == [0, 1, 0, 0, 0, 1]
    assert [bool(s.failure) for s in scores] == [False, False, True, True, False, False]


async def waiting(responses):
    """A reward that is a coroutine function."""
    await asyncio.sleep(0.01)
    return [misbehave(r.text) for r in responses]


def test_an_async_reward_is_awaited():
    with Scorer(waiting, workers=1, sample_timeout_s=5) as scorer:
        scores = scorer(of_texts("fine", "raise"))
    assert [s.value for s in scores] == [1.0, 0.0] and "KeyError" in scores[1].failure


@dataclass(frozen=True)
class Numbers:
    """Returns values of the types that libraries return."""

    in_process: ClassVar[bool] = True

    def __call__(self, responses):
        return [True, 2, np.float32(0.5), np.array([3.0]), np.array([1.0, 2.0]), None]


def test_numbers_of_any_kind_are_values():
    scores = Scorer(Numbers())(of_texts(*"abcdef"))
    assert [s.value for s in scores] == [1.0, 2.0, 0.5, 3.0, 0.0, 0.0]
    assert [bool(s.failure) for s in scores] == [False] * 4 + [True] * 2


@dataclass(frozen=True)
class PerTurn:
    """Returns a reward for each turn of the assistant, or invalid rewards if the text is "bad"."""

    in_process: ClassVar[bool] = True

    def __call__(self, responses):
        return [
            Score(9.0, turn_values=(1.0, 2.0)) if r.text == "bad" else Score.of_turns((1.0, 2.0)) for r in responses
        ]


def test_values_of_turns_are_checked():
    turns = (Turn("assistant", "look up"), Turn("tool", "42"), Turn("assistant", "it is 42"))
    given = [Response("s", "ok", "42", turns=turns), Response("s", "bad", "42", turns=turns), Response("s", "ok", "42")]
    good, bad, single_turn = Scorer(PerTurn())(given)
    assert good.turn_values == (1.0, 2.0) and good.value == 3.0
    assert "value 9.0 is not the sum 3.0 of turn_values" in bad.failure
    assert "2 turn_values for 1 assistant turns" in single_turn.failure


def test_parts_of_a_weighted_sum_may_run_in_different_ways():
    reward = Weighted(
        {"exact": ExactMatch(), "slow": Single(), "wait": waiting}, {"exact": 2.0, "slow": 1.0, "wait": 0.5}
    )
    with Scorer(reward, workers=2, sample_timeout_s=5) as scorer:
        right, wrong, dies = scorer(of_texts("1", "2", "die"))
    assert (right.value, wrong.value, dies.value) == (3.5, 1.5, 0.0)
    assert right.parts == {"exact": 1.0, "slow": 1.0, "wait": 1.0}
    assert "slow: " in dies.failure and dies.parts["exact"] == 0.0


@dataclass(frozen=True)
class Raises:
    """Raises what `except Exception` does not catch, or returns values that are not numbers."""

    what: str
    in_process: bool = False

    def __call__(self, responses):
        if self.what == "interrupt":
            raise KeyboardInterrupt
        if self.what == "group":
            raise BaseExceptionGroup("several", [KeyboardInterrupt()])
        if self.what == "cancelled":
            raise asyncio.CancelledError("by itself")
        return [10**400 if self.what == "large" else Score(1.0, parts=None) for _ in responses]


@pytest.mark.parametrize(
    ("reward", "failure"),
    [
        (Raises("interrupt"), "KeyboardInterrupt"),
        (Raises("group"), "BaseExceptionGroup: several"),
        (Raises("cancelled"), "CancelledError: by itself"),
        (Raises("cancelled", in_process=True), "CancelledError: by itself"),
        (Raises("large", in_process=True), "the reward returned no valid score: int"),
        (
            Raises("parts", in_process=True),
            "the reward returned no valid score: 'NoneType' object has no attribute 'items'",
        ),
    ],
)
def test_unusual_exceptions_and_results_are_failures_too(reward, failure):
    with Scorer(reward, workers=1, timeout_s=20) as scorer:
        (score,) = scorer(of_texts("1"))
    assert score.value == 0.0 and failure in score.failure


def test_a_cancelled_call_is_distinguished_from_a_late_one():
    async def cancels():
        raise asyncio.CancelledError("by itself")

    async def waits():
        await asyncio.sleep(30)

    mine, late = asyncio.run(gather_scores([cancels, waits], concurrency=2, deadline_s=0.2))
    assert mine.failure.startswith("CancelledError: by itself (") and "not scored within 0.2 s" in late.failure


def test_the_driver_gets_columns_and_declared_metrics():
    scores = Scores.of([Score(1.0, parts={"a": 1.0}), Score.failed("x" * 1000), Score(0.5, parts={"a": 0.0})])
    assert scores.values.tolist() == [1.0, 0.0, 0.5] and scores.failed.tolist() == [False, True, False]
    found = scores.metrics()
    metrics.check(found)
    assert found["reward/mean"] == 0.5 and found["reward/a_mean"] == 0.5
    assert found["reward/failed_fraction"] == pytest.approx(1 / 3)
    assert metrics.label("reward/a_mean") == "a"


def test_killing_an_idle_worker_fails_no_response():
    with Scorer(Single(), workers=1, sample_timeout_s=5) as scorer:
        assert scorer(of_texts("fine"))[0].value == 1.0
        signal_all(workers_of(os.getpid()))
        time.sleep(0.5)
        assert [s.value for s in scorer(of_texts("fine", "fine"))] == [1.0, 1.0]


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the descendants that are not children: the processes that the fork server started."""
    return select_processes(psutil.Process(pid).children(recursive=True), lambda process: process.ppid() != pid)


OWNER = """
import json, os, sys, threading, time
import psutil, test_scorer
from mrl.rewards.scorer import Scorer
scorer = Scorer(test_scorer.Single(), workers=3, sample_timeout_s=600)
threading.Thread(target=scorer, args=(test_scorer.of_texts("hang", "spin"),), daemon=True).start()
while len(test_scorer.workers_of(os.getpid())) < 3: time.sleep(0.05)
time.sleep(1)
print(json.dumps([p.pid for p in psutil.Process().children(recursive=True)]), flush=True)
time.sleep(600)
"""


def test_no_worker_survives_when_the_owner_is_killed():
    """Some workers wait, one sleeps, and one never returns to the interpreter."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=env) as owner:
        pids = json.loads(owner.stdout.readline())
        assert len(pids) >= 4 and all(psutil.pid_exists(pid) for pid in pids)
        os.kill(owner.pid, signal.SIGKILL)
        end = time.monotonic() + 20
        while (left := select_processes(pids, is_alive)) and time.monotonic() < end:
            time.sleep(0.1)
    signal_all(left)
    assert left == []


def test_an_invalid_reward_is_refused_before_any_process_starts():
    def local(responses):
        return []

    with pytest.raises(ValueError, match="cannot be sent to a worker process"):
        check_reward(local)
    with pytest.raises(ValueError, match="cannot be called with a list of responses"):
        check_reward(of_nothing)
    with pytest.raises(ValueError, match="declares both per_sample and whole_groups"):
        check_reward(Weighted({"a": SingleAndWhole()}))
    check_reward(Weighted({"a": ExactMatch(), "b": Single()}))


@dataclass(frozen=True)
class SingleAndWhole(Single):
    """Declares two ways to be called that exclude each other."""

    whole_groups: ClassVar[bool] = True


def of_nothing():
    return []
