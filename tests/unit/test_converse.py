"""Many responses at one time over several engines, here small HTTP servers: who is asked what, and what becomes of failures."""

import time
from dataclasses import replace

import pytest
from http_engines import HttpEngine, asked

from mrl.config.schema import FaultsConfig
from mrl.data.tokenizer import byte_tokenizer
from mrl.rollout.agent import ToolAgent
from mrl.rollout.answers import Answers
from mrl.rollout.calls import Markers
from mrl.rollout.client import SamplingParams
from mrl.rollout.tools import Calculator

PARAMS = SamplingParams(max_new_tokens=300)


class Server(HttpEngine):
    """A call first, then the end."""

    def __init__(self, tokenizer, **settings) -> None:
        self.first, self.then = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("(6*7)", "42<eos>")
        )
        super().__init__(**settings)

    def said(self, ids: list[int]) -> list[int]:
        return self.then if len(ids) > 3 else self.first


@pytest.fixture
def serve():
    """`serve(**settings)` -> a running Server."""
    tokenizer, servers = byte_tokenizer(), []

    def start(**settings) -> Server:
        servers.append(Server(tokenizer, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def conversation():
    agent = ToolAgent({"calculator": Calculator()}, Markers("calculator", start="(", end=")"), max_concurrency=5)
    return agent.prepare(byte_tokenizer())


def converse(conversation, *servers: Server, prompts, **settings):
    with asked(*servers, **settings) as engines:
        return engines.converse(conversation, prompts, [PARAMS] * len(prompts))


def test_all_turns_of_a_response_go_to_one_engine_and_answers_come_in_order(serve, conversation):
    servers = [serve(), serve()]
    prompts = [[number, 1] for number in range(40)]
    paths = converse(conversation, *servers, prompts=prompts)
    assert [turn.text for path in paths for turn in path.turns] == ["(6*7)", "42", "42"] * 40
    for server, mine in zip(servers, (prompts[:20], prompts[20:]), strict=True):
        asked_for = [ids for ids in server.inputs if len(ids) == 2]
        again = [ids[:2] for ids in server.inputs if len(ids) > 2]
        assert sorted(asked_for) == mine and sorted(again) == mine
    assert {path.weight_version for path in paths} == {3}
    assert all(path.usage.cached_tokens == path.usage.input_tokens - 2 for path in paths)


def test_a_turn_that_fails_is_asked_of_another_engine_and_those_before_stay(serve, conversation):
    """The first engine answers the first turns, then only errors; from then on the responses are with the second."""
    first, second = serve(statuses=(200,) * 5 + (500,) * 100), serve()
    prompts = [[number, 1] for number in range(10)]
    paths = converse(conversation, first, second, prompts=prompts, faults=FaultsConfig(engine_tries=4))
    assert [turn.text for path in paths for turn in path.turns] == ["(6*7)", "42", "42"] * 10
    assert sum(len(ids) == 2 for ids in first.inputs) == 5 and sum(len(ids) > 2 for ids in second.inputs) == 10


def test_no_more_responses_are_in_the_making_than_allowed(serve, conversation):
    server = serve(delay_s=0.03)
    converse(conversation, server, prompts=[[1, 1]] * 20)
    assert server.busiest == 5


def test_hundreds_at_one_time(serve, conversation):
    """One after the other they would take 15 minutes."""
    server, wide = serve(delay_s=1.5), replace(conversation, agent=replace(conversation.agent, max_concurrency=500))
    start = time.perf_counter()
    paths = converse(wide, server, prompts=[[1, 1]] * 300)
    assert len(paths) == 300 and server.busiest > 200
    assert time.perf_counter() - start < 60


def test_turns_that_an_earlier_process_had_are_not_sampled_again(serve, conversation, tmp_path):
    prompts = [[number, 1] for number in range(6)]
    first = serve()
    with asked(first) as engines:
        expected = engines.converse(conversation, prompts, [PARAMS] * 6, Answers(tmp_path, 2))
    again = serve()
    with asked(again) as engines:
        assert engines.converse(conversation, prompts, [PARAMS] * 6, Answers(tmp_path, 2)) == expected
        engines.converse(conversation, [[9, 1], *prompts[1:]], [PARAMS] * 6, Answers(tmp_path, 2))
    assert len(first.inputs) == 12 and len(again.inputs) == 2, "of the other prompt alone"
