"""Real engines that are killed or stopped while they sample: no response is lost, none is another, and the run goes on."""

import signal
import threading
import time
from dataclasses import replace

import pytest
from http_engines import spec_of
from live_engines import PROMPTS

from mrl.config.schema import FaultToleranceConfig
from mrl.rollout.client import TRAINING, SamplingParams, seed_of
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.engines.server_args import DETERMINISTIC, default_server_args

LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)
STALL_S = 8.0  # of a machine that has other things to do


def test_a_scheduler_shows_that_it_computes_and_a_stopped_one_does_not(engine):
    """By what a slow engine is told from a hung one."""
    import asyncio

    import aiohttp

    (scheduler,) = [p for p in engine.server.processes() if "scheduler" in p.name()]

    async def look() -> None:
        async with aiohttp.ClientSession() as http:
            asked = asyncio.create_task(engine.client.generate_async(http, PROMPTS, [LONG] * len(PROMPTS)))
            seen = set()
            while len(seen) < 4 and not asked.done():
                seen.add(await engine.client.heartbeat(http, 5.0))
                await asyncio.sleep(0.05)
            assert len(seen) == 4, "it was done before, or showed nothing"
            scheduler.suspend()
            await asyncio.sleep(0.5)
            stopped = {await engine.client.heartbeat(http, 5.0) for _ in range(5)}
            scheduler.resume()
            assert len(stopped) == 1 and not asked.done()
            assert [len(done.token_ids) for done in await asked] == [200] * len(PROMPTS)

    try:
        asyncio.run(look())
    finally:
        scheduler.resume()


@pytest.fixture
def two(qwen3_folder, tmp_path):
    """Two engines that heed seeds."""
    arguments = default_server_args("float32", 512) | {DETERMINISTIC: True}
    faults = FaultToleranceConfig(engine_stall_timeout_s=STALL_S)
    own = dict(model_path=str(qwen3_folder), num_engines=2, server_args=arguments, deterministic=True)
    engines = EnginePool(spec_of(tmp_path, **own, fault_tolerance=faults, request_timeout_s=120.0))
    try:
        engines.wait_ready(480)
        yield engines
    finally:
        engines.close()


@pytest.mark.extended
def test_responses_redone_after_a_kill_or_a_stop_are_those_of_undisturbed_engines(two, tmp_path):
    prompts = PROMPTS * 2
    sampling = [replace(LONG, seed=seed_of(7, TRAINING, 0, number)) for number in range(len(prompts))]
    undisturbed = two.generate_all(prompts, sampling)
    assert len({tuple(done.token_ids) for done in undisturbed}) == len(prompts), "each has a seed of its own"
    for number, (sign, why) in enumerate(
        [(signal.SIGKILL, "processes have ended"), (signal.SIGSTOP, "computed nothing")]
    ):
        victim = two._servers.servers[number]
        strike(victim, sign, after_s=0.3)
        again = two.generate_all(prompts, sampling)
        assert [done.token_ids for done in again] == [done.token_ids for done in undisturbed]
        numbers = two.take_metrics()
        assert numbers["rollout/retried_responses"] == len(prompts) / 2
        ((url, reason),) = two.take_failed().items() if numbers["rollout/replaced_engines"] else ((victim.url, why),)
        assert url == victim.url and why in reason
        if sign == signal.SIGKILL:
            assert victim.url not in two.replace([victim.url], 180)
        end = time.monotonic() + 60
        while (left := victim.processes()) and time.monotonic() < end:  # a stopped one is replaced meanwhile
            time.sleep(0.1)
        assert not left, "ended, and a successor started"


def strike(server, sign: signal.Signals, after_s: float) -> None:
    """Signal a server's processes, but not its supervisor, once it computes."""

    def send() -> None:
        for process in server.processes()[1:]:
            process.send_signal(sign)

    threading.Timer(after_s, send).start()


def test_a_run_that_loses_all_engines_and_then_one_goes_on(start_mrl, quickstart, tmp_path, monkeypatch):
    """In its second step all are killed before refused groups are replaced, in the third one is stopped."""
    (tmp_path / "striking_filter.py").write_text(STRIKING_FILTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    own = ["rollout.filter._target_=striking_filter.Striking", "rollout.num_engines=2", "rollout.deterministic=true"]
    limits = [f"fault_tolerance.engine_stall_timeout_s={STALL_S}", "trainer.save=false", "trainer.max_steps=4"]
    run = start_mrl("train", *quickstart, *own, *limits).finish(280)
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert [s["rollout/replaced_engines"] for s in steps] == [0, 2, 1, 0]
    assert [steps[number]["rollout/retried_responses"] for number in (0, 2, 3)] == [0, 4, 0], "of one group"
    assert [s["rollout/samples"] for s in steps] == [24] * 4
    assert [s["rollout/weight_version"] for s in steps] == [0, 1, 2, 3], "no response of other weights"
    assert max(s["mismatch/logprob_abs_max"] for s in steps) <= 1e-4
    assert run.leftovers() == []
    assert "computed nothing" in (run.folder / "logs/rollout.log").read_text()


STRIKING_FILTER = '''
import signal
from contextlib import suppress
from dataclasses import dataclass

import psutil

calls = []
STRIKES = {12: signal.SIGKILL, 19: signal.SIGSTOP}  # the last groups of steps 2 and 3
REFUSED = {12, 18, 19}  # others are asked for in their place: in step 3 one of each engine


def servers():
    """Of this run, the oldest first."""
    mine, found = psutil.Process().environ()["MRL_TEST_RUN"], []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # one that has just ended
            if "mrl.rollout.engines.launch_sglang" in process.cmdline() and process.environ().get("MRL_TEST_RUN") == mine:
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


@dataclass(frozen=True)
class Striking:
    """Refuses some groups, and strikes engines before others are asked for: all of them, or one."""

    def __call__(self, rewards):
        calls.append(1)
        sign = STRIKES.get(len(calls))
        if sign:
            own = servers()
            for server in own if sign == signal.SIGKILL else own[:1]:
                for process in [*server.children(recursive=True), server]:
                    process.send_signal(sign)
        return len(calls) not in REFUSED
'''
