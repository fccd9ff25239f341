"""The rehearsal calls the reward and the agent before a run starts. Errors name the file and the line of the user's code."""

import pickle
import threading
import time
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from mrl.config.schema import Config, RolloutConfig, ScoringConfig
from mrl.controller.rehearsal import rehearse_agent, rehearse_reward
from mrl.core.code_locations import describe_error, user_location
from mrl.rewards.reward_types import Response, Weighted
from mrl.rewards.user_function import Function
from mrl.rollout.agents.tool_agent import ToolAgent
from mrl.rollout.agents.tools import Calculator

SETTINGS = ScoringConfig(sample_timeout_s=5.0)
RESPONSES = [Response("set", "24", "24", group=0), Response("set", "This is a made-up response.", "31", group=1)]


@pytest.fixture
def function(tmp_path):
    """`function(body)` -> a reward that calls a user's function with this body. The body begins in line 2 of the file."""

    def make(body: str, signature: str = "def compute_score(data_source, solution_str, ground_truth, extra_info):"):
        path = tmp_path / f"mine_{abs(hash(body))}.py"
        path.write_text(f"{signature}\n    {body}\n")
        return Function(str(path))

    return make


MISTAKES = {
    "an exception": ("raise RuntimeError('broken table')", "RuntimeError: broken table ({path}:2, in compute_score)"),
    "a missing key": ("return extra_info['answer'] == 1", "KeyError: 'answer' ({path}:2, in compute_score)"),
    "None": ("return None", "expected a finite number, got 'None' (NoneType)"),
    "no else": (
        "return 1.0 if solution_str == ground_truth else None",
        "expected a finite number, got 'None' (NoneType)",
    ),
    "nan": ("return float('nan')", "expected a finite number, got 'nan' (float)"),
    "a text": ("return 'correct'", "expected a finite number, got 'correct' (str)"),
    "another key": ("return {{'reward': 1.0}}", "a dict without the key 'score', got the keys reward"),
    "a list": ("return [1.0]", "expected a finite number, got '[1.0]' (list)"),
    "the end of the process": ("import os; os._exit(3)", "the worker process died (exit code 3)"),
}


@pytest.mark.extended_except("an exception", "no else", "another key", "the end of the process")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_reward_function_is_found_before_the_start(function, mistake):
    body, message = MISTAKES[mistake]
    reward = function(body.format())
    with pytest.raises(ValueError, match="the reward function failed before the start") as raised:
        rehearse_reward(reward, RESPONSES, SETTINGS)
    said = str(raised.value)
    assert message.format(path=reward.path) in said and "scoring.rehearse=false" in said
    assert len(said.splitlines()) <= 5
    assert ("a dict whose key 'score' is a finite number" in said) == ("got" in message), (
        "a wrong type names the right ones"
    )


def test_a_reward_that_hangs_is_ended_at_its_time_limit_with_a_warning(function, caplog):
    """The first call of a reward may be slow, for example because it loads a model. So the run still starts."""
    start = time.monotonic()
    rehearse_reward(function("import time; time.sleep(600)"), RESPONSES, ScoringConfig(sample_timeout_s=0.3))
    assert "no score within 0.3 s; the worker process was ended" in caplog.text
    assert time.monotonic() - start < 100


def test_a_reward_that_fails_for_some_responses_is_a_warning(function, caplog, own_records):
    rehearse_reward(function("return float(int(solution_str) == int(ground_truth))"), RESPONSES, SETTINGS)
    assert "failed for 1 of 2 made-up responses: ValueError: invalid literal for int()" in caplog.text
    caplog.clear()
    rehearse_reward(function("return float(solution_str == ground_truth)"), RESPONSES, SETTINGS)
    assert not own_records()


def test_a_service_that_is_not_up_yet_is_a_warning(function, caplog):
    rehearse_reward(function("raise ConnectionRefusedError('no server')"), RESPONSES, SETTINGS)
    assert "ConnectionRefusedError: no server" in caplog.text


