"""The simulated engines of the benchmarks answer over HTTP as SGLang does, in the same order and with weight versions."""

import asyncio
import threading
import time

import aiohttp
import orjson
import pytest
from mrl_runs import wait_until

from benchmarks.simulated_engine import (
    LogNormalScript,
    RecordedScript,
    ScriptedResponse,
    identical_engines,
    serving,
    version_spans,
)
from mrl.config.process_schema import PauseMode
from mrl.planner.engine_time import EngineSpeeds
from mrl.rollout.client import EngineClient, EngineError, EngineFaultError, SamplingParams

FAST = EngineSpeeds(fixed_step_s=0.001, request_s=0.0, prefill_s=0.0, max_running=8)
ENDLESS = 100_000


def by_first_token(prompt, number):
    """Return a response whose length is the first token id of the prompt."""
    return ScriptedResponse([prompt[0]] * prompt[0], [-0.25] * prompt[0])


class Background:
    """A call that runs in a thread. `result` waits for the end of the call."""

    def __init__(self, work, *arguments):
        self.finished = []

        def run():
            self.finished.append(work(*arguments))

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self):
        self._thread.join(20)
        (answer,) = self.finished
        return answer


@pytest.fixture
def client():
    """Yield the client of one simulated engine."""
    with serving(identical_engines(1, FAST, by_first_token)) as (url,), EngineClient(url, timeout_s=20) as engine:
        yield engine


def wait_until_running(client, count):
    """Wait until `count` requests are running."""
    wait_until(lambda: client._get("/v1/loads")["loads"][0]["num_running_reqs"] == count, 10, poll_s=0.005)


def test_answers_have_the_format_of_sglang(client):
    client.set_weight_version("7")
    first, second = client.generate([[3, 1], [2]], SamplingParams(max_new_tokens=10))
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([3, 3, 3], [-0.25] * 3, "stop")
    assert (second.token_ids, first.weight_version) == ([2, 2], "7")
    (cut,) = client.generate([[9]], SamplingParams(max_new_tokens=4))
    assert (len(cut.token_ids), cut.finish_reason) == (4, "length")
    (again,) = client.generate([[3, 1]], SamplingParams(max_new_tokens=10))
    assert again.cached_tokens == 1
    assert client.weight_version() == "7" and client.health() and client.server_info()["max_running"] == 8


def test_a_response_takes_the_time_of_its_tokens(client):
    start = time.monotonic()
    client.generate([[200], [100]], SamplingParams(max_new_tokens=1000))
    assert time.monotonic() - start >= 0.2
    assert client.server_info()["busy_s"] == pytest.approx(0.2, abs=0.001)


def test_tokens_have_the_weight_version_before_or_after_a_push(client):
    client.set_weight_version("1")
    answer = Background(client.generate, [[ENDLESS, 5]], SamplingParams(max_new_tokens=ENDLESS))
    wait_until(lambda: client.server_info()["busy_s"] > 0.01, 10)  # at least ten tokens
    client.pause(PauseMode.retract)
    assert not client.health()
    client.begin_weight_update()
    client.set_weight_version("2")
    client.flush_cache(5)
    client.end_weight_update()
    busy_s = client.server_info()["busy_s"]
    time.sleep(0.1)
    assert client.server_info()["busy_s"] == busy_s and not answer.finished, "the engine is paused"
    client.resume()
    wait_until(lambda: client.server_info()["busy_s"] > busy_s + 0.01, 10)
    client.pause(PauseMode.abort)
    (done,) = answer.result()
    (first, before), (second, after) = done.versions
    assert (first, second, before + after) == (1, 2, len(done.token_ids)) and before > 0 and after > 0


def test_version_spans_are_those_of_sglang():
    assert version_spans([], "3", 5) == [dict(version="3", start=0, end=5)]
    assert version_spans([("1", 2), ("2", 2)], "3", 5) == [
        dict(version="1", start=0, end=2),
        dict(version="3", start=2, end=5),
    ]
    assert version_spans([("1", 2)], "1", 4) == [dict(version="1", start=0, end=4)]
    assert version_spans([("1", 4)], "2", 4) == [dict(version="1", start=0, end=4)]


