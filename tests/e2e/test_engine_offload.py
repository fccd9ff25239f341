"""A real SGLang server is offloaded in the middle of a response and finishes the response after it is loaded again."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from live_engines import connected, max_logprob_difference, perturb, slow_engines
from mrl_runs import wait_until
from scripted_lifecycle import scripted_lifecycle

from mrl.config.process_schema import PauseMode
from mrl.controller.colocation import ACTOR, ENGINES, MemoryState
from mrl.rollout.client import SamplingParams
from mrl.weight_sync.engine_control import EngineError

PROMPT = [5, 9, 11, 4, 30, 7]
LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)


def no_push(version: int, engines_were_offloaded: bool) -> list:
    raise AssertionError("this test pushes nothing")


class Stream:
    """A streamed greedy response. A thread reads it."""

    def __init__(self, client) -> None:
        self.token_ids: list[int] = []
        self.finished = False
        self._thread = threading.Thread(target=self._read, args=[client], daemon=True)
        self._thread.start()

    def _read(self, client) -> None:
        body = dict(input_ids=PROMPT, sampling_params=LONG.body(), stream=True)
        with client._http.stream("POST", "/generate", json=body) as answer:
            for chunk in self._chunks(answer.iter_lines()):
                self.token_ids = chunk["output_ids"]
                self.finished = chunk["meta_info"]["finish_reason"] is not None

    @staticmethod
    def _chunks(lines: Iterator[str]) -> Iterator[dict]:
        for line in lines:
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))

    def join(self, timeout_s: float = 240) -> list[int]:
        """Wait for the last token; return all tokens."""
        self._thread.join(timeout_s)
        assert self.finished
        return self.token_ids


@contextmanager
def running_response(client) -> Iterator[Stream]:
    """Context with a response of which the engine has sampled at least 20 of 400 tokens.

    Inside the context, the engine samples at most 20 tokens per second, so that the test can pause the engine in time.
    """
    with slow_engines(client, pass_s=0.05):
        stream = Stream(client)
        wait_until(lambda: len(stream.token_ids) >= 20, 120)
        yield stream


def stops(stream: Stream, quiet_s: float = 1.0) -> bool:
    """Return whether the response stops growing before it is finished: no token arrives for `quiet_s` seconds.

    Tokens that the engine sent before it paused may still arrive at first.
    """
    num_tokens = -1
    while num_tokens < len(stream.token_ids):
        num_tokens = len(stream.token_ids)
        time.sleep(quiet_s)
    return not stream.finished


@pytest.mark.extended
def test_a_response_continues_after_the_engine_is_offloaded_and_loaded_again(engine):
    client, expected = engine.client, engine.client.generate([PROMPT], LONG)[0].token_ids
    with running_response(client) as stream:
        client.pause(PauseMode.retract)
    client.release_memory(["kv_cache", "weights"])
    assert stops(stream)
    client.resume_memory(["weights"])
    client.resume_memory(["kv_cache"])
    assert stops(stream), "the engine has its memory again, but is still paused"
    client.resume()
    assert stream.join() == expected and len(expected) == 400


@pytest.mark.extended
def test_an_engine_with_running_requests_can_be_offloaded(engine):
    """EngineLifecycle pauses an engine before it offloads the engine, because SGLang asserts that the engine is idle."""
    engines = scripted_lifecycle(no_push, urls=[engine.server.url], timeout_s=30)
    with running_response(engine.client) as stream:
        for _ in range(2):
            assert engines.offload() == 0
    assert stops(stream)
    engines.load_weights()
    for _ in range(2):
        engines.load_kv_cache()
    assert len(stream.join()) == 400


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_colocated_engines_serve_the_pushed_weights_and_finish_waiting_requests(engine, one_rank, transport):
    tensors = dict(engine.model.state_dict())
    with connected([engine.server.url], engine.folder, tensors, transport=transport) as sync:
        version = int(engine.client.weight_version()) + 1
        stopped_during_push: list[bool] = []

        def push(number: int, engines_were_offloaded: bool) -> list:
            report = sync.push(number, engines_were_offloaded)
            if number > version:
                stopped_during_push.append(stops(stream))  # requests wait for the KV cache
            return [report]

        colocated = frozenset([frozenset([ACTOR, ENGINES])])
        engines = scripted_lifecycle(push, urls=[engine.server.url], colocated=colocated, timeout_s=30)
        scheduler = engines.scheduler
        engines.push(version)
        with running_response(engine.client) as stream:
            scheduler.load(ACTOR)
        assert scheduler.state(ENGINES) is MemoryState.OFFLOADED and stops(stream)
        perturb(engine.model)
        engines.push(version + 1)
        assert stopped_during_push == [True] and scheduler.state(ACTOR) is MemoryState.OFFLOADED
        assert len(stream.join()) == 400
        assert max_logprob_difference(engine.client, engine.model) < 1e-4
        assert engine.client.weight_version() == str(version + 1)
        scheduler.load(ACTOR)
        engines.load()
        assert max_logprob_difference(engine.client, engine.model) < 1e-4


def test_offloading_an_unreachable_engine_does_nothing():
    engines = scripted_lifecycle(no_push, urls=["http://127.0.0.1:9"], timeout_s=5)
    assert engines.offload() == 0
    engines.load_weights()
    engines.load_kv_cache()


@pytest.mark.extended
def test_an_engine_that_refuses_to_offload_is_named(engine):
    engines = scripted_lifecycle(no_push, urls=[f"{engine.server.url}/nowhere"], timeout_s=5)
    with pytest.raises(EngineError, match=r"nowhere.*404"):
        engines.offload()
