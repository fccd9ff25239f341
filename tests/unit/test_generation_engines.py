"""Engines of a generation: requests are spread, engines that die are replaced, and servers that do not fit are left out."""

# ruff: noqa: F811 - fixtures of another file

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from test_generation import QUIET, Counting, Engine, bytes_of, configure, inputs, run, watched  # noqa: F401

from mrl.evaluation import engines as engines_module
from mrl.evaluation.engines import engine_pools
from mrl.evaluation.generation import RequestDispatcher, generate, plan_generation
from mrl.evaluation.response_store import ResponseStore
from mrl.rollout.engines import hosts
from mrl.weight_sync.engine_control import EngineError


class LocalServer:
    """Stand-in for EngineServer: an Engine in this process. `limits`: `dies_after` of each server, in the order of starts."""

    limits: ClassVar[list[int | None]] = []
    started: ClassVar[list["LocalServer"]] = []
    was_killed = True

    def __init__(self, server_args, log_path, *, env=None):
        self.server_args, self.log_path = server_args, log_path

    def start(self):
        index = len(self.started)
        self.engine = Engine(dies_after=self.limits[index] if index < len(self.limits) else None)
        self.url = self.engine.url
        self.started.append(self)

    def wait_ready(self, timeout_s):
        pass

    def alive(self):
        return not self.engine.died

    def stop(self, timeout_s=20.0):
        self.engine.stop()

    def cpu_seconds(self):
        return 0.0


@pytest.fixture
def local_servers(monkeypatch):
    """`local_servers(*limits)` lets an engine pool start servers in this process. Returns the list of started servers."""

    def use(*limits):
        monkeypatch.setattr(LocalServer, "limits", list(limits))
        monkeypatch.setattr(LocalServer, "started", [])
        monkeypatch.setattr(hosts, "EngineServer", LocalServer)
        return LocalServer.started

    return use


