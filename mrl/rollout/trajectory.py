"""Responses as they were sampled, of one turn or of several, and the block and columns that a batch of them becomes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.inputs import Scored
from mrl.core.types import TokenBlock
from mrl.rewards.base import Score, Turn
from mrl.rollout.client import Completion


@dataclass(frozen=True)
class Usage:
    """What a response of several turns took."""

    turns: int  # of the assistant
    tool_calls: int
    tool_errors: int  # calls that could not be read, failed or took too long
    input_tokens: int  # of all its requests
    cached_tokens: int  # of these, found in the engine's prefix cache


@dataclass(frozen=True)
class Trajectory:
    """All that follows a prompt: what the policy sampled and, between its turns, what tools answered."""

    token_ids: list[int]
    logprobs: list[float]  # of the sampled tokens, as the engine sampled them
    truncated: bool  # cut at a limit of tokens or turns
    weight_version: int  # of the weights that made the first token
    sampled: list[bool] | None = None  # which of the tokens the policy chose; None: all
    turns: tuple[Turn, ...] = ()  # of a conversation; empty: one turn
    turn_ends: tuple[int, ...] = ()  # of each assistant turn: its last token, counted in sampled tokens
    routed_experts: NDArray[np.int16] | None = None  # see Completion
    usage: Usage | None = None  # None: one turn, or replayed
    versions: tuple[tuple[int, int], ...] = ()  # (version, sampled tokens) in order; empty: all of `weight_version`

    @classmethod
    def of(cls, completion: Completion) -> "Trajectory":
        """A response of one turn. Raises RuntimeError where it came back empty or cut by an abort."""
        if completion.finish_reason == "abort" or not completion.token_ids:
            raise RuntimeError(f"a response came back {completion.finish_reason} and empty or cut.")
        return cls(
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason == "length",
            int(completion.weight_version),
            routed_experts=completion.routed_experts,
            versions=completion.versions,
        )

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy chose."""
        return len(self.logprobs)

    @property
    def spans(self) -> list[tuple[bool, list[int]]]:
        """(sampled, tokens) of each turn: the assistant's, and what stands between two of them."""
        if self.sampled is None:
            return [(True, self.token_ids)]
        pairs = zip(self.sampled, self.token_ids, strict=True)
        return [(chosen, [token for _, token in part]) for chosen, part in groupby(pairs, key=itemgetter(0))]

    def texts(self, decode: Callable[[list[list[int]]], list[str]]) -> tuple[Turn, ...]:
        """Its turns. Of a replayed one, tool turns read as the chat template frames them: tokens are all there is."""
        if self.turns or self.sampled is None:
            return self.turns
        texts = decode([ids for _, ids in self.spans])
        roles = ["assistant" if chosen else "tool" for chosen, _ in self.spans]
        return tuple(Turn(role, text) for role, text in zip(roles, texts, strict=True))


@dataclass(frozen=True)
class Sample:
    """One response to one row of the data set, scored."""

    row: int
    prompt: list[int]
    trajectory: Trajectory
    score: Score


@dataclass(frozen=True)
class Group:
    """The responses to one prompt."""

    samples: list[Sample]
    greedy: Score | None = None  # of the likeliest response, where the advantage asks for it

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[G]"""
        return np.array([sample.score.value for sample in self.samples])


def to_block(groups: Sequence[Group]) -> TokenBlock:
    """The tokens of all groups, group after group."""
    samples = [sample for group in groups for sample in group.samples]
    paths = [sample.trajectory for sample in samples]
    routing = [path.routed_experts for path in paths if path.routed_experts is not None]
    several = any(path.sampled is not None for path in paths)
    return TokenBlock.from_lists(
        [sample.prompt for sample in samples],
        [path.token_ids for path in paths],
        [path.logprobs for path in paths],
        routing or None,
        [path.sampled or [True] * len(path.token_ids) for path in paths] if several else None,
    )


def trajectories(block: TokenBlock, truncated: NDArray[np.bool_], versions: NDArray[np.int64]) -> list[Trajectory]:
    """The responses of a block, in its order."""
    ends = np.cumsum(block.sampled_lengths)[:-1]
    spans = zip(block.cu_seqlens[:-1], block.prompt_lengths, block.cu_seqlens[1:], strict=True)
    paths = [
        Trajectory(
            block.tokens[start + prompt : end].tolist(),
            logprobs.tolist(),
            bool(cut),
            int(version),
            None if block.sampled is None else block.sampled[start + prompt : end].tolist(),
            routed_experts=None if block.routed_experts is None else block.routed_experts[start:end],
        )
        for (start, prompt, end), logprobs, cut, version in zip(
            spans, np.split(block.rollout_logprobs, ends), truncated, versions, strict=True
        )
    ]
    return [replace(path, turn_ends=_turn_ends(path)) if path.sampled else path for path in paths]


def _turn_ends(path: Trajectory) -> tuple[int, ...]:
    """The last token of each assistant turn, counted in sampled tokens."""
    return tuple(end - 1 for end in accumulate(len(ids) for chosen, ids in path.spans if chosen))


def control_columns(groups: Sequence[Group]) -> dict[str, NDArray]:
    """[B] rows of the data set, group numbers, truncated, weight_versions."""
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    return dict(
        rows=np.array([sample.row for _, sample in samples]),
        groups=np.array([number for number, _ in samples]),
        truncated=np.array([sample.trajectory.truncated for _, sample in samples]),
        weight_versions=np.array([sample.trajectory.weight_version for _, sample in samples]),
    )


def spans(groups: Sequence[Group]) -> NDArray[np.int64]:
    """[M, 3] (response, weight version, sampled tokens of it), a line for each version that had a part in a response."""
    samples = [sample.trajectory for group in groups for sample in group.samples]
    lines = [
        (number, version, tokens)
        for number, path in enumerate(samples)
        for version, tokens in path.versions or [(path.weight_version, path.num_sampled)]
    ]
    return np.array(lines, np.int64).reshape(-1, 3)


def to_scored(groups: Sequence[Group]) -> Scored:
    """Rewards of all groups, in the order of `to_block`."""
    samples = [sample for group in groups for sample in group.samples]
    scores = [sample.score for sample in samples]
    greedy = [group.greedy.value for group in groups for _ in group.samples if group.greedy is not None]
    names = dict.fromkeys(name for score in scores for name in score.terms)
    columns = control_columns(groups)
    return Scored(
        rewards=np.array([score.value for score in scores], np.float64),
        groups=columns["groups"],
        lengths=np.array([sample.trajectory.num_sampled for sample in samples]),
        truncated=columns["truncated"],
        turn_rewards=_turn_rewards(samples),
        parts={name: np.array([score.terms.get(name, 0.0) for score in scores]) for name in names},
        greedy_rewards=np.array(greedy) if greedy else None,
    )


def _turn_rewards(samples: Sequence[Sample]) -> NDArray[np.float64] | None:
    """[R] each turn's reward at the turn's last token; None where no response has rewards by turn."""
    if not any(sample.score.turn_values for sample in samples):
        return None
    columns = []
    for sample in samples:
        column = np.zeros(sample.trajectory.num_sampled)
        values = sample.score.turn_values
        ends = sample.trajectory.turn_ends or (sample.trajectory.num_sampled - 1,)
        if values:
            assert len(values) == len(ends), f"{len(values)} rewards for {len(ends)} turns"
            column[list(ends)] = values
        else:
            column[-1] = sample.score.value
        columns.append(column)
    return np.concatenate(columns)
