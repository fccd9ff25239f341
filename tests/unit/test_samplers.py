"""Samplers: the default order stays the same, curricula and mixtures follow difficulty, and positions resume exactly."""

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.data.columns import PromptExample
from mrl.data.prompts import PromptDrawing, PromptStream
from mrl.data.samplers import (
    WINDOW,
    ByDifficulty,
    Curriculum,
    DifficultyMixture,
    MixtureSource,
    PromptHistory,
    SamplerInputs,
    Shuffled,
    apportion,
)


def example(level, source="a") -> PromptExample:
    rate = level if isinstance(level, str) else level / 10
    return PromptExample([{"role": "user", "content": "?"}], "1", source, {"level": level, "deep": {"rate": rate}})


def stream(sampler=None, *, sizes=(10, 4), weights=None, levels=None, seed=3, group_sizes=None, shuffle=True):
    weights = weights or [1.0] * len(sizes)
    sources = [
        MixtureSource(chr(97 + i), rows, weight) for i, (rows, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    levels = range(sum(sizes)) if levels is None else levels
    rules = PromptDrawing(sampler, "own" if sampler else "", group_sizes)
    examples = [example(level) for level in levels]
    return PromptStream(sum(sizes), 4, seed, shuffle, sources, "data", rules=rules, examples=examples)


def train(prompts, steps, count=6, reward_of=lambda row: row % 3 / 2):
    """Draw rows and record their rewards, as a run does. Returns all drawn rows."""
    drawn = []
    for _ in range(steps):
        rows = prompts.take(count).tolist()
        prompts.record_rewards([(row, reward_of(row)) for row in rows])
        drawn += rows
    return drawn


# The rows that the stream drew before samplers existed.
BEFORE = {
    True: [9, 12, 6, 0, 2, 10, 1, 4, 11, 7, 5, 3, 13, 8, 4, 10, 1, 2, 8, 12],
    False: [0, 10, 1, 2, 3, 11, 4, 5, 12, 6, 7, 8, 13, 9, 0, 10, 1, 2, 3, 11],
}


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_default_sampler_draws_the_same_rows_as_before(shuffle):
    assert stream(weights=[2.5, 1.0], shuffle=shuffle).take(20).tolist() == BEFORE[shuffle]
    assert stream(Shuffled(shuffle), weights=[2.5, 1.0]).take(20).tolist() == BEFORE[shuffle]


def test_a_curriculum_passes_over_the_easy_rows_first_and_over_all_rows_at_last():
    levels = np.random.default_rng(0).permutation(14)
    rows = stream(Curriculum("level", stages=2, epochs_per_stage=2), levels=levels.tolist()).take(28 + 14)
    drawn = levels[rows]
    easy, hard, everything = drawn[:14], drawn[14:28], drawn[28:]
    assert sorted(easy) == sorted([*range(7)] * 2) and sorted(hard) == sorted([*range(7, 14)] * 2)
    assert sorted(everything) == list(range(14))
    assert easy[:7].tolist() != easy[7:].tolist(), "each pass has a new order"


def test_a_curriculum_can_begin_with_the_largest_value_of_a_field_inside_a_field():
    drawn = stream(Curriculum("deep.rate", stages=7, descending=True)).take(14)
    assert [sorted(drawn[i : i + 2].tolist()) for i in range(0, 14, 2)] == [[i, i + 1] for i in range(12, -1, -2)]


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        (Curriculum("hardness"), {}, "row 0 of the training prompts has no hardness in extra_info; name the column"),
        (Curriculum("level"), dict(levels=[*range(13), "hard"]), "the column level.*only finite numbers or only texts"),
        (Curriculum("level"), dict(weights=[2.0, 1.0]), "remove the weights in data.mixture"),
        (Curriculum("level", stages=15), {}, "stages=15: the training data has only 14 rows"),
        (lambda inputs: [0, 1], {}, r"data.sampler returned \[0, 1\]; expected the indices of 4 rows"),
        (
            lambda inputs: [0, 1, 2, 14],
            {},
            "data.sampler returned rows from 0 to 14; the training data has the rows 0 to 13",
        ),
        (lambda inputs: inputs.state.update(x=(1, 2)) or [0] * 4, {}, "inputs.state must hold JSON only.*(1, 2)"),
        (lambda inputs: inputs.state.update(x=float("nan")) or [0] * 4, {}, "inputs.state must hold JSON only.*nan"),
    ],
)
def test_a_sampler_that_cannot_be_used_is_refused(sampler, options, message):
    with pytest.raises(ValueError, match=message):
        stream(sampler, **options).take(4)


