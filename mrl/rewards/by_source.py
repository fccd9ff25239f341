"""BySource: a reward that scores each response with the reward of its data source."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from mrl.rewards.reward_types import CombinedReward, Response, Reward, Score

ATTRIBUTES = {"source": "data_source", "ability": "ability", "style": "style"}
"""Key of a route in the config -> attribute of a response, which is compared with the patterns of this key."""
WHOLE_REWARD_PART = "reward"
"""Name of the single GDPO part (Score.gdpo_parts) of a reward that is no weighted sum."""


@dataclass(frozen=True)
class Route:
    """An inner reward and the patterns of the responses that it scores."""

    name: str  # key in BySource.rewards
    key: str  # config key of the reward, below the key of BySource
    reward: Reward
    # Key in ATTRIBUTES -> patterns. A response matches if, for every key, at least one pattern matches the attribute.
    patterns: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, name: str, node: Any) -> "Route":
        """Return the route of an entry of BySource.rewards. Raises ValueError if the entry is invalid."""
        if callable(node):
            return cls(name, f"rewards.{name}", node, {"source": (name,)})
        if not isinstance(node, Mapping):
            raise ValueError(
                f"rewards.{name}: expected a reward (a node with _target_), or a node with the keys "
                f"{', '.join(ATTRIBUTES)} and reward, got {node!r:.80}."
            )
        for unknown in node.keys() - {*ATTRIBUTES, "reward"}:
            near = difflib.get_close_matches(unknown, [*ATTRIBUTES, "reward", "_target_"], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(ATTRIBUTES)} or reward."
            raise ValueError(f"rewards.{name}.{unknown}: unknown key; {hint}")
        if not callable(reward := node.get("reward")):
            raise ValueError(f"rewards.{name}.reward: expected a reward (a node with _target_), got {reward!r:.80}.")
        patterns = {key: _patterns(node[key], f"rewards.{name}.{key}") for key in ATTRIBUTES if key in node}
        if not patterns:
            raise ValueError(
                f"rewards.{name}: give patterns under {', '.join(ATTRIBUTES)}. `default` is the reward of all responses that no "
                "pattern matches."
            )
        return cls(name, f"rewards.{name}.reward", reward, patterns)

    def matches(self, response: Response) -> bool:
        """Return whether the patterns match a response. The reward of the first route that matches scores the response."""
        values = {key: getattr(response, ATTRIBUTES[key]) for key in self.patterns}
        return all(
            any(values[key] == pattern or fnmatchcase(values[key], pattern) for pattern in patterns)
            for key, patterns in self.patterns.items()
        )

    def __str__(self) -> str:
        texts = {key: "|".join(patterns) for key, patterns in self.patterns.items()}
        if self.patterns == {"source": (self.name,)}:
            return self.name
        return f"{self.name} ({', '.join(f'{key} {text}' for key, text in texts.items())})"


def _patterns(value: Any, key: str) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise ValueError(f"{key}={value!r}: expected a pattern, such as math_*, or a list of patterns.")
    return tuple(patterns)


@dataclass(frozen=True)
class BySource(CombinedReward):
    """Scores each response with the reward of its data source.

    `rewards` maps patterns of `data_source` to rewards. A pattern is an exact name, such as openai/gsm8k, or contains the
    wildcards `*`, `?` and `[...]`, as in math_*. Matching is case-sensitive. If several patterns match, the first one in the
    order of the config counts.

    An entry may also have the form `{source, ability, style, reward}`, with at least one of the keys source, ability and style.
    The key of the entry is then only a name. Each of the three values is a pattern or a list of patterns, and every value that is
    given must match.

    `default` scores the responses that no pattern matches. Without `default`, such a response has a failed score, and a run
    whose data has such a row does not start.

    A score keeps the parts that the inner reward returned. If the inner reward is a weighted sum, Score.gdpo_parts has the
    parts of the sum; otherwise it has a single part with the name `reward`.

    Raises ValueError if `rewards` is empty or an entry is invalid.
    """

    rewards: Mapping[str, Any]
    default: Reward | None = None

    def __post_init__(self) -> None:
        if not self.rewards:
            raise ValueError(
                "rewards is empty; give at least one reward, in the form rewards: {PATTERN: {_target_: ...}}."
            )
        if self.default is not None and not callable(self.default):
            raise ValueError(f"default: expected a reward (a node with _target_), got {self.default!r:.80}.")
        assert self.routes, "each entry gives a route"  # building the routes raises ValueError for an invalid entry

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The routes, in the order of the config."""
        return tuple(Route.of(name, node) for name, node in self.rewards.items())

    @cached_property
    def inner_rewards(self) -> dict[str, Reward]:
        """Config key of each inner reward -> the inner reward. If `default` is set, it comes last."""
        routed = {route.key: route.reward for route in self.routes}
        return routed | ({} if self.default is None else {"default": self.default})

    @property
    def gdpo_part_names(self) -> frozenset[str]:
        """Names of the `gdpo_parts` of all inner rewards."""
        names = [
            each.gdpo_part_names if isinstance(each, CombinedReward) else {WHOLE_REWARD_PART}
            for each in self.inner_rewards.values()
        ]
        return frozenset().union(*names)

    def missing_part_reason(self, name: str) -> str:
        """Return which inner reward is a weighted sum without a part called `name`, or "" if there is no such reward."""
        combined = {key: each for key, each in self.inner_rewards.items() if isinstance(each, CombinedReward)}
        reasons = {key: each.missing_part_reason(name) for key, each in combined.items()}
        return next((f"in {key}, {reason}" for key, reason in reasons.items() if reason), "")

    def assign(self, responses: Sequence[Response]) -> dict[str, list[int]]:
        """Assign each response to the first reward whose patterns match the response, or else to `default`."""
        keys: dict[tuple[str, str, str], str | None] = {}  # attributes of a response -> key of its reward
        assigned: dict[str, list[int]] = {key: [] for key in self.inner_rewards}
        for index, response in enumerate(responses):
            attributes = (response.data_source, response.ability, response.style)
            if attributes not in keys:
                keys[attributes] = self._key(response)
            if (key := keys[attributes]) is not None:
                assigned[key].append(index)
        return assigned

    def _key(self, response: Response) -> str | None:
        """Return the key of the reward that scores a response; None if there is none."""
        default = None if self.default is None else "default"
        return next((route.key for route in self.routes if route.matches(response)), default)

    def unscored_reason(self, response: Response) -> str:
        """Return a message that lists all patterns, or "" if a pattern matches the response or `default` is set."""
        if self._key(response) is not None:
            return ""
        further = {"ability": response.ability, "style": response.style}
        shown = "".join(f", {name} {value!r}" for name, value in further.items() if value)
        return (
            f"no pattern of the reward matches data_source {response.data_source!r}{shown}; the patterns are "
            f"{', '.join(map(str, self.routes))}. Add a pattern to rewards, or set default."
        )

    def combine(self, response: Response, scores: Mapping[str, Score]) -> Score:
        """Return the score that the inner reward gave the response."""
        if not scores:
            return Score.failed(self.unscored_reason(response))
        (score,) = scores.values()
        return replace(score, gdpo_parts=score.gdpo_parts or {WHOLE_REWARD_PART: score.value})
