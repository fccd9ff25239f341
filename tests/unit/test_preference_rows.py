"""Rows with preferences in the forms of TRL and verl become prompts and responses, and wrong rows are refused."""

import json

import numpy as np
import pytest

from mrl.data.supervised_dataset import RowForm, SftDataset, load_preferences
from mrl.data.tokenizer import byte_tokenizer
from mrl.rewards.remote_models import RewardModel
from mrl.rewards.reward_types import Response

USER = {"role": "user", "content": "2+2?"}
PROMPT = [{"role": "system", "content": "Be brief."}, USER]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    return folder


def written(tmp_path, rows: list[dict]):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def load(tmp_path, model, *rows: dict, **form) -> SftDataset:
    return RowForm(**({"rows": "pairs"} | form)).load(written(tmp_path, list(rows)), model, 400)


def texts(data: SftDataset) -> list[tuple[str, str]]:
    tokenizer = byte_tokenizer()
    return [tuple(map(tokenizer.decode, pair)) for pair in zip(data.prompts, data.responses, strict=True)]


RENDERED = "<|start|>system\nBe brief.<|end|>\n<|start|>user\n2+2?<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        dict(prompt=PROMPT, chosen="4", rejected="It is 5."),
        dict(prompt=PROMPT, chosen=[said("4")], rejected=[said("It is 5.")]),
        dict(chosen=[*PROMPT, said("4")], rejected=[*PROMPT, said("It is 5.")]),
        dict(prompt="2+2?", chosen=[*PROMPT, said("4")], rejected=[*PROMPT, said("It is 5.")]),
        dict(prompt=PROMPT, chosen="4", rejected="It is 5.", margin=0, source="any"),
    ],
    ids=["texts", "messages", "implicit prompt", "prompt also in the responses", "further columns"],
)
def test_every_form_of_a_pair_gives_the_same_tokens(tmp_path, model, row):
    data = load(tmp_path, model, row)
    assert texts(data) == [(RENDERED, "4<eos>"), (RENDERED, "It is 5.<eos>")]
    assert data.num_rows == 1 and data.sequences_per_row == 2 and data.columns == {"margins": [0.0, 0.0]}


def test_the_tokens_of_a_response_equal_those_of_a_supervised_row(tmp_path, model):
    turns = [said("<call>"), {"role": "tool", "content": "4"}, said("It is 4.")]
    data = load(tmp_path, model, dict(prompt=PROMPT, chosen=turns, rejected="5"))
    (tmp_path / "sft.jsonl").write_text(json.dumps(dict(prompt=PROMPT, response=turns)))
    supervised = SftDataset.load(tmp_path / "sft.jsonl", model, 400)
    assert data.prompts[0] == supervised.prompts[0] and data.responses[0] == supervised.responses[0]
    assert data.loss_masks[0] == supervised.loss_masks[0] and not all(data.loss_masks[0])


def test_the_common_beginning_of_two_texts_is_the_prompt(tmp_path, model):
    data = load(tmp_path, model, dict(chosen="The sky is blue.", rejected="The sky is green."))
    start = "<|start|>user\nThe sky is<|end|>\n<|start|>assistant\n"
    assert texts(data) == [(start, " blue.<eos>"), (start, " green.<eos>")]


def test_labeled_rows_have_labels_and_responses_to_other_prompts(tmp_path, model):
    rows = [
        dict(prompt="a", completion="1", label=True),
        dict(prompt="a", completion="22", label=False),
        dict(prompt="b", completion=[said("333")], label=1),
        dict(prompt="c", completion="", label=0),
    ]
    data = load(tmp_path, model, *rows, rows="labels", mismatched=True)
    assert data.num_rows == 4 and data.columns == {"labels": [1.0, 0.0, 1.0, 0.0]}
    assert data.mismatched_responses == [2, 2, 3, 0], "the next row with another prompt"
    block, tokenizer = data.block(), byte_tokenizer()
    assert [tokenizer.decode(block.response(row)) for row in range(4, 8)] == ["333<eos>", "333<eos>", "<eos>", "1<eos>"]
    assert [tokenizer.decode(block.prompt(row))[14:15] for row in range(4, 8)] == ["a", "a", "b", "c"]
    np.testing.assert_array_equal(block.columns["labels"][: 2 + 3], [1, 1, 0, 0, 0])
    assert len(block.columns["labels"]) == block.sampled_lengths.sum()


