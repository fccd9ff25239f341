"""RolloutPipeline on small HTTP servers: which groups a step gets and when, failures, and cancelled requests."""

import asyncio
import inspect
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from http_engines import HttpEngine, engine_pool
from mrl_runs import wait_until

from mrl.config.process_schema import FaultToleranceConfig
from mrl.rewards.reward_types import Score
from mrl.rollout.client import EngineError, SamplingParams
from mrl.rollout.engine_pool import NoEngineError
from mrl.rollout.rollout_pipeline import RolloutPipeline, UnscoredGroup
from mrl.rollout.staleness_buffer import PromptRequest, StalenessBuffer
from mrl.rollout.trajectory import Group, Sample, StepGroups, Trajectory
from mrl.rollout.worker import RolloutWorker

SIZE = 2


class HoldingEngine(HttpEngine):
    """An engine that answers a prompt only while the prompt's first token, which is the row, is not in `held`."""

    def __init__(self, *held: int, **options) -> None:
        self.held = set(held)
        super().__init__(**options)

    async def generate(self, request):
        rows = {ids[0] for ids in (await request.json())["input_ids"]}
        self.busy += 1
        try:
            while self.held & rows:
                await asyncio.sleep(0.005)
        finally:
            self.busy -= 1
        return await super().generate(request)


class PipelineOnServers:
    """A pipeline over HTTP servers. A prompt begins with the number of its row. The reward is 0 for rows in `bad`, else 1."""

    def __init__(self, engines, buffer, bad=(), before_scoring=None) -> None:
        self.scored: list[list[int]] = []
        self.engines, self.bad, self.before_scoring = engines, bad, before_scoring or (lambda unscored: None)
        self.pipeline = RolloutPipeline(
            buffer, engines, self, self.score_groups, lambda group: bool(group.rewards.any())
        )

    def split(self, requests):
        return [[request] for request in requests]

    async def sample(self, requests) -> list[UnscoredGroup]:
        prompts = [[request.row, request.serial_number] for request in requests]
        numbers = [request.serial_number for request in requests]
        completions = await self.engines.generate(numbers, prompts, [SamplingParams(8)] * len(requests))
        return [
            UnscoredGroup(request, prompt, [Trajectory.from_completion(completion)])
            for request, prompt, completion in zip(requests, prompts, completions, strict=True)
        ]

    def score_groups(self, unscored) -> list[Group]:
        self.before_scoring(unscored)
        self.scored.append([group.request.serial_number for group in unscored])
        scores = [Score(float(group.request.row not in self.bad)) for group in unscored]
        return [
            Group([Sample(group.request.row, group.prompt, group.trajectories[0], score)])
            for group, score in zip(unscored, scores, strict=True)
        ]

    def sample_step(self, first, rows, step, timeout_s=10.0):
        self.pipeline.admit(first, rows, step)
        self.pipeline.send_requests(step)
        return self.pipeline.wait_step(step, timeout_s)


@pytest.fixture
def start():
    """`start(buffer, *servers, settings=None, **options)` -> PipelineOnServers."""
    opened = []

    def start(buffer, *servers, settings=None, **options) -> PipelineOnServers:
        context = engine_pool(*servers, **settings or {})
        started = PipelineOnServers(context.__enter__(), buffer, **options)
        opened.append((started, context, servers))
        return started

    yield start
    for started, context, servers in opened:
        started.pipeline.close()
        context.__exit__(None, None, None)
        for server in servers:
            server.stop()


def test_a_step_gets_finished_groups_while_others_go_on(start):
    server = HoldingEngine(60, 70)
    run = start(StalenessBuffer(SIZE, 1), server)
    groups = run.sample_step(0, [60, 3, 5, 70], 0)
    assert groups and groups.numbers == [1, 2] and [group.row for group in groups.groups] == [3, 5]
    assert groups.groups[0].samples[0].trajectory.token_ids == [4]
    server.held.clear()
    groups = run.sample_step(4, [1, 1], 1)
    assert groups and groups.numbers == [0, 3], "they are too old for the next step"