@pytest.mark.extended
def test_concurrent_requests_are_bounded_and_spread_over_engines(configure):
    engines = [Engine(delay_s=0.01) for _ in range(2)]
    run(plan_generation(configure()), *engines, in_flight=5)
    assert all(engine.most <= 5 for engine in engines) and sum(engine.asked for engine in engines) == 51
    assert min(engine.asked for engine in engines) > 10
    most = 64 * (200 // 64)  # at most 64 HTTP requests of 3 prompts each
    wide = Engine(waits_for=most)
    with watched(wide) as watcher:
        plan = plan_generation(configure())
        request = (plan.prompts()[0].tokens, replace(plan.sampling, seed=1))
        pending = RequestDispatcher(watcher, 200).submit([request] * 1000)
        done = [completion for future in pending for completion in future.result()]
    assert len(done) == 1000 and wide.most == most


@pytest.mark.extended
def test_the_requests_of_an_external_engine_that_fails_go_to_the_others(configure, tmp_path, caplog):
    whole = plan_generation(configure(**{"generate.output": str(tmp_path / "whole")}))
    run(whole)
    plan = plan_generation(configure())
    broken, healthy = Engine(delay_s=0.05, dies_after=12), Engine(delay_s=0.05)
    totals = run(plan, broken, healthy, in_flight=4)
    assert totals["responses"] == 51 and bytes_of(plan) == bytes_of(whole)
    assert broken.died and healthy.asked >= 51 - 12
    assert f"engine {broken.url} failed with" in caplog.text and "failed 3 times in a row" in caplog.text


@pytest.mark.extended
def test_without_an_engine_the_generation_ends_and_keeps_its_files(configure):
    plan = plan_generation(configure())
    with pytest.raises(EngineError, match=r"no engine is left: http://127.*failed 3 times in a row"):
        run(plan, Engine(dies_after=30), in_flight=1)
    assert [plan.store.has(number) for number in range(5)] == [True, True, False, False, False]
    engine = Engine()
    run(plan_generation(configure()), engine)
    assert engine.asked == 51 - 24


def test_engines_that_die_are_replaced_and_the_responses_stay_the_same(configure, tmp_path, local_servers):
    whole = plan_generation(configure(**{"generate.output": str(tmp_path / "whole")}))
    run(whole)
    started = local_servers(5, 12, 7)
    keys = {"rollout.num_engines": 2, "generate.requests_in_flight": 4, "fault_tolerance.max_response_attempts": 9}
    plan = plan_generation(configure(**keys))
    generate(plan, Counting(), nullcontext(QUIET))
    assert len(started) >= 5, "two engines died, and so did a replacement"
    assert [server.engine.died for server in started[:2]] == [True, True]
    assert bytes_of(plan) == bytes_of(whole)
    assert [Path(server.log_path).name for server in started[:2]] == ["engine_0.log", "engine_1.log"]


@pytest.mark.extended
def test_the_only_engine_is_replaced_while_its_requests_wait(configure, local_servers):
    started = local_servers(10)
    plan = plan_generation(configure())
    assert generate(plan, Counting(), nullcontext(QUIET))["responses"] == 51
    assert [server.engine.died for server in started] == [True, False]


@pytest.mark.extended
def test_the_number_of_replaced_engines_is_limited(configure, local_servers):
    started = local_servers(*[3] * 20)
    plan = plan_generation(configure(**{"fault_tolerance.max_restarts": 2, "generate.requests_in_flight": 2}))
    with pytest.raises(EngineError, match=r"no engine is left; 2 were replaced \(fault_tolerance.max_restarts=2\)"):
        generate(plan, Counting(), nullcontext(QUIET))
    assert sum(server.engine.died for server in started) == 3


def test_a_generation_killed_on_two_engines_is_continued_byte_for_byte(configure, tmp_path, local_servers, monkeypatch):
    whole = plan_generation(configure(**{"generate.output": str(tmp_path / "whole")}))
    run(whole)
    local_servers(6)
    write, keys = ResponseStore.write, {"rollout.num_engines": 2, "generate.requests_in_flight": 3}

    def is_killed_at_three(store, number, rows):
        if number == 3:
            raise KeyboardInterrupt
        write(store, number, rows)

    monkeypatch.setattr(ResponseStore, "write", is_killed_at_three)
    with pytest.raises(KeyboardInterrupt):
        generate(plan_generation(configure(**keys)), Counting(), nullcontext(QUIET))
    monkeypatch.undo()
    started = local_servers(4)
    progress, plan = Counting(), plan_generation(configure(**keys))
    generate(plan, progress, nullcontext(QUIET))
    assert progress.done == progress.total == 51 and bytes_of(plan) == bytes_of(whole)
    assert sum(server.engine.asked for server in started) < 51, "three files were there"


def test_servers_of_one_machine_have_their_own_gpus(configure, local_servers):
    started = local_servers()
    keys = {"rollout.num_engines": 3, "rollout.engine_tp": 2, "sglang": {"device": "cuda", "base_gpu_id": 1}}
    generate(plan_generation(configure(**keys)), Counting(), nullcontext(QUIET))
    assert [server.server_args["base_gpu_id"] for server in started] == [1, 3, 5]
    assert [server.server_args["random_seed"] for server in started] == [0, 1, 2]


@pytest.mark.extended
def test_small_files_keep_many_engines_busy(configure):
    """A file has 3 responses here, but the engines can sample 32 at once. So several files must be in work at once."""
    engines = [Engine(delay_s=0.2) for _ in range(4)]
    run(plan_generation(configure(**{"generate.prompts_per_file": 1})), *engines, in_flight=8)
    assert sum(engine.most for engine in engines) >= 24


@pytest.fixture
def external(monkeypatch):
    """`external()` -> a running Engine. A server that does not answer within 0.1 s is not used."""
    monkeypatch.setattr(engines_module, "LATE_URL_S", 0.1)
    engines: list[Engine] = []

    def start(**attributes) -> Engine:
        engine = Engine()
        vars(engine).update(attributes)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


@pytest.mark.extended
def test_urls_that_do_not_answer_are_left_out_with_a_warning(configure, external, caplog):
    healthy, starting, gone = external(), external(ready_status=503), external()
    gone.stop()
    keys = {"rollout.engine_urls": [gone.url, starting.url, healthy.url, healthy.url + "/"]}
    plan = plan_generation(configure(**keys))
    assert generate(plan, Counting(), nullcontext(QUIET))["responses"] == 51
    assert healthy.asked == 51 and starting.asked == 0
    assert f"{gone.url} is left out: ConnectError" in caplog.text
    assert f"{starting.url} is left out: it answers, but it is not ready" in caplog.text


@pytest.mark.extended
def test_servers_with_different_keys_and_one_whose_key_is_unknown(configure, external, caplog, monkeypatch):
    monkeypatch.setenv("MRL_ENGINE_KEY", "common-key")
    common, own, strange = external(key="common-key"), external(key="own=key"), external(key="strange-key")
    monkeypatch.setenv("MRL_ENGINE_KEYS", f"{own.url}=own=key http://elsewhere:1=x")
    plan = plan_generation(configure(**{"rollout.engine_urls": [common.url, own.url, strange.url]}))
    assert generate(plan, Counting(), nullcontext(QUIET))["responses"] == 51
    assert common.asked + own.asked == 51 and min(common.asked, own.asked) > 0
    assert (
        f"{strange.url} is left out: EngineError" in caplog.text
        and "set MRL_ENGINE_KEY to this server's key" in caplog.text
    )
    assert "own=key" not in caplog.text


@pytest.mark.extended
def test_without_a_url_that_answers_nothing_starts(configure, external):
    gone = external()
    gone.stop()
    keys = {"rollout.engine_urls": [gone.url], "cluster.start_timeout_s": 0.3}
    with pytest.raises(EngineError, match=f"rollout.engine_urls: no server takes requests: {gone.url}: ConnectError"):
        generate(plan_generation(configure(**keys)), Counting(), nullcontext(QUIET))


def test_a_url_that_ignores_seeds_is_refused(configure, external):
    deaf = external(server_info={"enable_deterministic_inference": False})
    keys = {"rollout.engine_urls": [external().url, deaf.url]}
    with pytest.raises(ValueError, match=f"{deaf.url} was started without --enable-deterministic-inference"):
        generate(plan_generation(configure(**keys)), Counting(), nullcontext(QUIET))


@pytest.mark.extended
def test_the_engines_of_a_job_need_a_pool_of_their_own(configure):
    config = configure(**{"rollout.num_engines": 6, "rollout.engine_tp": 2, "placement.pools": {"all": ["actor"]}})
    pools = engine_pools(config)
    assert str(pools) == "engines (12 slots: engines)" and pools.by_role["engines"].demands["engines"].tp_size == 2
    with pytest.raises(ValueError, match="servers that already run need no devices of a cluster"):
        engine_pools(configure(**{"rollout.engine_urls": ["http://host:1"]}))


def test_requests_begin_in_the_order_in_which_they_were_submitted():
    """Otherwise a late request could overtake one of an earlier output file, which would then be finished later."""

    async def use(watcher) -> list[int]:
        begun, calls = [], []

        async def request(number: int) -> None:
            begun.append(number)
            await asyncio.sleep(0)
            if len(calls) < 30:
                submit()  # a new call comes at the moment at which this one ends

        def submit() -> None:
            calls.append(asyncio.create_task(watcher.call(partial(request, len(calls)), 1)))

        for _ in range(5):
            submit()
        while not all(call.done() for call in calls):
            await asyncio.gather(*calls)
        return begun

    with watched(Engine()) as watcher:
        assert watcher.pool.submit(use(watcher)).result(60) == list(range(30))


def test_a_cancelled_call_gives_its_place_to_the_next():
    async def use(watcher) -> list[int]:
        release, done = asyncio.Event(), []

        async def request(number: int) -> None:
            await release.wait()
            done.append(number)

        calls = [asyncio.create_task(watcher.call(partial(request, number), 1)) for number in range(4)]
        await asyncio.sleep(0.01)
        calls[0].cancel()  # it is running
        calls[2].cancel()  # it waits
        release.set()
        await asyncio.gather(*calls, return_exceptions=True)
        return done

    with watched(Engine()) as watcher:
        assert watcher.pool.submit(use(watcher)).result(60) == [1, 3]
        assert watcher._running == 0 and not watcher._waiting
