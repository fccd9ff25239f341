"""A real SGLang server that is offloaded in the middle of a response, and finishes the response after it is loaded again."""

import json
import threading
import time
from collections.abc import Iterator

import pytest
from live_engines import connected, largest_gap, perturb
from scripted_lifecycle import scripted_lifecycle

from mrl.config.schema import PauseMode
from mrl.controller.colocation import ACTOR, ENGINES, MemoryState
from mrl.rollout.client import SamplingParams
from mrl.weight_sync.engine_control import EngineError

PROMPT = [5, 9, 11, 4, 30, 7]
LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)


def no_push(version: int, engines_were_offloaded: bool) -> list:
    raise AssertionError("this test pushes nothing")


class Stream:
    """A streamed greedy response, read in a thread of its own."""

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

    def wait_for(self, tokens: int, timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while len(self.token_ids) < tokens and time.monotonic() < end:
            time.sleep(0.001)
        assert len(self.token_ids) >= tokens and not self.finished, "the response came too slowly, or was too short"

    def end(self, timeout_s: float = 60) -> list[int]:
        self._thread.join(timeout_s)
        assert self.finished
        return self.token_ids


def still(stream: Stream, seconds: float = 1.0) -> bool:
    """Return whether no token arrives for so many seconds."""
    time.sleep(0.2)  # for tokens in flight
    before = len(stream.token_ids)
    time.sleep(seconds)
    return len(stream.token_ids) == before and not stream.finished


def test_a_response_continues_after_the_engine_is_offloaded_and_loaded_again(engine):
    client, expected = engine.client, engine.client.generate([PROMPT], LONG)[0].token_ids
    stream = Stream(client)
    stream.wait_for(20)
    client.pause(PauseMode.retract)
    client.release_memory(["kv_cache", "weights"])
    assert still(stream)
    client.resume_memory(["weights"])
    client.resume_memory(["kv_cache"])
    assert still(stream), "the engine is still paused"
    client.resume()
    assert stream.end() == expected and len(expected) == 400


@pytest.mark.extended
def test_an_engine_with_running_requests_can_be_offloaded(engine):
    """SGLang asserts that it is idle, so EngineLifecycle pauses it first."""
    engines = scripted_lifecycle(no_push, urls=[engine.server.url], timeout_s=30)
    stream = Stream(engine.client)
    stream.wait_for(20)
    for _ in range(2):
        assert engines.offload() == 0
    assert still(stream)
    engines.load_weights()
    for _ in range(2):
        engines.load_kv_cache()
    assert len(stream.end()) == 400


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_colocated_engines_serve_the_pushed_weights_and_finish_waiting_requests(engine, one_rank, transport):
    tensors = dict(engine.model.state_dict())
    with connected([engine.server.url], engine.folder, tensors, transport=transport) as sync:
        version = int(engine.client.weight_version()) + 1
        seen: list[bool] = []

        def push(number: int, engines_were_offloaded: bool) -> list:
            report = sync.push(number, engines_were_offloaded)
            if number > version:
                seen.append(still(stream))  # requests wait for the KV cache
            return [report]

        together = frozenset([frozenset([ACTOR, ENGINES])])
        engines = scripted_lifecycle(push, urls=[engine.server.url], colocated=together, timeout_s=30)
        scheduler = engines.scheduler
        engines.push(version)
        stream = Stream(engine.client)
        stream.wait_for(20)
        scheduler.load(ACTOR)
        assert scheduler.state(ENGINES) is MemoryState.OFFLOADED and still(stream)
        perturb(engine.model)
        engines.push(version + 1)
        assert seen == [True] and scheduler.state(ACTOR) is MemoryState.OFFLOADED
        assert len(stream.end()) == 400
        assert largest_gap(engine.client, engine.model) < 1e-4
        assert engine.client.weight_version() == str(version + 1)
        scheduler.load(ACTOR)
        engines.load()
        assert largest_gap(engine.client, engine.model) < 1e-4


def test_offloading_an_unreachable_engine_does_nothing():
    engines = scripted_lifecycle(no_push, urls=["http://127.0.0.1:9"], timeout_s=5)
    assert engines.offload() == 0
    engines.load_weights()
    engines.load_kv_cache()


def test_an_engine_that_refuses_to_offload_is_named(engine):
    engines = scripted_lifecycle(no_push, urls=[f"{engine.server.url}/nowhere"], timeout_s=5)
    with pytest.raises(EngineError, match=r"nowhere.*404"):
        engines.offload()