def test_each_group_is_scored_as_soon_as_it_is_sampled(start):
    def release_next(unscored) -> None:
        server.held.discard(min(server.held, default=None))

    server = HoldingEngine(20, 40)
    run = start(StalenessBuffer(3, 0), server, before_scoring=release_next)
    assert run.sample_step(0, [40, 5, 20], 0)
    assert run.scored == [[1], [2], [0]]


def test_scoring_overlaps_the_sampling_of_other_groups_and_the_work_between_steps(start):
    def slow(unscored) -> None:
        time.sleep(0.1)
        server.held.discard(100)

    server = HoldingEngine(100)
    run = start(StalenessBuffer(SIZE, 0), server, before_scoring=slow)
    assert run.sample_step(0, [1, 100], 0)
    _, scoring_s, overlap_s = run.pipeline.take_seconds()
    assert 0.1 <= overlap_s <= scoring_s - 0.09, "during the last scoring, no engine samples and the step waits"

    server = HoldingEngine(40)
    run = start(StalenessBuffer(1, 1), server, before_scoring=slow)
    assert run.sample_step(0, [1, 40], 0)
    run.pipeline.take_seconds()
    server.held.clear()
    wait_until(lambda: len(run.scored) == 2, 10)
    assert run.pipeline.take_seconds()[2] >= 0.1, "no step waits for the second group"


@pytest.mark.extended
def test_filtered_groups_are_replaced_before_the_others_are_sampled(start):
    server = HoldingEngine(300)
    run = start(StalenessBuffer(SIZE, 0, max_replaced_groups=4), server, bad=(7,))
    assert run.sample_step(0, [7, 300], 0) is None and run.scored == [[0]], "row 300 is still being sampled"
    assert run.pipeline.free_capacity() == 1
    server.held.clear()
    groups = run.sample_step(2, [1], 0)
    assert groups and groups.numbers == [1, 2] and groups.filtered_numbers == [0]


def test_prompts_that_are_sent_twice_are_admitted_once(start):
    run = start(StalenessBuffer(SIZE, 0), HoldingEngine())
    run.pipeline.admit(0, [1, 2], 0)
    groups = run.sample_step(0, [1, 2], 0)
    assert groups and groups.numbers == [0, 1] and run.pipeline.buffer.num_drawn == 2


def test_requests_of_dropped_groups_are_cancelled(start):
    server = HoldingEngine(500)
    run = start(StalenessBuffer(1, 0, extra_groups=1), server)
    groups = run.sample_step(0, [500, 3], 0)
    assert groups and groups.numbers == [1] and groups.dropped == [0]
    wait_until(lambda: not server.busy, 10)  # the connection is closed, which ends the request


def test_a_restart_cancels_what_is_in_flight(start):
    run = start(StalenessBuffer(SIZE, 1), HoldingEngine(500))
    assert run.sample_step(0, [3, 3, 500, 500], 0)
    run.pipeline.restart(2, [PromptRequest(0, 8, 0), PromptRequest(1, 9, 0)], 0)
    assert [request.serial_number for request in run.pipeline.untrained_requests()] == [
        0,
        1,
    ] and run.pipeline.free_capacity() == 2
    groups = run.sample_step(2, [500, 500], 0)
    assert groups and [group.row for group in groups.groups] == [8, 9]


def test_a_group_that_was_sampled_before_a_restart_is_ignored(start):
    scoring, gate = threading.Event(), threading.Event()

    def wait(unscored) -> None:
        if unscored[0].request.row == 2:
            scoring.set()
            assert gate.wait(10)

    run = start(StalenessBuffer(1, 0), HoldingEngine(), before_scoring=wait)
    run.pipeline.admit(0, [2], 0)
    run.pipeline.send_requests(0)
    assert scoring.wait(10)
    run.pipeline.restart(0, [], 0)
    gate.set()
    run.pipeline.admit(0, [4], 0)
    run.pipeline.send_requests(0)
    groups = run.pipeline.wait_step(0, 10)
    assert groups and groups.groups[0].row == 4


