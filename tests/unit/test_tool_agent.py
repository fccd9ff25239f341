"""Multi-turn responses: sampled tokens are never tokenized again, tool results are not sampled tokens, limits hold."""

import asyncio
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from mrl.data.tokenizer import byte_tokenizer
from mrl.rewards.reward_types import Score, Turn
from mrl.rollout import rollout_log
from mrl.rollout.agents.tool_agent import BoundToolAgent, ToolAgent
from mrl.rollout.agents.tools import Calculator, HermesParser, MarkerParser
from mrl.rollout.client import Completion, SamplingParams
from mrl.rollout.response_metrics import SampledStep
from mrl.rollout.trajectory import Group, Sample, Trajectory, block_trajectories, to_block, to_scored_batch

PROMPT = [1, 2, 3]


def merging_tokenizer():
    """Return a byte tokenizer that merges "12" into one token. Tokenized again, the sampled tokens 1 and 2 would change."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    plain = byte_tokenizer()
    vocab = {token: number for token, number in plain.get_vocab().items() if number < 256} | {"12": 256}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("1", "2")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    from transformers import PreTrainedTokenizerFast

    marks = ["<|start|>", "<|end|>", "<call>", "</call>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", additional_special_tokens=marks)
    tokenizer.chat_template = plain.chat_template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return merging_tokenizer()


def letters(tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, one for each character or special token. None are merged."""
    marks = ("<|start|>", "<|end|>", "<call>", "</call>", "<eos>")
    ids = []
    while text:
        piece = next((mark for mark in marks if text.startswith(mark)), text[0])
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        text = text.removeprefix(piece)
    return ids


@dataclass
class ScriptedEngine:
    """An engine that returns the given lines as completions, one per turn, and records the requests."""

    tokenizer: object
    lines: list[str]
    inputs: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    reason: str = "stop"

    async def __call__(self, inputs: list[int], params: SamplingParams) -> Completion:
        number = len(self.inputs)
        self.inputs.append(inputs)
        self.params.append(params)
        ids = letters(self.tokenizer, self.lines[number])
        reason = self.reason
        if len(ids) >= params.max_new_tokens:
            ids, reason = ids[: params.max_new_tokens], "length"
        logprobs = [-(number + 1) - place / 1000 for place in range(len(ids))]
        return Completion(
            ids, logprobs, reason, str(7 + number), cached_tokens=max(0, len(inputs) - 10) if number else 0
        )


AGENT = ToolAgent({"calculator": Calculator()}, MarkerParser("calculator"))


def respond(tokenizer, *lines: str, agent: ToolAgent = AGENT, room: int = 200, reason: str = "stop"):
    engine = ScriptedEngine(tokenizer, list(lines), reason=reason)
    conversation: BoundToolAgent = agent.prepare(tokenizer)

    async def run() -> Trajectory:
        params = SamplingParams(max_new_tokens=room, temperature=0.5)
        return await conversation(engine, PROMPT, params, asyncio.Semaphore(2))

    return asyncio.run(run()), engine


RESULT = "\n<|start|>tool\n{}<|end|>\n<|start|>assistant\n"


def test_sampled_tokens_are_appended_and_sent_back_unchanged(tokenizer):
    response, engine = respond(tokenizer, "12: <call>12+30</call>", "42<|end|>")
    first, second = letters(tokenizer, "12: <call>12+30</call>"), letters(tokenizer, "42<|end|>")
    between = tokenizer("<|end|>" + RESULT.format("42"), add_special_tokens=False)["input_ids"]
    assert response.token_ids == first + between + second
    assert engine.inputs == [PROMPT, PROMPT + first + between]
    retokenized = tokenizer(tokenizer.decode(response.token_ids), add_special_tokens=False)["input_ids"]
    assert len(retokenized) < len(response.token_ids), (
        "tokenizing again would have merged tokens, so this test would fail"
    )
    assert response.turns == (Turn("assistant", "12: 12+30"), Turn("tool", "42"), Turn("assistant", "42"))


def test_mask_and_logprobs_come_from_the_request_of_each_turn(tokenizer):
    response, _ = respond(tokenizer, "<call>1+1</call>", "<call>2+2</call>", "4<|end|>")
    sizes = [5, 5, 2]
    mine = [token for token, chosen in zip(response.token_ids, response.sampled, strict=True) if chosen]
    assert mine == letters(tokenizer, "<call>1+1</call><call>2+2</call>4<|end|>")
    assert response.logprobs == [-(turn + 1) - place / 1000 for turn, size in enumerate(sizes) for place in range(size)]
    assert response.turn_ends == (4, 9, 11) and response.num_sampled == 12
    assert response.weight_version == 7, "of the first token"
    assert not response.truncated
    assert [chosen for chosen, _ in response.spans] == [True, False, True, False, True]


