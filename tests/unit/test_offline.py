"""Offline rows: what a file may hold, which rows a step trains, and rows that cannot be trained."""

import json
from itertools import pairwise

import numpy as np
import pytest

from mrl.config.data_schema import OfflineConfig
from mrl.data.offline import OfflineRows, TokenLimits, check_groups
from mrl.data.tokenizer import character_tokenizer


def count_rows(groups) -> int:
    return sum(map(len, groups))


LIMITS = TokenLimits(prompt=12, response=4, vocabulary=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def load(model, tmp_path):
    def load(rows, limits=LIMITS, *, seed=0, system=None, **keys) -> OfflineRows:
        path = tmp_path / "offline.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return OfflineRows.load(OfflineConfig(str(path), **keys), model, limits, seed=seed, system=system)

    return load


def row(prompt="1+1=", response="2", reward=1.0, **more):
    return dict(prompt=prompt, response=response, reward=reward, **more)


def test_rows_with_the_same_prompt_are_a_group(load):
    rows = load([row(), row("2+2=", "4"), row(response="3", reward=0), row("2+2=", [8, 2], logprobs=[-0.5, -1])])
    first, second = rows.groups
    assert [each.number for each in first] == [0, 2] and [each.number for each in second] == [1, 3]
    assert [each.reward for each in first] == [1.0, 0.0] and first[0].prompt == first[1].prompt
    text, ids = second
    assert text.response == [character_tokenizer().convert_tokens_to_ids("4"), character_tokenizer().eos_token_id]
    assert ids.response == [8, 2] and ids.logprobs == [-0.5, -1.0] and text.logprobs is None
    assert not rows.has_all_logprobs and load([row(response=[5], logprobs=[-1.5])]).has_all_logprobs
    assert rows.fingerprint != load([row()]).fingerprint


def test_a_file_of_demonstrations_needs_no_rewards(load):
    demonstration = dict(prompt="1+1=", response="2")
    assert load([demonstration], advantage=1.0).groups[0][0].reward == 0.0
    with pytest.raises(ValueError, match="column 'reward': is missing"):
        load([demonstration])


def test_each_pass_has_a_new_order_and_a_step_has_only_whole_groups(load):
    sizes = {n: 1 + n % 3 for n in range(10)}
    rows = load([row(f"{n}=") for n, size in sizes.items() for _ in range(size)], rows_per_step=4)
    steps = [rows.of_step(step) for step in range(40)]
    assert all(1 <= count_rows(groups) <= 4 for groups in steps)
    for now, then in pairwise(steps):
        assert count_rows(now) + len(then[0]) > 4, "a step takes as many groups as fit"
    drawn = [group[0].number for groups in steps for group in groups]
    passes = [drawn[start : start + 10] for start in range(0, len(drawn) - 10, 10)]
    assert all(sorted(numbers) == sorted(passes[0]) and len(set(numbers)) == 10 for numbers in passes)
    assert len(set(map(tuple, passes))) == len(passes)


def test_the_rows_of_a_step_depend_only_on_the_seed_and_on_the_step(load):
    content = [row(f"{n}=") for n in range(9)]
    one, other = load(content, rows_per_step=2), load(content, rows_per_step=2)
    late = [one.of_step(step) for step in (70, 3, 0)]
    assert (
        late
        == [other.of_step(step) for step in (70, 3, 0)]
        == [load(content, rows_per_step=2).of_step(s) for s in (70, 3, 0)]
    )
    assert [load(content, rows_per_step=2, seed=1).of_step(step) for step in range(9)] != [
        one.of_step(s) for s in range(9)
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(response="")], "column 'response': expected a text or a list of token ids, got ''"),
        ([row(response=[1, -2])], r"column 'response': .* got \[1, -2\]"),
        ([row(reward="good")], "column 'reward': expected a finite number, got 'good'"),
        ([row(reward=True)], "column 'reward': expected a finite number, got True"),
        (
            [row(), row(response=[5], logprobs=[0.3])],
            "row 1, column 'logprobs': expected a list of numbers that are 0 or less",
        ),
        (
            [row(logprobs=[-1.0])],
            "logprobs has 1 values for the 2 tokens of the response, the end-of-sequence token included",
        ),
        ([row(response=[40])], "row 0: token 40 is outside the vocabulary of the model, which ends at 31"),
        ([row(response="12345")], "the response has 6 tokens, more than the 4 of rollout.max_response_tokens"),
        ([row("1" * 30)], "the prompt has .* more than the 12 of data.max_prompt_tokens"),
        ([row()] * 9, "data.offline.rows_per_step=8: 9 rows of .* have the prompt of row 0"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused(load, rows, message):
    with pytest.raises(ValueError, match=message):
        load(rows)


def test_rows_without_another_response_to_their_prompt_are_refused_if_advantages_compare_responses(load):
    singles, mixed = load([row(f"{n}=") for n in range(3)]), load([row(), row(), row("2=")])
    assert check_groups(mixed, True, "GRPO").startswith("data.offline.path: 1 of 2 prompts have only one row, and GRPO")
    assert check_groups(singles, False, "GAE") == "" == check_groups(load([row()], advantage=1.0), True, "GRPO")
    with pytest.raises(ValueError, match=r"3 of 3 prompts have only one row.*set data.offline.advantage"):
        check_groups(singles, True, "GRPO")


def test_a_system_message_is_part_of_the_prompt(load):
    plain, with_system = load([row()]), load([row()], TokenLimits(99, 4, 32), system="1")
    assert len(with_system.groups[0][0].prompt) > len(plain.groups[0][0].prompt)
    assert np.isfinite(plain.groups[0][0].reward)
