"""The simulated engines of benchmarks, over HTTP: they answer as SGLang does, in its order and with its weight versions."""

import asyncio
import threading
import time

import aiohttp
import orjson
import pytest

from benchmarks.simulated_engine import LongTailed, Recorded, Scripted, alike, serving, spans
from mrl.planner.engine_queue import EngineSpeeds
from mrl.rollout.client import EngineClient, EngineError, EngineFault, SamplingParams

FAST = EngineSpeeds(step_s=0.001, request_s=0.0, prefill_s=0.0, max_running=8)
ENDLESS = 100_000


def by_first_token(prompt, number):
    """As many tokens as the prompt's first one says."""
    return Scripted([prompt[0]] * prompt[0], [-0.25] * prompt[0])


class Background:
    """Something that runs in a thread and is waited for."""

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
    """Of one engine."""
    with serving(alike(1, FAST, by_first_token)) as (url,), EngineClient(url, timeout_s=20) as found:
        yield found


def until(client, running):
    """Wait for so many running requests."""
    deadline = time.monotonic() + 10
    while client._get("/v1/loads")["loads"][0]["num_running_reqs"] != running:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_answers_as_mrl_reads_sglang(client):
    client.set_weight_version("7")
    first, second = client.generate([[3, 1], [2]], SamplingParams(max_new_tokens=10))
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([3, 3, 3], [-0.25] * 3, "stop")
    assert (second.token_ids, first.weight_version) == ([2, 2], "7")
    (cut,) = client.generate([[9]], SamplingParams(max_new_tokens=4))
    assert (len(cut.token_ids), cut.finish_reason) == (4, "length")
    (again,) = client.generate([[3, 1]], SamplingParams(max_new_tokens=10))
    assert again.cached_tokens == 1
    assert client.weight_version() == "7" and client.health() and client.server_info()["max_running"] == 8


def test_a_response_takes_as_long_as_its_tokens(client):
    start = time.monotonic()
    client.generate([[200], [100]], SamplingParams(max_new_tokens=1000))
    assert 0.2 <= time.monotonic() - start < 0.6
    assert client.server_info()["busy_s"] == pytest.approx(0.2, abs=0.001)


def test_a_push_marks_the_tokens_before_and_after_it(client):
    client.set_weight_version("1")
    answer = Background(client.generate, [[300, 5]], SamplingParams(max_new_tokens=ENDLESS))
    until(client, 1)
    client.pause("retract")
    assert not client.health()
    client.begin_weight_update()
    client.set_weight_version("2")
    client.flush_cache(5)
    client.end_weight_update()
    time.sleep(0.5)  # longer than the response would take
    assert not answer.finished
    client.resume()
    (done,) = answer.result()
    (first, before), (second, after) = done.versions
    assert (first, second, before + after) == (1, 2, 300) and 0 < before < 300


def test_spans_are_those_of_sglang():
    assert spans([], "3", 5) == [dict(version="3", start=0, end=5)]
    assert spans([("1", 2), ("2", 2)], "3", 5) == [dict(version="1", start=0, end=2), dict(version="3", start=2, end=5)]
    assert spans([("1", 2)], "1", 4) == [dict(version="1", start=0, end=4)]
    assert spans([("1", 4)], "2", 4) == [dict(version="1", start=0, end=4)]


def test_requests_of_a_pause_begin_after_it(client):
    client.set_weight_version("1")
    client.pause("in_place")
    answer = Background(client.generate, [[5]], SamplingParams(max_new_tokens=10))
    time.sleep(0.1)
    client.set_weight_version("2")
    assert not answer.finished
    client.resume()
    assert answer.result()[0].weight_version == "2"


def test_a_pause_that_aborts_gives_up_what_runs(client):
    answer = Background(client.generate, [[ENDLESS], [ENDLESS]], SamplingParams(max_new_tokens=ENDLESS))
    until(client, 2)
    client.pause("abort")
    assert [done.finish_reason for done in answer.result()] == ["abort", "abort"]
    client.resume()
    assert len(client.generate([[4]], SamplingParams(max_new_tokens=10))[0].token_ids) == 4


def test_what_nobody_waits_for_any_more_leaves_the_queue(client):
    async def give_up():
        async with aiohttp.ClientSession() as http:
            asking = asyncio.create_task(client.generate_async(http, [[ENDLESS]], [SamplingParams(max_new_tokens=ENDLESS)]))
            await asyncio.to_thread(until, client, 1)
            asking.cancel()

    asyncio.run(give_up())
    until(client, 0)


def test_refusals_are_in_the_words_that_mrl_reads(client):
    client.begin_weight_update()
    with pytest.raises(EngineError, match="open already"):
        client.begin_weight_update()
    client.end_weight_update()
    with pytest.raises(EngineError, match="no weight update"):
        client.end_weight_update()
    Background(client.generate, [[ENDLESS]], SamplingParams(max_new_tokens=ENDLESS))
    until(client, 1)
    with pytest.raises(EngineError, match="did not flush"):
        client.flush_cache(0.05)
    client._call("/abort_request", abort_all=True)
    client.flush_cache(5)


def test_lengths_are_of_the_prompt_and_the_number_whichever_engine_is_asked():
    script = LongTailed(median=20, sigma=1.0, longest=60)
    expected = sorted(script.length([7, 8], number) for number in range(6))
    assert max(script.length([7, 8], number) for number in range(200)) == 60 and len(set(expected)) > 1
    sampling = SamplingParams(max_new_tokens=100)
    found = []
    with serving(alike(2, FAST, script)) as urls:
        for url in [*urls, *urls]:
            with EngineClient(url, timeout_s=20) as client:
                found += client.generate([[7, 8]] * (2 if len(found) < 4 else 1), sampling)
        with EngineClient(urls[1], timeout_s=20) as client:
            (seeded,) = client.generate([[7, 8]], SamplingParams(max_new_tokens=100, seed=3))
    assert sorted(len(done.token_ids) for done in found) == expected
    assert len(seeded.token_ids) == script.length([7, 8], 3)


def test_recorded_completions_are_said_again(tmp_path):
    path = tmp_path / "completions.jsonl"
    lines = [
        dict(prompt=[1, 2], seed=9, token_ids=[4, 5], logprobs=[-1.0, -2.0], finish_reason="length"),
        dict(prompt=[1, 2], seed=10, token_ids=[6], logprobs=[-3.0], finish_reason="stop"),
    ]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    with serving(alike(1, FAST, Recorded(path))) as (url,), EngineClient(url, timeout_s=20) as client:
        said = client.generate([[1, 2]] * 2, [SamplingParams(10, seed=10), SamplingParams(10, seed=9)])
        assert [(s.token_ids, s.logprobs, s.finish_reason) for s in said] == [
            ([6], [-3.0], "stop"),
            ([4, 5], [-1.0, -2.0], "length"),
        ]
        with pytest.raises(EngineError, match="nothing is recorded for seed 11"):
            client.generate([[1, 2]], SamplingParams(10, seed=11))


def test_a_lost_engine_is_a_fault_of_the_engine(client):
    async def ask():
        async with aiohttp.ClientSession() as http:
            asking = asyncio.create_task(client.generate_async(http, [[ENDLESS]], [SamplingParams(max_new_tokens=ENDLESS)]))
            await asyncio.to_thread(until, client, 1)
            client._call("/abort_request", abort_all=True)
            await asking

    with pytest.raises(EngineFault, match="aborted 1 of 1 responses"):
        asyncio.run(ask())