def test_a_reward_model_reads_the_conversation_that_a_served_reward_model_reads(tmp_path, model):
    """The last token before the end mark is the last token of the conversation."""
    row = dict(prompt=PROMPT, chosen="4", rejected="It is 5.", margin=0.5)
    data = load(tmp_path, model, row, for_reward_model=True)
    reward = RewardModel(url="http://127.0.0.1:1", tokenizer=str(model))
    for index, text in enumerate(("4", "It is 5.")):
        tokens = data.prompts[index] + data.responses[index]
        assert tokens[:-1] == reward.encode(Response("s", text, "", prompt=PROMPT))
    assert data.prompts[0] == data.prompts[1] and data.responses[0][0] != data.responses[1][0]
    assert [sum(mask) for mask in data.loss_masks] == [1, 1] and all(mask[-1] for mask in data.loss_masks)
    block = data.block()
    np.testing.assert_array_equal(block.columns["margins"], [0.5, 0.5])
    np.testing.assert_array_equal(block.sampled_index, block.cu_seqlens[1:] - 1)


def test_equal_conversations_have_only_the_end_mark_as_response(tmp_path, model):
    data = load(tmp_path, model, dict(prompt=PROMPT, chosen="4", rejected="4"), for_reward_model=True)
    assert [len(response) for response in data.responses] == [1, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (dict(prompt=PROMPT, chosen="4"), "column 'rejected': is missing"),
        (dict(prompt=PROMPT, rejected="4"), "column 'chosen': is missing"),
        (dict(chosen="4", rejected=[said("5")]), "column 'rejected': expected the same form"),
        (dict(prompt=PROMPT, chosen=4, rejected=5), "column 'chosen': expected a text"),
        (dict(chosen=4, rejected=5), "column 'chosen': expected a text"),
        (dict(prompt=3, chosen="4", rejected="5"), "column 'prompt': expected a text"),
        (
            dict(chosen="4", rejected="5"),
            "column 'prompt': is missing, and chosen and rejected have no common beginning",
        ),
        (
            dict(chosen=[said("4")], rejected=[said("5")]),
            "column 'prompt': is missing, and chosen and rejected have no",
        ),
        (dict(chosen=[], rejected=[]), "column 'prompt': is missing, and chosen and rejected have no"),
        (dict(prompt=PROMPT, chosen="4", rejected="5", margin="big"), "column 'margin': expected a finite number"),
        (dict(prompt=PROMPT, chosen="4", rejected="5", margin=True), "column 'margin': expected a finite number"),
    ],
)
def test_a_wrong_pair_is_refused_with_the_reason(tmp_path, model, row, message):
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 1, {message}"):
        load(tmp_path, model, dict(prompt=PROMPT, chosen="4", rejected="5"), row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (dict(prompt="a", completion="1"), "column 'label': is missing"),
        (dict(prompt="a", completion="1", label="good"), r"column 'label': expected true \(good\) or false \(bad\)"),
        (dict(prompt="a", completion="1", label=0.5), r"column 'label': expected true \(good\) or false \(bad\)"),
        (dict(prompt="a", label=True), "column 'completion': is missing"),
    ],
)
def test_a_wrong_labeled_row_is_refused_with_the_reason(tmp_path, model, row, message):
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 0, {message}"):
        load(tmp_path, model, row, rows="labels")


def test_a_sequence_that_exceeds_the_context_is_refused(tmp_path, model):
    path = written(tmp_path, [dict(prompt="a", chosen="1", rejected="2" * 30)])
    with pytest.raises(ValueError, match=r"rows.jsonl, row 0: prompt and response have 51 tokens, more than the 50"):
        load_preferences(path, model, 50, labeled=False, for_reward_model=False)
    assert load_preferences(path, model, 51, labeled=False, for_reward_model=False).num_rows == 1


def test_kto_needs_rows_with_different_prompts(tmp_path, model):
    rows = [dict(prompt="a", completion=str(n), label=True) for n in range(3)]
    with pytest.raises(ValueError, match=r"all rows have the same prompt.*its KL term"):
        load(tmp_path, model, *rows, rows="labels", mismatched=True)