def test_a_reward_is_called_with_rows_of_each_data_source(function, caplog):
    """The function fails for the second data source, or cannot answer for the first."""
    code = [replace(response, data_source="code", group=7) for response in RESPONSES]
    body = "return {'set': 1.0}[data_source]"
    with pytest.raises(ValueError, match=r"KeyError: 'code'[\s\S]* to row 7 of the training data"):
        rehearse_reward(function(body), [*RESPONSES, *code], SETTINGS)
    rehearse_reward(
        function(f"if data_source == 'set': raise TimeoutError('busy')\n    {body}"), [*RESPONSES, *code], SETTINGS
    )
    assert caplog.text.count("TimeoutError: busy") == 1, (
        "after a failure that may be temporary, no other source is called"
    )


@dataclass
class Remote:
    """Stands in for a judge, which must not be called before the run starts."""

    in_process: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True
    calls: list = field(default_factory=list)

    def __call__(self, responses: list[Response]) -> list[float]:
        self.calls.append(responses)
        return [0.0] * len(responses)


def test_each_part_of_a_weighted_sum_is_called_except_those_that_need_a_server(function):
    remote = Remote()
    reward = Weighted({"judge": remote, "format": function("raise RuntimeError('no table')")})
    with pytest.raises(ValueError, match=r"^reward\.parts\.format: .*RuntimeError: no table"):
        rehearse_reward(reward, RESPONSES, SETTINGS)
    assert remote.calls == []


def test_a_reward_that_is_called_with_a_batch_gets_all_responses_at_once(function):
    with pytest.raises(ValueError, match="the reward returned 1 values for 2 responses"):
        rehearse_reward(FirstOnly(), RESPONSES, SETTINGS)


class FirstOnly:
    """A user's reward that scores only the first response of a batch."""

    in_process: ClassVar[bool] = True

    def __call__(self, responses: list[Response]) -> list[float]:
        return [1.0 for _ in responses[:1]]


class Connected:
    """A user's reward that opens a connection in its first call. A connection cannot be pickled."""

    in_process: ClassVar[bool] = True

    def __init__(self, connection: object = None) -> None:
        self.connection = connection

    def __call__(self, responses: list[Response]) -> list[float]:
        self.connection = threading.Lock()
        return [0.0] * len(responses)


def test_the_rehearsal_leaves_a_reward_in_this_process_as_it_was():
    reward = Connected()
    rehearse_reward(reward, RESPONSES, SETTINGS)
    assert reward.connection is None and pickle.dumps(reward)


def test_a_reward_that_cannot_be_sent_to_the_rollout_worker_is_an_error_before_the_start():
    reward = Weighted({"mine": Connected(threading.Lock())})
    with pytest.raises(
        ValueError, match=r"^reward\.parts\.mine: the reward cannot be sent.*cannot pickle '_thread\.lock'"
    ):
        rehearse_reward(reward, RESPONSES, SETTINGS)


class Parser:
    """A user's parser of tool calls. It raises an error."""

    stops: ClassVar[tuple[str, ...]] = ()

    def __call__(self, text: str) -> list:
        raise AttributeError(f"no pattern for {len(text)} characters")


class LetterTokenizer:
    """A tokenizer with one token per character. It has only the methods that the rehearsal needs."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join(map(chr, ids))


class Agent(ToolAgent):
    def prepare(self, tokenizer, template_args=None):
        from mrl.rollout.agents.tool_agent import BoundToolAgent

        return BoundToolAgent(self, tokenizer, template=None, stop_token_ids=())  # type: ignore[arg-type]


def test_a_mistake_in_an_agent_is_found_before_the_start():
    config = Config(rollout=RolloutConfig(max_response_tokens=64))
    with pytest.raises(ValueError, match=rf"AttributeError: no pattern .*{__file__}:\d+, in __call__"):
        rehearse_agent(Agent({"calculator": Calculator()}, Parser()), LetterTokenizer(), config)


def test_the_location_of_an_error_is_the_innermost_line_of_the_users_code(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import json\n\ndef read(text):\n    return json.loads(text)\n")
    space: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    with pytest.raises(ValueError) as raised:
        space["read"]("{")
    assert user_location(raised.value) == f"{path}:4, in read"  # and not a line of the standard library
    try:
        raise RuntimeError("rows cannot be read") from raised.value
    except RuntimeError as outer:
        outer.__traceback__ = None  # as in an exception from another process
        assert describe_error(outer) == f"RuntimeError: rows cannot be read ({path}:4, in read)"
    assert user_location(ValueError("nowhere")) is None
