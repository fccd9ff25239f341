"""A round of requests over several engines, here small HTTP servers: who answers, and what becomes of failures."""

import time

import pytest
from http_engines import BROKEN, HttpEngine, asked

from mrl.config.schema import FaultsConfig
from mrl.rollout.answers import Answers
from mrl.rollout.asking import NoEngineError
from mrl.rollout.client import EngineError, SamplingParams
from mrl.rollout.generator import RolloutGenerator

PROMPTS = [[number, 1] for number in range(200)]
PARAMS = [SamplingParams(8)] * len(PROMPTS)


@pytest.fixture
def serve():
    """`serve(**settings)` -> a running HttpEngine."""
    servers: list[HttpEngine] = []

    def start(**settings) -> HttpEngine:
        servers.append(HttpEngine(**settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def complete(engines, count: int = len(PROMPTS)) -> None:
    """Every prompt has its own answer, in order."""
    answers = engines.complete(PROMPTS[:count], PARAMS[:count])
    assert [answer.token_ids for answer in answers] == [[number + 1] for number in range(count)]


def test_prompts_are_spread_evenly_and_neighbours_stay_together(serve):
    servers = [serve(), serve(), serve()]
    with asked(*servers) as engines:
        complete(engines)
        assert engines.take_numbers() == {"rollout/replaced_engines": 0, "rollout/redone_responses": 0}
        assert engines.take_failed() == {}
    assert sorted(servers[1].inputs) == PROMPTS[67:134]
    assert [len(server.inputs) for server in servers] == [67, 67, 66]


def test_an_engine_whose_connections_break_leaves_its_prompts_to_the_others(serve):
    gone, living = serve(statuses=(BROKEN,) * 50), serve()
    with asked(gone, living) as engines:
        complete(engines)
        assert engines.take_numbers()["rollout/redone_responses"] == 100
        gone.stop()
        complete(engines)  # connections are refused
        (why,) = engines.take_failed().values()
        assert "takes no connections" in why
        assert engines.take_numbers() == {"rollout/replaced_engines": 1, "rollout/redone_responses": 0}
    assert len(living.inputs) == 400


def test_an_engine_that_answers_errors_is_out_of_service_and_named(serve):
    bad, good = serve(statuses=(500,) * 50), serve()
    with asked(bad, good, faults=FaultsConfig(engine_tries=2)) as engines:
        complete(engines)  # two requests to each
        (why,) = engines.take_failed().values()
        assert "failed 2 times in a row" in why and "answered 500" in why and "out of tokens" in why
        assert engines.take_numbers() == {"rollout/replaced_engines": 1, "rollout/redone_responses": 100}
        complete(engines)
        assert engines.take_failed() == {}
    assert bad.posts == 2 and len(good.inputs) == 400


def test_an_engine_that_computes_nothing_fails_and_a_slow_one_does_not(serve):
    hung, slow = serve(delay_s=60, computing=False), serve(delay_s=2.5)
    with asked(hung, slow, faults=FaultsConfig(engine_stall_s=1.0)) as engines:
        start = time.monotonic()
        complete(engines)
        assert time.monotonic() - start < 20
        ((url, why),) = engines.take_failed().items()
    assert url == hung.url and "has computed nothing for 1 s (faults.engine_stall_s)" in why


def test_a_busy_answer_is_asked_for_again_with_a_pause(serve):
    only = serve(statuses=(503, 429))
    with asked(only) as engines:
        complete(engines, 10)
        assert engines.take_failed() == {} and engines.take_numbers()["rollout/redone_responses"] == 20
    assert only.posts == 3


def test_a_refused_request_is_not_asked_again(serve):
    only = serve(statuses=(400,) * 9)
    with asked(only) as engines, pytest.raises(EngineError, match="/generate answered 400: out of tokens"):
        engines.complete(PROMPTS[:10], PARAMS[:10])
    assert only.posts == 1


def test_a_request_that_fails_everywhere_ends_the_round(serve):
    """Another one succeeds in between, so that the engines are in order."""
    servers = [serve(statuses=(500,)) for _ in range(3)]
    why = r"a request failed 3 times \(faults.engine_tries\), at last so: .*answered 500.*rollout.engine_urls"
    with asked(*servers) as engines, pytest.raises(EngineError, match=why):
        engines.complete(PROMPTS[:1], PARAMS[:1])


def test_engines_that_are_gone_cost_no_try_of_a_request(serve):
    gone, living = [serve() for _ in range(4)], serve()
    with asked(*gone, living, faults=FaultsConfig(engine_tries=1)) as engines:
        for server in gone:
            server.stop()
        complete(engines)
        assert len(engines.take_failed()) == 4
        living.stop()
        with pytest.raises(NoEngineError, match="takes no connections"):
            complete(engines)


def test_without_an_engine_the_round_ends(serve):
    with asked(serve(delay_s=60, computing=False), faults=FaultsConfig(engine_stall_s=0.4)) as engines:
        with pytest.raises(NoEngineError, match="has computed nothing"):
            engines.complete(PROMPTS, PARAMS)
        with pytest.raises(NoEngineError, match="has computed nothing"):
            engines.complete(PROMPTS, PARAMS)
        engines.wait_ready(5)  # it answers again
        assert len(engines.take_failed()) == 1


def test_a_round_has_a_deadline(serve):
    slow, why = serve(delay_s=60), r"not all responses were there after rollout.request_timeout_s=0.5"
    with asked(slow, request_timeout_s=0.5) as engines, pytest.raises(EngineError, match=why):
        engines.complete(PROMPTS, PARAMS)


class Asked(RolloutGenerator):
    """Its worker loses all engines in the first `losses` rounds."""

    def __init__(self, losses: int) -> None:
        self.tries, self.losses, self.restored = 3, losses, []
        self.restore = self.restored.append
        self.before = lambda: None

    def _ask(self, method, *arguments):
        if method == "failed_engines":
            return {"http://h:1": "hangs (engine_0.log)"} if len(self.restored) < self.losses else {}
        if len(self.restored) < self.losses:
            raise NoEngineError("none")
        return 0.5


def test_with_no_engine_left_the_driver_replaces_them_and_asks_again_but_not_for_ever():
    twice = Asked(losses=2)
    assert twice.evaluate(1.0) == 0.5 and len(twice.restored) == 2
    always = Asked(losses=9)
    with pytest.raises(EngineError, match=r"no engine was left 3 times in a row.*http://h:1: hangs \(engine_0.log\)"):
        always.evaluate(1.0)
    assert len(always.restored) == 3


def test_what_an_earlier_process_was_answered_is_not_asked_again(serve, tmp_path):
    """It was killed when one of its engines had answered and the other had not."""
    answering, refusing = serve(), serve(statuses=(400,) * 50, delay_s=1.0)  # when the other one has answered
    with asked(answering, refusing) as engines, pytest.raises(EngineError):
        engines.complete(PROMPTS, PARAMS, Answers(tmp_path, 5))
    kept = Answers(tmp_path, 5)
    assert 0 < len(kept) <= 100
    server = serve()
    with asked(server) as engines:
        answers = engines.complete(PROMPTS, PARAMS, kept)
    assert [answer.token_ids for answer in answers] == [[number + 1] for number in range(len(PROMPTS))]
    assert len(server.inputs) == len(PROMPTS) - len(kept)
    assert len(Answers(tmp_path, 5)) == len(PROMPTS)