def test_a_turn_that_the_policy_ended_itself_gets_no_second_end(tokenizer):
    tools, line = (
        {"calculator": Calculator()},
        '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>',
    )
    response, engine = respond(tokenizer, line + "<|end|>", "6<|end|>", agent=ToolAgent(tools, HermesParser()))
    assert tokenizer.decode(engine.inputs[1][3:]) == line + "<|end|>" + RESULT.format("6")
    assert engine.params[0].stop_token_ids == (), "the model's end of turn is enough"
    other, engine = respond(tokenizer, line + "<eos>", "6<|end|>", agent=ToolAgent(tools, HermesParser()))
    assert tokenizer.decode(engine.inputs[1][3:]) == line + "<eos>" + RESULT.format("6"), (
        "nor one that it closed otherwise"
    )
    assert [turn.text for turn in other.turns if turn.role == "tool"] == ["6"] and response.turns[-1].text == "6"


def test_a_turn_stops_at_the_end_of_a_call_and_gets_the_remaining_tokens(tokenizer):
    response, engine = respond(tokenizer, "<call>1+1</call>", "2<|end|>", room=100)
    end = tokenizer.convert_tokens_to_ids("</call>")
    assert [params.stop_token_ids for params in engine.params] == [(end,), (end,)]
    assert [params.temperature for params in engine.params] == [0.5, 0.5]
    assert [params.max_new_tokens for params in engine.params] == [100, 100 - len(engine.inputs[1]) + len(PROMPT)]
    assert len(response.token_ids) <= 100


def test_a_response_without_a_call_is_one_turn(tokenizer):
    response, engine = respond(tokenizer, "9<|end|>")
    assert len(engine.inputs) == 1 and response.sampled is None and response.turns == (Turn("assistant", "9"),)
    assert response.usage.tool_calls == 0 and response.usage.turns == 1


@pytest.mark.parametrize("room", range(1, 60))
def test_a_response_fits_the_limit_and_ends_with_a_sampled_token(tokenizer, room):
    response, _ = respond(tokenizer, "<call>1+1</call>", "<call>2+2</call>", "4<|end|>", room=room)
    unlimited, _ = respond(tokenizer, "<call>1+1</call>", "<call>2+2</call>", "4<|end|>")
    assert len(response.token_ids) <= room and response.token_ids == unlimited.token_ids[: len(response.token_ids)]
    assert response.sampled is None or response.sampled[-1]
    assert response.truncated == (
        len(response.token_ids) < len(unlimited.token_ids) or room == len(unlimited.token_ids)
    )
    assert len(response.logprobs) == (sum(response.sampled) if response.sampled else len(response.token_ids))


def test_a_call_in_the_last_turn_is_not_answered(tokenizer):
    response, engine = respond(tokenizer, *["<call>1+1</call>"] * 5, agent=replace(AGENT, max_turns=3))
    assert len(engine.inputs) == 3 and response.truncated
    assert response.usage.turns == 3 and response.usage.tool_calls == 2
    assert [turn.role for turn in response.turns] == ["assistant", "tool", "assistant", "tool", "assistant"]


def test_a_long_result_is_cut(tokenizer):
    response, engine = respond(tokenizer, "<call>9**90</call>", "?<|end|>", agent=replace(AGENT, max_tool_tokens=8))
    (between,) = [ids for chosen, ids in response.spans if not chosen]
    assert tokenizer.decode(between) == "<|end|>" + RESULT.format(str(9**90)[:5] + "...")
    assert response.usage.tool_errors == 0 and len(engine.inputs) == 2


@dataclass
class Stuck:
    release: threading.Event

    def __call__(self, text: str) -> str:
        self.release.wait(30)
        return text


def test_the_model_sees_failures_of_tools_and_they_are_counted(tokenizer):
    stuck = Stuck(threading.Event())
    slow = ToolAgent({"slow": stuck}, MarkerParser("slow"), tool_timeout_s=0.2)
    response, _ = respond(tokenizer, "<call>x</call>", "oh<|end|>", agent=slow)
    stuck.release.set()
    assert (
        response.turns[1] == Turn("tool", "error: slow did not answer within 0.2 s") and response.turns[2].text == "oh"
    )
    bad, _ = respond(tokenizer, "<call>1/0</call>", "<call>1+1</call>", "2<|end|>")
    assert bad.turns[1].text == "error: ZeroDivisionError: division by zero"
    assert (bad.usage.tool_calls, bad.usage.tool_errors) == (2, 1)


@pytest.mark.parametrize("lines", [["<call>1+1</call>", ""], [""]])
def test_an_empty_turn_raises(tokenizer, lines):
    with pytest.raises(
        RuntimeError,
        match=rf"turn {len(lines)} of a response is empty or was aborted by an engine \(finish reason stop\)",
    ):
        respond(tokenizer, *lines)


