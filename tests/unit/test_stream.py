"""Groups in the making on small HTTP servers: what a step gets, when, and what becomes of failures and of what is given up."""

import inspect
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from http_engines import HttpEngine, asked

from mrl.config.schema import FaultsConfig
from mrl.rewards.base import Score
from mrl.rollout.asking import NoEngineError
from mrl.rollout.client import EngineError, SamplingParams
from mrl.rollout.journal import Entry
from mrl.rollout.stream import Draft, Stream
from mrl.rollout.trajectory import Group, Sample, Trajectory
from mrl.rollout.window import Chosen, Ticket, Window
from mrl.rollout.worker import RolloutWorker

SIZE = 2


class Slow(HttpEngine):
    """Takes as many hundredths of a second as a prompt's first token says."""

    async def generate(self, request):
        body = await request.json()
        self.delay_s = max(ids[0] for ids in body["input_ids"]) / 100
        return await super().generate(request)


class Made:
    """A stream over servers; rows are delays in hundredths of a second. Rewards are 1, of rows in `bad` 0."""

    def __init__(self, engines, window, bad=(), score=None) -> None:
        self.scored: list[list[int]] = []
        self.engines, self.bad, self.score = engines, bad, score or (lambda drafts: None)
        self.stream = Stream(
            window,
            engines,
            self.answer,
            self.score_all,
            lambda group: bool(group.rewards.any()),
            lambda ts: [[t] for t in ts],
        )

    async def answer(self, tickets) -> list[Draft]:
        prompts = [[ticket.row, ticket.number] for ticket in tickets]
        done = await self.engines.answers([t.number for t in tickets], prompts, [SamplingParams(8)] * len(tickets))
        return [
            Draft(ticket, prompt, [Trajectory.of(one)])
            for ticket, prompt, one in zip(tickets, prompts, done, strict=True)
        ]

    def score_all(self, drafts) -> list[Group]:
        self.score(drafts)
        self.scored.append([draft.ticket.number for draft in drafts])
        scores = [Score(float(draft.ticket.row not in self.bad)) for draft in drafts]
        return [
            Group([Sample(d.ticket.row, d.prompt, d.paths[0], score)]) for d, score in zip(drafts, scores, strict=True)
        ]

    def gather(self, first, rows, step, timeout_s=10.0):
        self.stream.admit(first, rows, step)
        self.stream.go_on(step)
        return self.stream.wait(step, timeout_s)


@pytest.fixture
def make():
    """`make(window, servers, **settings)` -> Made."""
    opened = []

    def start(window, *servers, settings=None, **of_made) -> Made:
        context = asked(*servers, **settings or {})
        made = Made(context.__enter__(), window, **of_made)
        opened.append((made, context, servers))
        return made

    yield start
    for made, context, servers in opened:
        made.stream.close()
        context.__exit__(None, None, None)
        for server in servers:
            server.stop()


def test_a_step_gets_its_groups_and_others_go_on_meanwhile(make):
    made = make(Window(SIZE, 1), Slow())
    chosen = made.gather(0, [60, 3, 5, 70], 0)
    assert chosen and chosen.numbers == [1, 2] and [group.samples[0].row for group in chosen.groups] == [3, 5]
    assert chosen.groups[0].samples[0].trajectory.token_ids == [4]
    chosen = made.gather(4, [1, 1], 1)
    assert chosen and chosen.numbers == [0, 3], "too old for the step after"


def test_each_group_is_scored_when_it_is_whole(make):
    made = make(Window(3, 0), Slow())
    assert made.gather(0, [40, 5, 20], 0)
    assert made.scored == [[1], [2], [0]]


def test_refused_groups_are_replaced_as_soon_as_they_are_known(make):
    made = make(Window(SIZE, 0, refusals=4), Slow(), bad=(7,))
    start = time.monotonic()
    assert made.gather(0, [7, 80], 0) is None and time.monotonic() - start < 0.7
    assert made.stream.room() == 1
    chosen = made.gather(2, [1], 0)
    assert chosen and chosen.numbers == [1, 2] and chosen.refused_numbers == [0]


def test_prompts_that_are_told_again_are_taken_in_once(make):
    made = make(Window(SIZE, 0), Slow())
    made.stream.admit(0, [1, 2], 0)
    chosen = made.gather(0, [1, 2], 0)
    assert chosen and chosen.numbers == [0, 1] and made.stream.window.drawn == 2


def test_what_over_sampling_drops_is_not_asked_for_any_longer(make):
    server = Slow()
    made = make(Window(1, 0, extra=1), server)
    chosen = made.gather(0, [500, 3], 0)
    assert chosen and chosen.numbers == [1] and chosen.dropped == [0]
    deadline = time.monotonic() + 5
    while server.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.busy, "the connection is closed, which ends the request"