def test_a_mixture_prefers_the_source_of_medium_difficulty():
    prompts = stream(DifficultyMixture(floor=0.1), sizes=(40, 40, 40))
    assert DifficultyMixture().probabilities(inputs_of(prompts)) == pytest.approx([1 / 3] * 3)
    train(prompts, 20, reward_of=lambda row: [0.0, 0.5, 1.0][row // 40])
    expected = np.array([0.1, 1.0, 0.1]) / 1.2
    assert DifficultyMixture(floor=0.1).probabilities(inputs_of(prompts)) == pytest.approx(expected)
    counts = np.bincount(prompts.take(600) // 40, minlength=3) / 600
    assert counts == pytest.approx(expected, abs=0.05)


def inputs_of(prompts) -> SamplerInputs:
    return SamplerInputs(prompts._table, 1, 0, prompts.drawn, prompts._history, {})


def test_a_mixture_uses_recent_rewards_and_the_weights_of_the_config():
    prompts = stream(DifficultyMixture(), sizes=(8, 8), weights=[3.0, 1.0])
    prompts.record_rewards([(row, 0.5) for row in range(16)])
    prompts.record_rewards([(0, 1.0)] * 20)
    assert DifficultyMixture(window=1, floor=0.2).probabilities(inputs_of(prompts)) == pytest.approx(
        [0.375, 0.625], abs=0.02
    )


def own_sampler(inputs: SamplerInputs, factor: int = 1):
    """A user's sampler, which prefers rows with few draws and low rewards, and counts its calls."""
    inputs.state["calls"] = inputs.state.get("calls", 0) + factor
    history = inputs.history
    score = history.times_drawn + np.nan_to_num(history.mean_reward) + inputs.rng.random(inputs.prompts.num_rows) / 9
    return np.argsort(score)[: inputs.count]


SAMPLERS = [Shuffled(), Curriculum("level"), DifficultyMixture(), partial(own_sampler, factor=2)]


@pytest.mark.extended
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SAMPLERS), st.integers(0, 12), st.integers(1, 8), st.integers(1, 9))
def test_a_restored_stream_draws_the_same_rows_and_has_the_same_state(sampler, before, after, count):
    whole = stream(sampler)
    expected = train(whole, before + after, count)
    first, second = stream(sampler), stream(sampler)
    drawn = train(first, before, count)
    state = json.dumps(first.state_dict())
    train(second, 2, 5)  # moves it to another position
    second.load_state_dict(json.loads(state))
    assert json.dumps(second.state_dict()) == state
    assert drawn + train(second, after, count) == expected
    assert json.dumps(second.state_dict()) == json.dumps(whole.state_dict())


def test_a_position_is_refused_by_a_stream_with_another_sampler():
    plain, curriculum = stream(), stream(Curriculum("level"))
    assert "sampler" not in plain.state_dict() and "history" not in plain.state_dict()
    with pytest.raises(ValueError, match="sampler was '', and is now 'own'"):
        curriculum.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="sampler was 'own', and is now ''"):
        plain.load_state_dict(curriculum.state_dict())


def test_a_mixture_chooses_the_same_rows_in_one_call_or_in_several():
    one, several = stream(DifficultyMixture()), stream(DifficultyMixture())
    assert one.take(9).tolist() == [*several.take(4).tolist(), *several.take(5).tolist()]


def test_the_mean_reward_of_a_row_follows_its_last_groups():
    history = PromptHistory(2)
    for reward in (1.0, 0.0, 0.0, 1.0):
        history.record_rewards([(1, reward)])
    assert history.mean_reward[1] == pytest.approx(0.5) and np.isnan(history.mean_reward[0])
    history.record_rewards([(1, 1.0)])
    assert history.mean_reward[1] == pytest.approx(0.5 + 0.5 / WINDOW)
    assert history.latest_rewards(range(2), 5).tolist() == [history.mean_reward[1]]


@settings(max_examples=200)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 12), st.integers(0, 12))
def test_all_responses_are_shared_out_within_the_limits(weights, least, above_least, above_mean):
    size, most = least + above_least, least + above_least + above_mean
    sizes = apportion(size * len(weights), np.array(weights), least, most)
    assert sizes.sum() == size * len(weights) and sizes.min() >= least and sizes.max() <= most


def test_prompts_of_medium_difficulty_get_more_responses():
    prompts = stream(group_sizes=ByDifficulty(least=2, most=20), sizes=(4,))
    rows = np.arange(4)
    assert prompts.group_sizes(rows, 8) == [8, 8, 8, 8], "without rewards, all prompts are alike"
    prompts.record_rewards([(0, 0.0), (1, 1.0), (2, 0.5), (3, 0.1)])
    # p (1 - p) is 0, 0, 0.25 and 0.09. Each prompt gets two responses, and the other 24 are divided into 17.6 and 6.4.
    assert prompts.group_sizes(rows, 8) == [2, 2, 20, 8]
    by_column = stream(
        group_sizes=ByDifficulty(least=1, most=40, column="deep.rate"), sizes=(4,), levels=[0, 5, 10, 10]
    )
    assert by_column.group_sizes(rows, 4) == [1, 13, 1, 1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda inputs: [4, 4], "expected 3 whole numbers"),
        (lambda inputs: [0, 6, 6], "returned sizes from 0 to 6; expected 1 to 32 responses"),
        (lambda inputs: [4, 4, 5], "returned 13 responses for 3 prompts; expected 12"),
        (ByDifficulty(least=5), "least=5, most=32, but rollout.responses_per_prompt=4"),
    ],
)
def test_group_sizes_that_cannot_be_used_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        stream(group_sizes=function).group_sizes(np.arange(3), 4)


def test_texts_are_no_pass_rates():
    prompts = stream(group_sizes=ByDifficulty(column="level"), sizes=(3,), levels=["easy", "hard", "easy"])
    with pytest.raises(ValueError, match=r"rollout\.group_sizes\.column=level: the column contains texts"):
        prompts.group_sizes(np.arange(3), 4)
