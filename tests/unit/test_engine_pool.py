"""EnginePool over small HTTP servers: which engine samples which request, and what happens after a failure."""

import time
from dataclasses import replace

import pytest
from http_engines import BROKEN, HttpEngine, engine_pool

from mrl.config.process_schema import FaultToleranceConfig
from mrl.data.tokenizer import byte_tokenizer
from mrl.rollout.agents.tool_agent import ToolAgent
from mrl.rollout.agents.tools import Calculator, MarkerParser
from mrl.rollout.client import EngineError, SamplingParams
from mrl.rollout.engine_pool import NoEngineError
from mrl.rollout.rollout_log import CompletionCache

PROMPTS = [[number, 1] for number in range(200)]
PARAMS = [SamplingParams(8)] * len(PROMPTS)
TURN_PARAMS = SamplingParams(max_new_tokens=300)


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


def check_completions(pool, count: int = len(PROMPTS)) -> None:
    """Check that each prompt gets its own completion, in the order of the prompts."""
    completions = pool.generate_all(PROMPTS[:count], PARAMS[:count])
    assert [completion.token_ids for completion in completions] == [[number + 1] for number in range(count)]


def test_prompts_are_split_evenly_and_neighbors_share_an_engine(serve):
    servers = [serve(), serve(), serve()]
    with engine_pool(*servers) as pool:
        check_completions(pool)
        assert pool.take_metrics() == {"rollout/replaced_engines": 0, "rollout/retried_responses": 0}
        assert pool.take_failed() == {}
    assert sorted(servers[1].inputs) == PROMPTS[67:134]
    assert [len(server.inputs) for server in servers] == [67, 67, 66]


def test_prompts_of_an_engine_with_broken_connections_go_to_the_others(serve):
    broken, healthy = serve(statuses=(BROKEN,) * 50), serve()
    with engine_pool(broken, healthy) as pool:
        check_completions(pool)
        assert pool.take_metrics()["rollout/retried_responses"] == 100
        broken.stop()
        check_completions(pool)  # the server refuses connections now
        (reason,) = pool.take_failed().values()
        assert "takes no connections" in reason
        assert pool.take_metrics() == {"rollout/replaced_engines": 1, "rollout/retried_responses": 0}
    assert len(healthy.inputs) == 400


def test_an_engine_that_answers_with_errors_is_taken_out_of_service(serve):
    bad, good = serve(statuses=(500,) * 50), serve()
    with engine_pool(bad, good, fault_tolerance=FaultToleranceConfig(max_response_attempts=2)) as pool:
        check_completions(pool)  # two requests to each engine
        (reason,) = pool.take_failed().values()
        assert "failed 2 times in a row" in reason and "answered 500" in reason and "out of tokens" in reason
        assert pool.take_metrics() == {"rollout/replaced_engines": 1, "rollout/retried_responses": 100}
        check_completions(pool)
        assert pool.take_failed() == {}
    assert bad.posts == 2 and len(good.inputs) == 400


def test_an_engine_that_computes_nothing_fails_and_a_slow_one_does_not(serve):
    hung, slow = serve(delay_s=60, computing=False), serve(delay_s=2.5)
    with engine_pool(hung, slow, fault_tolerance=FaultToleranceConfig(engine_stall_timeout_s=1.0)) as pool:
        start = time.monotonic()
        check_completions(pool)
        assert time.monotonic() - start < 20
        ((url, reason),) = pool.take_failed().items()
    assert url == hung.url and "has computed nothing for 1 s (fault_tolerance.engine_stall_timeout_s)" in reason


def test_a_busy_engine_is_asked_again_after_a_pause(serve):
    only = serve(statuses=(503, 429))
    with engine_pool(only) as pool:
        check_completions(pool, 10)
        assert pool.take_failed() == {} and pool.take_metrics()["rollout/retried_responses"] == 20
    assert only.posts == 3


def test_a_refused_request_is_not_retried(serve):
    only = serve(statuses=(400,) * 9)
    with engine_pool(only) as pool, pytest.raises(EngineError, match="/generate answered 400: out of tokens"):
        pool.generate_all(PROMPTS[:10], PARAMS[:10])
    assert only.posts == 1