def test_a_restart_gives_up_what_is_in_the_making(make):
    server = Slow()
    made = make(Window(SIZE, 1), server)
    assert made.gather(0, [3, 3, 500, 500], 0)
    made.stream.restart(2, [Ticket(0, 8, 0), Ticket(1, 9, 0)], 0)
    assert [ticket.number for ticket in made.stream.waiting()] == [0, 1] and made.stream.room() == 2
    chosen = made.gather(2, [500, 500], 0)
    assert chosen and [group.samples[0].row for group in chosen.groups] == [8, 9]


def test_a_draft_of_before_a_restart_is_not_taken(make):
    gate = threading.Event()

    def wait(drafts) -> None:
        if drafts[0].ticket.row == 2:
            assert gate.wait(10)

    made = make(Window(1, 0), Slow(), score=wait)
    made.stream.admit(0, [2], 0)
    made.stream.go_on(0)
    while not made.engines._service.engines or made.engines._service.engines[0].pending:
        time.sleep(0.01)
    time.sleep(0.1)
    made.stream.restart(0, [], 0)
    gate.set()
    made.stream.admit(0, [4], 0)
    made.stream.go_on(0)
    chosen = made.stream.wait(0, 10)
    assert chosen and chosen.groups[0].samples[0].row == 4


def test_without_an_engine_a_step_ends_and_is_asked_again(make):
    faults = FaultsConfig(engine_stall_s=0.4)
    made = make(Window(SIZE, 0), Slow(computing=False), settings=dict(faults=faults))
    with pytest.raises(NoEngineError, match="has computed nothing"):
        made.gather(0, [300, 1], 0)
    made.engines.wait_ready(5)  # it is back
    made.stream.restart(0, [Ticket(0, 1, 0), Ticket(1, 1, 0)], 0)
    chosen = made.gather(2, [], 0)
    assert chosen and chosen.numbers == [0, 1]


def test_engines_that_are_held_are_not_taken_for_stuck(make):
    made = make(Window(1, 0), Slow(computing=False), settings=dict(faults=FaultsConfig(engine_stall_s=0.2)))
    made.engines.hold(True)
    assert made.gather(0, [120], 0)


def test_errors_of_sampling_and_of_scoring_end_the_step(make):
    made = make(Window(1, 0), Slow(statuses=(400,)))
    with pytest.raises(EngineError, match="answered 400"):
        made.gather(0, [1], 0)

    def fail(drafts) -> None:
        raise LookupError("no such row")

    made = make(Window(1, 0), Slow(), score=fail)
    with pytest.raises(LookupError, match="no such row"):
        made.gather(0, [1], 0)


def test_a_step_has_a_deadline(make):
    made = make(Window(1, 0), Slow())
    with pytest.raises(EngineError, match=r"rollout\.request_timeout_s=0\.2"):
        made.gather(0, [300], 0, timeout_s=0.2)


def test_tickets_of_a_journal_are_known_while_they_wait(make):
    made = make(Window(SIZE, 1), Slow())
    assert made.gather(0, [3, 4, 500, 600], 0)
    assert made.stream.known([2, 3], [500, 600]) and made.stream.known([2, 9], [500, 7]), "9 is not drawn yet"
    assert not made.stream.known([2], [501]), "of other data"
    assert not made.stream.known([0, 2], [3, 500]), "0 is taken"


def test_the_rollout_worker_has_no_coroutine():
    """Ray would let its calls overlap, each in another thread."""
    assert not [name for name, value in vars(RolloutWorker).items() if inspect.iscoroutinefunction(value)]


def test_a_gather_that_raised_and_is_made_again_counts_once():
    """As when the last engine is lost and another takes its place."""
    worker, chosen = object.__new__(RolloutWorker), Chosen([0], ["group"], [], [], [])
    worker.spec, worker._draws, worker._read = SimpleNamespace(replay=None, request_timeout_s=1.0), 0, None
    worker._kept, worker._journal = Mock(), Mock(get=Mock(return_value=None))
    worker._stream = Mock(take_seconds=lambda: (0.0, 0.0), room=lambda: 2)
    worker._stream.wait.side_effect = [NoEngineError("none"), None, NoEngineError("none"), chosen]
    worker._entry = lambda step, chosen: Entry(chosen.numbers, [], [], [], [])
    for first, rows in ((0, [1, 2]), (2, [5])):
        with pytest.raises(NoEngineError):
            worker.gather(first, np.array(rows), 3)
        worker.gather(first, np.array(rows), 3)
    assert worker._batch.rounds == 2