def test_requests_during_a_pause_start_after_it(client):
    client.set_weight_version("1")
    client.pause(PauseMode.in_place)
    answer = Background(client.generate, [[5]], SamplingParams(max_new_tokens=10))
    time.sleep(0.1)
    client.set_weight_version("2")
    assert not answer.finished
    client.resume()
    assert answer.result()[0].weight_version == "2"


def test_a_pause_in_mode_abort_aborts_running_requests(client):
    answer = Background(client.generate, [[ENDLESS], [ENDLESS]], SamplingParams(max_new_tokens=ENDLESS))
    wait_until_running(client, 2)
    client.pause(PauseMode.abort)
    assert [done.finish_reason for done in answer.result()] == ["abort", "abort"]
    client.resume()
    assert len(client.generate([[4]], SamplingParams(max_new_tokens=10))[0].token_ids) == 4


def test_a_cancelled_request_leaves_the_queue(client):
    async def cancel():
        async with aiohttp.ClientSession() as http:
            request = asyncio.create_task(
                client.generate_async(http, [[ENDLESS]], [SamplingParams(max_new_tokens=ENDLESS)])
            )
            await asyncio.to_thread(wait_until_running, client, 1)
            request.cancel()

    asyncio.run(cancel())
    wait_until_running(client, 0)


def test_rejected_requests_have_the_messages_of_sglang(client):
    client.begin_weight_update()
    with pytest.raises(EngineError, match="open already"):
        client.begin_weight_update()
    client.end_weight_update()
    with pytest.raises(EngineError, match="no weight update"):
        client.end_weight_update()
    Background(client.generate, [[ENDLESS]], SamplingParams(max_new_tokens=ENDLESS))
    wait_until_running(client, 1)
    with pytest.raises(EngineError, match="did not flush"):
        client.flush_cache(0.05)
    client._call("/abort_request", abort_all=True)
    client.flush_cache(5)


def test_a_length_depends_on_prompt_and_number_and_not_on_the_engine():
    script = LogNormalScript(median=20, sigma=1.0, longest=60)
    expected = sorted(script.length([7, 8], number) for number in range(6))
    assert max(script.length([7, 8], number) for number in range(200)) == 60 and len(set(expected)) > 1
    sampling = SamplingParams(max_new_tokens=100)
    responses = []
    with serving(identical_engines(2, FAST, script)) as urls:
        for url in [*urls, *urls]:
            with EngineClient(url, timeout_s=20) as client:
                responses += client.generate([[7, 8]] * (2 if len(responses) < 4 else 1), sampling)
        with EngineClient(urls[1], timeout_s=20) as client:
            (seeded,) = client.generate([[7, 8]], SamplingParams(max_new_tokens=100, seed=3))
    assert sorted(len(done.token_ids) for done in responses) == expected
    assert len(seeded.token_ids) == script.length([7, 8], 3)


def test_recorded_responses_are_repeated(tmp_path):
    path = tmp_path / "completions.jsonl"
    lines = [
        dict(prompt=[1, 2], seed=9, token_ids=[4, 5], logprobs=[-1.0, -2.0], finish_reason="length"),
        dict(prompt=[1, 2], seed=10, token_ids=[6], logprobs=[-3.0], finish_reason="stop"),
    ]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    with serving(identical_engines(1, FAST, RecordedScript(path))) as (url,), EngineClient(url, timeout_s=20) as client:
        responses = client.generate([[1, 2]] * 2, [SamplingParams(10, seed=10), SamplingParams(10, seed=9)])
        assert [(s.token_ids, s.logprobs, s.finish_reason) for s in responses] == [
            ([6], [-3.0], "stop"),
            ([4, 5], [-1.0, -2.0], "length"),
        ]
        with pytest.raises(EngineError, match="no response is recorded for seed 11"):
            client.generate([[1, 2]], SamplingParams(10, seed=11))


def test_aborted_responses_are_a_fault_of_the_engine(client):
    async def ask():
        async with aiohttp.ClientSession() as http:
            request = asyncio.create_task(
                client.generate_async(http, [[ENDLESS]], [SamplingParams(max_new_tokens=ENDLESS)])
            )
            await asyncio.to_thread(wait_until_running, client, 1)
            client._call("/abort_request", abort_all=True)
            await request

    with pytest.raises(EngineFaultError, match="aborted 1 of 1 responses"):
        asyncio.run(ask())
