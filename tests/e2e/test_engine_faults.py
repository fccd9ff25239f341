"""Real engines are killed or stopped while they sample: unfinished responses are sampled again, and a run continues."""

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import aiohttp
import psutil
import pytest
from http_engines import spec_of
from live_engines import PROMPTS, delay_forward_passes, num_running, slow_engines
from mrl_runs import select_processes, signal_all, wait_until

from mrl.config.process_schema import FaultToleranceConfig
from mrl.rollout.client import TRAINING, EngineClient, SamplingParams, response_seed
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.engines.server_args import DETERMINISTIC, default_server_args

LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)
STALL_TIMEOUT_S = 8.0  # long enough for a healthy engine on a busy machine


@pytest.mark.extended
def test_the_heartbeat_of_a_scheduler_advances_only_while_it_computes(engine):
    """The engine pool uses the heartbeat to tell a slow engine from a hung one."""
    (scheduler,) = select_processes(engine.server.processes(), lambda process: "scheduler" in process.name())

    async def check_heartbeats() -> None:
        async with aiohttp.ClientSession() as http:
            request = asyncio.create_task(engine.client.generate_async(http, PROMPTS, [LONG] * len(PROMPTS)))
            heartbeats = set()
            while len(heartbeats) < 4 and not request.done():
                heartbeats.add(await engine.client.heartbeat(http, 5.0))
                await asyncio.sleep(0.05)
            assert len(heartbeats) == 4, "the heartbeat did not advance while the engine sampled"
            scheduler.suspend()
            while scheduler.status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
            heartbeats = {await engine.client.heartbeat(http, 5.0) for _ in range(5)}
            scheduler.resume()
            assert len(heartbeats) == 1 and not request.done()
            assert [len(completion.token_ids) for completion in await request] == [200] * len(PROMPTS)

    with slow_engines(engine.client, pass_s=0.05):  # at least 10 s for the responses
        try:
            asyncio.run(check_heartbeats())
        finally:
            scheduler.resume()


@pytest.fixture
def pool(qwen3_folder, tmp_path):
    """A pool of two engines that use the seeds of requests."""
    arguments = default_server_args("float32", 512) | {DETERMINISTIC: True}
    faults = FaultToleranceConfig(engine_stall_timeout_s=STALL_TIMEOUT_S)
    own = dict(model_path=str(qwen3_folder), num_engines=2, server_args=arguments, deterministic=True)
    pool = EnginePool(spec_of(tmp_path, **own, fault_tolerance=faults, request_timeout_s=120.0))
    try:
        pool.wait_ready(480)
        yield pool
    finally:
        pool.close()


FAULTS = {signal.SIGKILL: "processes have ended", signal.SIGSTOP: "computed nothing"}  # -> reason that the pool reports


@pytest.mark.extended
def test_responses_of_a_killed_or_stopped_engine_are_sampled_again_with_the_same_tokens(pool, tmp_path):
    prompts = PROMPTS * 2
    sampling = [replace(LONG, seed=response_seed(7, TRAINING, 0, number)) for number in range(len(prompts))]
    expected = [completion.token_ids for completion in pool.generate_all(prompts, sampling)]
    assert len(set(map(tuple, expected))) == len(prompts), "each response has its own seed"
    for place, (sign, why) in enumerate(FAULTS.items()):
        victim, other = pool._servers.servers[place], pool._servers.servers[1 - place]
        join_strike = strike_when_busy(victim, other.url, sign, num_requests=len(prompts) // 2)
        completions = pool.generate_all(prompts, sampling)
        join_strike()
        assert [completion.token_ids for completion in completions] == expected
        metrics = pool.take_metrics()
        assert metrics["rollout/retried_responses"] == len(prompts) / 2
        ((url, reason),) = pool.take_failed().items() if metrics["rollout/replaced_engines"] else ((victim.url, why),)
        assert url == victim.url and why in reason
        if sign == signal.SIGKILL:
            assert victim.url not in pool.replace([victim.url], 180)
        wait_until(lambda server=victim: not server.processes(), 60)  # a stopped engine is replaced in the background


def strike_when_busy(victim, other_url: str, sign: signal.Signals, num_requests: int) -> Callable[[], None]:
    """When the victim samples `num_requests` responses of 200 tokens, send a signal to its processes except the supervisor.

    Until then, both engines are slow: a response takes at least 40 s. Afterwards, the other engine is fast. Returns a function
    that waits until the signal has been sent.
    """
    client, other = EngineClient(victim.url), EngineClient(other_url)
    delay_forward_passes(client, 0.2)
    delay_forward_passes(other, 0.2)

    def strike() -> None:
        try:
            wait_until(lambda: num_running(client) == num_requests, 120)
            signal_all(victim.processes()[1:], sign)
        finally:
            delay_forward_passes(other, None)

    thread = threading.Thread(target=strike)
    thread.start()
    return thread.join


@pytest.mark.extended
def test_a_run_continues_after_it_loses_all_engines_and_then_one(start_mrl, quickstart, user_module):
    """In step 2, all engines are killed before a rejected group is replaced. In step 3, one engine is stopped."""
    user_module("striking_filter", STRIKING_FILTER)
    own = ["rollout.filter._target_=striking_filter.Striking", "rollout.num_engines=2", "rollout.deterministic=true"]
    limits = [f"fault_tolerance.engine_stall_timeout_s={STALL_TIMEOUT_S}", "trainer.save=false", "trainer.max_steps=4"]
    run = start_mrl("train", *quickstart, *own, *limits).finish(280)
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert [s["rollout/replaced_engines"] for s in steps] == [0, 2, 1, 0]
    assert [steps[number]["rollout/retried_responses"] for number in (0, 2, 3)] == [0, 4, 0], (
        "the responses of one group"
    )
    assert [s["rollout/samples"] for s in steps] == [24] * 4
    assert [s["rollout/weight_version"] for s in steps] == [0, 1, 2, 3], "no response was sampled by other weights"
    assert max(s["mismatch/logprob_abs_max"] for s in steps) <= 1e-4
    assert run.leftovers() == []
    assert "computed nothing" in (run.folder / "logs/rollout.log").read_text()


STRIKING_FILTER = '''
import signal
from dataclasses import dataclass

from mrl_runs import descendants, own_processes, signal_all

calls = []
STRIKES = {12: signal.SIGKILL, 19: signal.SIGSTOP}  # call number -> signal; these are the last groups of steps 2 and 3
REJECTED = {12, 18, 19}  # call numbers; each rejected group is replaced by a new one: in step 3 one on each engine


def servers():
    """Return the engine servers of this run, the oldest first."""
    return sorted(own_processes("mrl.rollout.engines.launch_sglang"), key=lambda process: process.create_time())


@dataclass(frozen=True)
class Striking:
    """Rejects some groups. Before their replacements are requested it kills all engines, or stops one."""

    def __call__(self, rewards):
        calls.append(1)
        sign = STRIKES.get(len(calls))
        if sign:
            own = servers()
            for server in own if sign == signal.SIGKILL else own[:1]:
                signal_all([*descendants(server), server], sign)
        return len(calls) not in REJECTED
'''