def test_an_aborted_turn_raises(tokenizer):
    with pytest.raises(
        RuntimeError, match=r"turn 1 of a response is empty or was aborted by an engine \(finish reason abort\)"
    ):
        respond(tokenizer, "12", reason="abort")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(max_turns=0), "max_turns=0: must be greater than 0"),
        (dict(tool_timeout_s=-1.0), "tool_timeout_s=-1.0"),
        (dict(tools={}), "tools is empty"),
        (dict(tools={"calculator": 3}), "tools.calculator is an object of type int, which cannot be called"),
        (dict(parser=MarkerParser("abacus")), "parser.tool='abacus' is not a tool; the tools are calculator"),
        (dict(parser="hermes"), "parser has the type str; expected"),
    ],
)
def test_impossible_settings_are_refused(change, why):
    with pytest.raises(ValueError) as raised:
        replace(AGENT, **change)
    assert why in str(raised.value)


def test_an_end_marker_of_several_tokens_is_refused(tokenizer):
    with pytest.raises(
        ValueError,
        match=r"rollout\.agent\.parser: '</tool>' should end a turn, but this model has no single token for it",
    ):
        replace(AGENT, parser=MarkerParser("calculator", end="</tool>")).prepare(tokenizer)


def test_the_config_names_the_agent_its_tools_and_parser_by_target():
    from mrl.config.instantiate import instantiate

    node = {
        "_target_": "mrl.rollout.agents.tool_agent.ToolAgent",
        "tools": {"calculator": {"_target_": "mrl.rollout.agents.tools.Calculator", "max_bits": 64}},
        "parser": {"_target_": "mrl.rollout.agents.tools.MarkerParser", "tool": "calculator"},
    }
    assert instantiate(node, "rollout.agent") == ToolAgent(
        {"calculator": Calculator(max_bits=64)}, MarkerParser("calculator")
    )
    node["tools"]["calculator"]["max_bit"] = 3
    with pytest.raises(ValueError, match=r"rollout\.agent\.tools\.calculator\.max_bit: .*did you mean 'max_bits'"):
        instantiate(node, "rollout.agent")


def samples_of(tokenizer) -> list[Sample]:
    lines = [["<call>1+1</call>", "2<|end|>"], ["3<|end|>"], ["<call>1/0</call>", "<call>5</call>", "5<|end|>"]]
    values = [(0.25, 0.5), None, (1.0, 2.0, 3.0)]
    return [
        Sample(row, PROMPT, respond(tokenizer, *said)[0], Score(1.0, turn_values=value))
        for row, (said, value) in enumerate(zip(lines, values, strict=True))
    ]


def test_a_step_reports_turns_calls_errors_and_cached_tokens(tokenizer):
    step = SampledStep([Group(samples_of(tokenizer))])
    numbers = step.metrics()
    usages = [sample.trajectory.usage for sample in samples_of(tokenizer)]
    assert numbers["rollout/turns_mean"] == 2.0 and numbers["rollout/tool_calls_mean"] == 1.0
    assert numbers["rollout/tool_errors_fraction"] == pytest.approx(1 / 3)
    cached, inputs = (sum(vars(usage)[name] for usage in usages) for name in ("cached_tokens", "input_tokens"))
    assert numbers["rollout/cached_tokens_fraction"] == pytest.approx(cached / inputs) and cached > 0


def test_the_reward_of_a_turn_is_at_its_last_token(tokenizer):
    groups = [Group(samples_of(tokenizer))]
    rewards = to_scored_batch(groups).turn_rewards
    lengths = [sample.trajectory.num_sampled for sample in groups[0].samples]
    expected = [np.zeros(length) for length in lengths]
    expected[0][[4, 6]], expected[1][1], expected[2][[4, 7, 9]] = (0.25, 0.5), 1.0, (1.0, 2.0, 3.0)
    assert rewards.tolist() == np.concatenate(expected).tolist()


def test_a_recorded_multi_turn_response_is_replayed_turn_by_turn(tokenizer, tmp_path):
    samples = samples_of(tokenizer)
    rollout_log.write_recording(tmp_path, 0, to_block([Group(samples)]))
    block, _ = rollout_log.read_recording(tmp_path, 0)
    again = block_trajectories(block, np.zeros(3, bool), np.full(3, 7))

    def decode(rows):
        return tokenizer.batch_decode(rows, skip_special_tokens=True)

    for sample, response in zip(samples, again, strict=True):
        live = sample.trajectory
        assert response.token_ids == live.token_ids and response.turn_ends == live.turn_ends
        assert response.sampled == (live.sampled or [True] * len(live.token_ids))
        assert np.allclose(response.logprobs, live.logprobs)
        assert [turn.role for turn in response.texts(decode)] == [turn.role for turn in live.turns]
        mine = [
            [turn.text for turn in turns if turn.role == "assistant"] for turns in (response.texts(decode), live.turns)
        ]
        assert mine[0] == mine[1]