class AbortingEngine(HttpEngine):
    """An engine that aborts its first `aborts` requests. `before_abort` is called before each of these answers."""

    def __init__(self) -> None:
        self.aborts, self.before_abort = 4, lambda: None
        super().__init__()

    def answer(self, ids):
        answer = super().answer(ids)
        if self.posts > self.aborts:
            return answer
        self.before_abort()
        return {"output_ids": [], "meta_info": answer["meta_info"] | {"finish_reason": {"type": "abort"}}}


def test_requests_that_a_pause_aborts_are_sent_again_and_are_no_faults():
    """With weight_sync.pause_mode=abort, each push aborts the running requests."""
    engine = AbortingEngine()
    try:
        with engine_pool(engine) as pool:

            def push() -> None:
                pool.paused = True
                pool.paused = False

            engine.before_abort = push
            check_completions(pool, 1)
            assert pool.take_failed() == {} and pool.take_metrics()["rollout/retried_responses"] == 0
            engine.aborts, engine.before_abort = 100, lambda: None
            with pytest.raises(EngineError, match="aborted 1 of 1 responses"):
                check_completions(pool, 1)
    finally:
        engine.stop()
    assert engine.posts == 5 + 3, "max_response_attempts limits the requests that no pause aborts"


def test_a_request_that_fails_on_every_engine_raises(serve):
    """Each engine fails only once, so all of them stay in service."""
    servers = [serve(statuses=(500,)) for _ in range(3)]
    message = (
        r"a request failed 3 times \(fault_tolerance.max_response_attempts\); the last failure: "
        r".*answered 500.*rollout.engine_urls"
    )
    with engine_pool(*servers) as pool, pytest.raises(EngineError, match=message):
        pool.generate_all(PROMPTS[:1], PARAMS[:1])


def test_an_unreachable_engine_does_not_count_as_an_attempt(serve):
    unreachable, healthy = [serve() for _ in range(4)], serve()
    fault_tolerance = FaultToleranceConfig(max_response_attempts=1)
    with engine_pool(*unreachable, healthy, fault_tolerance=fault_tolerance) as pool:
        for server in unreachable:
            server.stop()
        check_completions(pool)
        assert len(pool.take_failed()) == 4
        healthy.stop()
        with pytest.raises(NoEngineError, match="takes no connections"):
            check_completions(pool)


def test_a_pool_without_a_healthy_engine_raises_until_one_is_ready(serve):
    fault_tolerance = FaultToleranceConfig(engine_stall_timeout_s=0.4)
    with engine_pool(serve(delay_s=60, computing=False), fault_tolerance=fault_tolerance) as pool:
        with pytest.raises(NoEngineError, match="has computed nothing"):
            pool.generate_all(PROMPTS, PARAMS)
        with pytest.raises(NoEngineError, match="has computed nothing"):
            pool.generate_all(PROMPTS, PARAMS)
        pool.wait_ready(5)  # the engine answers again
        assert len(pool.take_failed()) == 1


def test_a_batch_of_requests_has_a_deadline(serve):
    slow, message = serve(delay_s=60), r"not all responses arrived within rollout.request_timeout_s=0.5"
    with engine_pool(slow, request_timeout_s=0.5) as pool, pytest.raises(EngineError, match=message):
        pool.generate_all(PROMPTS, PARAMS)


def test_cached_completions_of_an_earlier_process_are_not_sampled_again(serve, tmp_path):
    """The earlier process ended when one of its engines had answered and the other engine had not."""
    answering, refusing = serve(), serve(statuses=(400,) * 50, delay_s=1.0)  # refuses after the other has answered
    with engine_pool(answering, refusing) as pool, pytest.raises(EngineError):
        pool.generate_all(PROMPTS, PARAMS, CompletionCache(tmp_path, 5))
    cache = CompletionCache(tmp_path, 5)
    assert 0 < len(cache) <= 100
    server = serve()
    with engine_pool(server) as pool:
        completions = pool.generate_all(PROMPTS, PARAMS, cache)
    assert [completion.token_ids for completion in completions] == [[number + 1] for number in range(len(PROMPTS))]
    assert len(server.inputs) == len(PROMPTS) - len(cache)
    assert len(CompletionCache(tmp_path, 5)) == len(PROMPTS)


