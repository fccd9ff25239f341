"""Supervised rows of several turns: the loss covers the assistant's text, and the tokens equal those of an agent."""

import asyncio
import json

import pytest

from mrl.data.supervised_dataset import SftDataset
from mrl.data.tokenizer import byte_tokenizer
from mrl.rollout.agents.tool_agent import ToolAgent
from mrl.rollout.agents.tools import Calculator, MarkerParser
from mrl.rollout.client import Completion, SamplingParams

TURNS = [
    {"role": "assistant", "content": "<call>6*7</call>"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]
PROMPT = [{"role": "user", "content": "6*7?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    return folder


def load(tmp_path, model, *responses) -> SftDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": PROMPT, "response": response}) for response in responses))
    return SftDataset.load(path, model, max_tokens=500)


def test_assistant_tokens_are_in_the_loss_and_tool_results_are_not(tmp_path, model):
    tokenizer, data = byte_tokenizer(), load(tmp_path, model, TURNS, [TURNS[-1]])
    pairs = list(zip(data.responses[0], data.loss_masks[0], strict=True))
    said = [token for token, learned in pairs if learned]
    heard = [token for token, learned in pairs if not learned]
    assert tokenizer.decode(said) == "<call>6*7</call><|end|>It is 42.<eos>"
    assert tokenizer.decode(heard) == "\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"
    assert all(data.loss_masks[1]) and tokenizer.decode(data.responses[1]) == "It is 42.<eos>"


def test_rows_of_one_turn_as_text_or_as_message_are_the_same(tmp_path, model):
    text = load(tmp_path, model, "It is 42.")
    message = load(tmp_path, model, [TURNS[-1]])
    assert text.responses == message.responses and text.loss_masks is None


def test_the_tokens_equal_those_of_an_agent_rollout(tmp_path, model):
    tokenizer, data = byte_tokenizer(), load(tmp_path, model, TURNS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    lines = iter(["<call>6*7</call><|end|>", "It is 42.<eos>"])

    async def generate(inputs: list[int], params: SamplingParams) -> Completion:
        ids = tokenizer(next(lines), add_special_tokens=False)["input_ids"]
        return Completion(ids, [-1.0] * len(ids), "stop", "0")

    class Calls(MarkerParser):
        """Stops only where the model itself ends its turn."""

        stops = ()

    conversation = ToolAgent({"calculator": Calculator()}, Calls("calculator")).prepare(tokenizer)
    path = asyncio.run(conversation(generate, [1], SamplingParams(200), asyncio.Semaphore(1)))
    assert path.token_ids == data.responses[0] and path.sampled == data.loss_masks[0]


@pytest.mark.parametrize(
    "response",
    [
        TURNS[:2],
        TURNS[1:],
        [TURNS[0], TURNS[2]],
        [],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": 3}],
        7,
        ["It is 42."],
    ],
)
def test_messages_in_the_wrong_order_are_refused(tmp_path, model, response):
    with pytest.raises(
        ValueError, match=r"rows.jsonl, row 0, column 'response': expected a text, or a list of messages with the roles"
    ):
        load(tmp_path, model, response)