def test_a_step_fails_without_an_engine_and_can_be_repeated(start):
    fault_tolerance = FaultToleranceConfig(engine_stall_timeout_s=0.4)
    settings, engine = dict(fault_tolerance=fault_tolerance), HoldingEngine(300, computing=False)
    run = start(StalenessBuffer(SIZE, 0), engine, settings=settings)
    with pytest.raises(NoEngineError, match="has computed nothing"):
        run.sample_step(0, [300, 1], 0)
    engine.computing = True  # otherwise the second try may fail, too
    run.engines.wait_ready(5)  # puts the engine in service again
    run.pipeline.restart(0, [PromptRequest(0, 1, 0), PromptRequest(1, 1, 0)], 0)
    groups = run.sample_step(2, [], 0)
    assert groups and groups.numbers == [0, 1]


def test_a_paused_engine_is_not_taken_for_stalled(start):
    settings = dict(fault_tolerance=FaultToleranceConfig(engine_stall_timeout_s=0.2))
    run = start(StalenessBuffer(1, 0), HoldingEngine(computing=False, delay_s=1.2), settings=settings)
    run.engines.paused = True
    assert run.sample_step(0, [1], 0)


def test_errors_of_sampling_and_scoring_are_raised_by_the_step(start):
    run = start(StalenessBuffer(1, 0), HoldingEngine(statuses=(400,)))
    with pytest.raises(EngineError, match="answered 400"):
        run.sample_step(0, [1], 0)

    def fail(unscored) -> None:
        raise LookupError("no such row")

    run = start(StalenessBuffer(1, 0), HoldingEngine(), before_scoring=fail)
    with pytest.raises(LookupError, match="no such row"):
        run.sample_step(0, [1], 0)


def test_a_group_whose_scoring_failed_is_sampled_and_scored_again(start):
    """The caller may continue after an error, and `send_requests` forgets the error. It must not forget the group."""
    errors = [LookupError("no such row")]

    def fail_once(unscored) -> None:
        if errors:
            raise errors.pop()

    run = start(StalenessBuffer(1, 0), HoldingEngine(), before_scoring=fail_once)
    with pytest.raises(LookupError):
        run.sample_step(0, [1], 0)
    groups = run.sample_step(0, [1], 0)
    assert groups and groups.numbers == [0]


def test_a_step_has_a_deadline(start):
    run = start(StalenessBuffer(1, 0), HoldingEngine(300))
    with pytest.raises(EngineError, match=r"rollout\.request_timeout_s=0\.2"):
        run.sample_step(0, [300], 0, timeout_s=0.2)


def test_waiting_requests_are_recognized_by_number_and_row(start):
    run = start(StalenessBuffer(SIZE, 1), HoldingEngine(500, 600))
    assert run.sample_step(0, [3, 4, 500, 600], 0)
    assert run.pipeline.has_requests([2, 3], [500, 600])
    assert run.pipeline.has_requests([2, 9], [500, 7]), "9 is not drawn yet"
    assert not run.pipeline.has_requests([2], [501]), "another row of the data"
    assert not run.pipeline.has_requests([0, 2], [3, 500]), "0 was taken by the step"


def test_the_rollout_worker_has_no_coroutine():
    """If an actor has coroutines, its calls overlap, because Ray runs each call in another thread."""
    assert not [name for name, value in vars(RolloutWorker).items() if inspect.iscoroutinefunction(value)]


def test_a_call_of_sample_that_raises_and_is_repeated_counts_as_one_round():
    """This happens when the last engine is lost and replaced."""
    worker, groups = object.__new__(RolloutWorker), StepGroups([0], ["group"], [], [], [])
    worker.spec, worker._rounds, worker._step_from_log = SimpleNamespace(replay=None, request_timeout_s=1.0), 0, None
    worker._cache, worker._log, worker.served = Mock(), Mock(get=Mock(return_value=None)), Mock()
    worker._pipeline = Mock(take_seconds=lambda: (0.0, 0.0, 0.0), room=lambda: 2)
    worker._pipeline.wait_step.side_effect = [NoEngineError("none"), None, NoEngineError("none"), groups]
    worker._write_log = lambda step, groups: StepGroups(groups.numbers, [], [], [], [])
    for first, rows in ((0, [1, 2]), (2, [5])):
        with pytest.raises(NoEngineError):
            worker.sample(first, np.array(rows), 3)
        worker.sample(first, np.array(rows), 3)
    assert worker._sampled_step.rounds == 2