class CallingEngine(HttpEngine):
    """An engine that completes a prompt with a tool call, and a longer input with the last turn."""

    def __init__(self, tokenizer, **settings) -> None:
        self.call, self.last_turn = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("(6*7)", "42<eos>")
        )
        super().__init__(**settings)

    def completion(self, ids: list[int]) -> list[int]:
        return self.last_turn if len(ids) > 3 else self.call


@pytest.fixture
def serve_calls():
    """`serve_calls(**settings)` -> a running CallingEngine."""
    tokenizer, servers = byte_tokenizer(), []

    def start(**settings) -> CallingEngine:
        servers.append(CallingEngine(tokenizer, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def conversation():
    agent = ToolAgent({"calculator": Calculator()}, MarkerParser("calculator", start="(", end=")"), max_concurrency=5)
    return agent.prepare(byte_tokenizer())


def generate_multi_turn(conversation, *servers: CallingEngine, prompts, **settings):
    with engine_pool(*servers, **settings) as pool:
        return pool.generate_multi_turn_all(conversation, prompts, [TURN_PARAMS] * len(prompts))


def test_all_turns_of_a_response_go_to_one_engine_and_responses_are_in_order(serve_calls, conversation):
    servers = [serve_calls(), serve_calls()]
    prompts = [[number, 1] for number in range(40)]
    trajectories = generate_multi_turn(conversation, *servers, prompts=prompts)
    assert [turn.text for trajectory in trajectories for turn in trajectory.turns] == ["(6*7)", "42", "42"] * 40
    for server, share in zip(servers, (prompts[:20], prompts[20:]), strict=True):
        first_turns = [ids for ids in server.inputs if len(ids) == 2]
        later_turns = [ids[:2] for ids in server.inputs if len(ids) > 2]
        assert sorted(first_turns) == share and sorted(later_turns) == share
    assert {trajectory.weight_version for trajectory in trajectories} == {3}
    assert all(one.usage.cached_tokens == one.usage.input_tokens - 2 for one in trajectories)


def test_a_failed_turn_goes_to_another_engine_and_earlier_turns_are_kept(serve_calls, conversation):
    """The first engine answers five first turns, and then only errors. So the second engine gets all further requests."""
    first, second = serve_calls(statuses=(200,) * 5 + (500,) * 100), serve_calls()
    prompts = [[number, 1] for number in range(10)]
    fault_tolerance = FaultToleranceConfig(max_response_attempts=4)
    trajectories = generate_multi_turn(conversation, first, second, prompts=prompts, fault_tolerance=fault_tolerance)
    assert [turn.text for trajectory in trajectories for turn in trajectory.turns] == ["(6*7)", "42", "42"] * 10
    assert sum(len(ids) == 2 for ids in first.inputs) == 5 and sum(len(ids) > 2 for ids in second.inputs) == 10


def test_no_more_than_max_concurrency_responses_are_sampled_at_once(serve_calls, conversation):
    server = serve_calls(delay_s=0.03)
    generate_multi_turn(conversation, server, prompts=[[1, 1]] * 20)
    assert server.busiest == 5


@pytest.mark.extended
def test_hundreds_of_responses_are_sampled_at_once(serve_calls, conversation):
    """One after the other, the responses would take 15 minutes."""
    server = serve_calls(delay_s=1.5)
    wide = replace(conversation, agent=replace(conversation.agent, max_concurrency=500))
    start = time.perf_counter()
    trajectories = generate_multi_turn(wide, server, prompts=[[1, 1]] * 300)
    assert len(trajectories) == 300 and server.busiest > 200
    assert time.perf_counter() - start < 60


def test_cached_turns_of_an_earlier_process_are_not_sampled_again(serve_calls, conversation, tmp_path):
    prompts = [[number, 1] for number in range(6)]
    first = serve_calls()
    with engine_pool(first) as pool:
        expected = pool.generate_multi_turn_all(conversation, prompts, [TURN_PARAMS] * 6, CompletionCache(tmp_path, 2))
    second = serve_calls()
    with engine_pool(second) as pool:
        assert (
            pool.generate_multi_turn_all(conversation, prompts, [TURN_PARAMS] * 6, CompletionCache(tmp_path, 2))
            == expected
        )
        pool.generate_multi_turn_all(
            conversation, [[9, 1], *prompts[1:]], [TURN_PARAMS] * 6, CompletionCache(tmp_path, 2)
        )
    assert len(first.inputs) == 12 and len(second.inputs) == 2, "of the new prompt only"
