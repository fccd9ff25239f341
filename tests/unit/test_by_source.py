"""BySource scores each response with the reward of its data source, as if each reward had been called on its own rows."""

import json
import os
import re
import threading
from dataclasses import dataclass
from typing import ClassVar

import pytest

from mrl.algorithms.filters import NonzeroVariance
from mrl.config.instantiate import instantiate_callable
from mrl.config.schema import ScoringConfig
from mrl.controller.plan_train import check_filter_metric
from mrl.controller.rehearsal import rehearse_reward
from mrl.rewards.by_source import BySource
from mrl.rewards.code_execution import CodeExecution
from mrl.rewards.reward_types import Response, Score, Weighted, single_rewards, unscored_reason
from mrl.rewards.rule_based import GSM8K, ExactMatch, MathVerify, MultipleChoice, Overlong
from mrl.rewards.scorer import Scorer, check_reward


@dataclass(frozen=True)
class Constant:
    """Gives every response the same score."""

    in_process: ClassVar[bool] = True
    value: float = 1.0

    def __call__(self, responses):
        return [self.value] * len(responses)


def of_sources(*sources: str, **fields) -> list[Response]:
    return [Response(source, "text", "truth", **fields) for source in sources]


def values(reward, responses) -> list[float | None]:
    return [None if score.failure else score.value for score in Scorer(reward)(responses)]


def test_the_first_pattern_that_matches_counts():
    rewards = {"openai/gsm8k": Constant(1), "math_hard": Constant(2), "math_*": Constant(3), "?at[ab]": Constant(4)}
    sources = of_sources(
        "openai/gsm8k", "math_easy", "math_hard", "cata", "catc", "Math_easy", "openai/gsm8k2", "math_"
    )
    assert values(BySource(rewards), sources) == [1, 3, 2, 4, None, None, None, 3]
    reverse = dict(reversed(rewards.items()))
    assert values(BySource(reverse, default=Constant(9)), sources) == [1, 3, 3, 4, 9, 9, 9, 3]


def test_a_name_with_the_characters_of_a_wildcard_matches_itself():
    assert values(BySource({"set[1]": Constant(1)}), of_sources("set[1]", "set1")) == [1, 1]


def test_a_node_matches_source_ability_and_style():
    reward = BySource(
        {
            "judged": {"style": "model", "reward": Constant(1)},
            "code": {"source": ["apps", "taco*"], "ability": "co*", "reward": Constant(2)},
            "rest": {"ability": ["math", "code"], "reward": Constant(3)},
        },
        default=Constant(4),
    )
    responses = [
        *of_sources("apps", ability="code", style="model"),
        *of_sources("apps", "taco_hard", "other", ability="code", style="rule"),
        *of_sources("apps", ability="math"),
        *of_sources("apps"),
    ]
    assert values(reward, responses) == [1, 2, 2, 3, 3, 4]


def test_a_response_that_no_pattern_matches_fails_and_names_the_patterns():
    reward = BySource({"gsm8k": GSM8K(), "code": {"source": ["apps", "taco"], "style": "rule", "reward": ExactMatch()}})
    (score,) = Scorer(reward)(of_sources("aime", ability="math"))
    assert score.failure == (
        "no pattern of the reward matches data_source 'aime', ability 'math'; the patterns are gsm8k, code (source apps|taco, "
        "style rule). Add a pattern to rewards, or set default."
    )
    nested = Weighted({"right": reward, "short": Overlong(10, 5)})
    (probe,) = of_sources("aime")
    assert "data_source 'aime'" in unscored_reason(nested, probe)
    assert unscored_reason(nested, of_sources("gsm8k")[0]) == "" == unscored_reason(GSM8K(), probe)
    (failed,) = Scorer(nested)([probe])
    assert failed.failure.startswith("right: no pattern") and failed.parts == {"short": 0.0}


@dataclass(frozen=True)
class Fragile:
    """A reward in a worker process. The text `die` ends this process."""

    per_sample: ClassVar[bool] = True

    def __call__(self, responses):
        for response in responses:
            if response.text == "die":
                os._exit(7)
        return [len(response.text) / 10 for response in responses]


