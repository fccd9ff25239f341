"""A real SGLang server that gives its memory back in the middle of a response, and ends the response when it has it again."""

import json
import threading
import time
from collections.abc import Iterator

import pytest
from live_engines import connected, largest_gap, perturb

from mrl.controller.colocation import ACTOR, ENGINES, MemoryScheduler, State
from mrl.rollout.client import SamplingParams
from mrl.weight_sync.engine_control import EngineError, EnginePoolMemory

PROMPT = [5, 9, 11, 4, 30, 7]
LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)


class Stream:
    """A greedy response as it comes, read in a thread of its own."""

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
    """Whether no token comes for so long."""
    time.sleep(0.2)  # what was on its way
    before = len(stream.token_ids)
    time.sleep(seconds)
    return len(stream.token_ids) == before and not stream.finished


def test_a_response_goes_on_where_it_was_when_the_engine_has_its_memory_again(engine):
    client, expected = engine.client, engine.client.generate([PROMPT], LONG)[0].token_ids
    stream = Stream(client)
    stream.wait_for(20)
    client.pause("retract")
    client.release_memory(["kv_cache", "weights"])
    assert still(stream)
    client.resume_memory(["weights"])
    client.resume_memory(["kv_cache"])
    assert still(stream), "it is paused all the while"
    client.resume()
    assert stream.end() == expected and len(expected) == 400


@pytest.mark.extended
def test_nothing_is_given_back_where_requests_run_and_the_engine_lives(engine):
    """SGLang asserts that it is idle; EnginePoolMemory pauses first."""
    memory = EnginePoolMemory(lambda: [engine.server.url], timeout_s=30)
    stream = Stream(engine.client)
    stream.wait_for(20)
    for _ in range(2):
        assert memory.sleep() == 0
    assert still(stream)
    memory.wake_weights()
    for _ in range(2):
        memory.wake_cache()
    assert len(stream.end()) == 400


class Actor:
    """A trainer whose weights are always there."""

    def sleep(self, keep_weights: bool = False) -> int:
        return 0

    def wake(self) -> None:
        pass


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_by_turns_engines_wake_with_what_was_pushed_and_end_what_waits(engine, one_rank, transport):
    memory = EnginePoolMemory(lambda: [engine.server.url], timeout_s=30)
    turns = MemoryScheduler({ACTOR: Actor()}, memory, frozenset([frozenset([ACTOR, ENGINES])]))
    turns.started(ACTOR, ENGINES)
    tensors = dict(engine.model.state_dict())
    with connected([engine.server.url], engine.folder, tensors, transport=transport) as sync:
        version = int(engine.client.weight_version()) + 1
        turns.push(lambda released: sync.push(version, released))
        turns.bring = lambda: turns.push(lambda released: sync.push(sync._version, released))
        stream = Stream(engine.client)
        stream.wait_for(20)
        turns.need(ACTOR)
        assert turns.state(ENGINES) is State.ASLEEP and still(stream)
        perturb(engine.model)
        seen: list[bool] = []

        def send(released: bool):
            report = sync.push(version + 1, released)
            seen.append(still(stream))  # it waits for its KV cache
            return report

        turns.push(send)
        assert seen == [True] and turns.state(ACTOR) is State.ASLEEP
        assert len(stream.end()) == 400
        assert largest_gap(engine.client, engine.model) < 1e-4
        assert engine.client.weight_version() == str(version + 1)
        turns.need(ACTOR)
        turns.need(ENGINES)
        assert largest_gap(engine.client, engine.model) < 1e-4


def test_an_engine_that_is_gone_has_nothing_to_give_back():
    memory = EnginePoolMemory(lambda: ["http://127.0.0.1:9"], timeout_s=5)
    assert memory.sleep() == 0
    memory.wake_weights()
    memory.wake_cache()


def test_an_engine_that_refuses_is_named(engine):
    memory = EnginePoolMemory(lambda: [f"{engine.server.url}/nowhere"], timeout_s=5)
    with pytest.raises(EngineError, match=r"nowhere.*404"):
        memory.sleep()