@dataclass(frozen=True)
class BestOfGroup:
    """Scores the longest response of each group with 1. Groups have three responses; raises if it gets only a part of one."""

    whole_groups: ClassVar[bool] = True

    def __call__(self, responses):
        texts: dict[int, list[str]] = {}
        for response in responses:
            texts.setdefault(response.group, []).append(response.text)
        if any(len(group) != 3 for group in texts.values()):
            raise AssertionError("a part of a group")
        return [float(len(r.text) == max(map(len, texts[r.group]))) for r in responses]


DOUBLE = json.dumps({"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"]})
INNER = {
    "gsm8k": GSM8K(),
    "math": MathVerify(),
    "code": CodeExecution(partial=True),
    "fragile": Fragile(),
    "longest": BestOfGroup(),
    "sum": Weighted({"exact": ExactMatch(), "overlong": Overlong(10, 5)}, {"exact": 1.0, "overlong": 0.5}),
}
ROWS = {
    "gsm8k": [("#### 4", "4"), ("4", "4"), ("#### 5", "4")],
    "math": [(r"\boxed{1/2}", "0.5"), (r"\boxed{2}", "0.5"), ("so 0.5", "0.5")],
    "code": [(f"```python\n{code}\n```", DOUBLE) for code in ("print(2 * int(input()))", "print(2)", "1 / 0")],
    "fragile": [("abcde", ""), ("die", ""), ("abc", "")],
    "longest": [("a", ""), ("abc", ""), ("ab", "")],
    "sum": [("a", "a"), ("b", "a"), ("a", "a")],
}


@pytest.mark.extended
def test_the_scores_are_those_of_each_reward_on_its_own_rows():
    """One batch has rewards in this process, in worker processes and in the sandbox, whole groups, a sum, and a crash."""
    responses = [
        Response(source, *ROWS[source][member], group=group, num_tokens=4 + 3 * member)
        for member in range(3)  # neither the responses of a group nor those of a source are adjacent
        for group, source in enumerate(ROWS)
    ]
    with Scorer(BySource(INNER), workers=2, sample_timeout_s=20) as scorer:
        found = scorer(responses)
    for source, reward in INNER.items():
        of_source = [index for index, response in enumerate(responses) if response.data_source == source]
        with Scorer(reward, workers=1, sample_timeout_s=20) as scorer:
            alone = scorer([responses[index] for index in of_source])
        for index, score in zip(of_source, alone, strict=True):
            got = found[index]
            assert (got.value, got.failure, got.parts) == (score.value, score.failure, score.parts), source
            assert got.gdpo_parts == (score.gdpo_parts or {"reward": score.value}), source
    by_source = {
        source: [score for score, r in zip(found, responses, strict=True) if r.data_source == source] for source in ROWS
    }
    assert [score.value for score in by_source["code"]] == [1.0, 0.5, 0.0]
    assert [bool(score.failure) for score in by_source["fragile"]] == [False, True, False]
    assert [score.value for score in by_source["longest"]] == [0.0, 1.0, 0.0]
    assert sum(score.failure is not None for score in found) == 1


@dataclass(frozen=True)
class Meets:
    """Waits until two rewards are called at the same time, or fails after 10 s."""

    in_process: ClassVar[bool] = True
    barrier: threading.Barrier

    def __call__(self, responses):
        self.barrier.wait(10)
        return [1.0] * len(responses)


@pytest.mark.parametrize("combine", [lambda a, b: BySource({"a": a, "b": b}), lambda a, b: Weighted({"a": a, "b": b})])
def test_inner_rewards_are_called_at_the_same_time(combine):
    barrier = threading.Barrier(2)
    scores = Scorer(combine(Meets(barrier), Meets(barrier)))(of_sources("a", "b"))
    assert [score.failure for score in scores] == [None, None]


def test_sums_of_sources_and_sources_of_sums_may_be_nested():
    inner = BySource({"a": Constant(1), "b": Weighted({"x": Constant(2), "y": Constant(3)})})
    reward = Weighted({"task": inner, "extra": Constant(10)}, {"task": 1.0, "extra": 0.1})
    check_reward(reward)
    a, b = Scorer(reward)(of_sources("a", "b"))
    assert (a.value, b.value) == (2.0, 6.0) and a.gdpo_parts == {"task": 1.0, "extra": 10.0}
    assert a.parts == {"task": 1.0, "extra": 10.0}
    assert b.parts == {"task": 5.0, "task_x": 2.0, "task_y": 3.0, "extra": 10.0}
    outer = BySource({"b": reward}, default=Constant(7))
    assert values(outer, of_sources("b", "c")) == [6.0, 7.0]
    assert [score.value for score in outer(of_sources("b", "c"))] == [6.0, 7.0], "also without a Scorer"
    probe = of_sources("b")[0]
    assert list(single_rewards(outer, probe)) == [Constant(2), Constant(3), Constant(10)]
    assert len(list(single_rewards(outer))) == 5


def test_every_response_has_the_parts_that_gdpo_normalizes():
    reward = BySource({"sum": Weighted({"right": Constant(1), "short": Constant(2)}), "plain": Constant(5)})
    both = Scorer(reward)(of_sources("sum", "plain"))
    assert [score.gdpo_parts for score in both] == [{"right": 1.0, "short": 2.0}, {"reward": 5.0}]
    assert reward.gdpo_part_names == {"right", "short", "reward"}


def test_turn_values_pass_through():
    class PerTurn:
        in_process = True

        def __call__(self, responses):
            return [Score.of_turns((2.0,)) for _ in responses]

    (score,) = Scorer(BySource({"a": PerTurn()}))(of_sources("a"))
    assert score.turn_values == (2.0,) and score.value == 2.0


def test_a_filter_that_names_a_part_needs_it_in_every_sum():
    right, other = Weighted({"right": ExactMatch()}), Weighted({"correct": ExactMatch()})
    check_filter_metric(NonzeroVariance(metric="right"), BySource({"a": right, "b": GSM8K()}))
    with pytest.raises(ValueError, match=r"metric=right: .*; in rewards.b, its parts are correct"):
        check_filter_metric(NonzeroVariance(metric="right"), BySource({"a": right, "b": other}))


GSM8K_NODE = {"_target_": "mrl.rewards.rule_based.GSM8K"}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({}, "rewards is empty"),
        (
            {"a": "mrl.rewards.rule_based.GSM8K"},
            "rewards.a: expected a reward (a node with _target_), or a node with the keys",
        ),
        (
            {"a": {"source": "x", "reward": None}},
            "rewards.a.reward: expected a reward (a node with _target_), got None",
        ),
        ({"a": {"sorce": "x", "reward": GSM8K_NODE}}, "rewards.a.sorce: unknown key; did you mean 'source'?"),
        ({"a": {"reward": GSM8K_NODE}}, "rewards.a: give patterns under source, ability, style"),
        ({"a": {"ability": [], "reward": GSM8K_NODE}}, "rewards.a.ability=[]: expected a pattern"),
        ({"a": {"source": 3, "reward": GSM8K_NODE}}, "rewards.a.source=3: expected a pattern"),
        ({"a": GSM8K_NODE | {"strikt": 1}}, "reward.rewards.a.strikt: mrl.rewards.rule_based.GSM8K has no argument"),
        (
            {"a": {"source": "x", "reward": {"_target_": "mrl.Nope"}}},
            "reward.rewards.a.reward._target_=mrl.Nope: cannot be",
        ),
    ],
)
def test_a_mistake_in_an_entry_names_its_key(rewards, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        instantiate_callable({"_target_": "mrl.rewards.by_source.BySource", "rewards": rewards}, "reward")


def test_a_default_that_is_no_reward_is_refused():
    with pytest.raises(ValueError, match="default: expected a reward"):
        BySource({"a": GSM8K()}, default="GSM8K")  # type: ignore[arg-type]


def test_the_rehearsal_calls_each_reward_with_rows_of_its_source():
    """MultipleChoice raises if the ground truth is test cases of code. The reward `absent` has no rows and is not called."""
    rewards = {"letters": MultipleChoice(), "code": CodeExecution(), "absent": Fragile()}
    responses = [Response("letters", "B", "B"), Response("code", "no program", DOUBLE, group=1)]
    rehearse_reward(BySource(rewards), responses, ScoringConfig())
    with pytest.raises(ValueError, match=r"^reward\.rewards\.code: .*ground truth"):
        rehearse_reward(BySource({"letters": GSM8K(), "code": MultipleChoice()}), responses, ScoringConfig())
