"""Trajectories, samples and groups of one step, and their conversion to a token block and control columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.inputs import ScoredBatch
from mrl.core.types import TokenBlock
from mrl.rewards.reward_types import Score, Turn
from mrl.rollout.client import Completion


@dataclass(frozen=True)
class ResponseUsage:
    """Turns, tool calls and request tokens of one multi-turn response."""

    turns: int  # assistant turns
    tool_calls: int
    tool_errors: int  # calls that could not be parsed, failed or timed out
    input_tokens: int  # sum over all requests, one per turn
    cached_tokens: int  # input tokens found in the engine's prefix cache


@dataclass(frozen=True)
class Trajectory:
    """Everything that follows a prompt: the tokens that the policy sampled and, between its turns, the tools' results."""

    token_ids: list[int]
    logprobs: list[float]  # the engine's log-probabilities of the sampled tokens
    truncated: bool  # ended by the token limit or the turn limit
    weight_version: int  # version of the weights that sampled the first token
    sampled: list[bool] | None = None  # which tokens the policy sampled; None: all
    turns: tuple[Turn, ...] = ()  # messages of a multi-turn response; empty for a single turn
    turn_ends: tuple[int, ...] = ()  # index of each assistant turn's last token, counted in sampled tokens
    routed_experts: NDArray[np.int16] | None = None  # see Completion
    usage: ResponseUsage | None = None  # None for a single turn, and in replayed data
    # (weight version, sampled tokens) in order; empty if `weight_version` sampled all tokens
    versions: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_completion(cls, completion: Completion) -> "Trajectory":
        """Make a single-turn trajectory. Raises RuntimeError if the completion is empty or was aborted."""
        if completion.finish_reason == "abort" or not completion.token_ids:
            raise RuntimeError(
                f"an engine returned an empty or aborted response (finish reason {completion.finish_reason})."
            )
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
        """Number of tokens that the policy sampled."""
        return len(self.logprobs)

    @property
    def spans(self) -> list[tuple[bool, list[int]]]:
        """(sampled, token ids) of each assistant turn and of the text between two of them, in order."""
        if self.sampled is None:
            return [(True, self.token_ids)]
        pairs = zip(self.sampled, self.token_ids, strict=True)
        return [(is_sampled, [token for _, token in part]) for is_sampled, part in groupby(pairs, key=itemgetter(0))]

    def texts(self, decode: Callable[[list[list[int]]], list[str]]) -> tuple[Turn, ...]:
        """Return the turns as text. Replayed data has only tokens; its tool turns include the chat template around results."""
        if self.turns or self.sampled is None:
            return self.turns
        texts = decode([ids for _, ids in self.spans])
        roles = ["assistant" if is_sampled else "tool" for is_sampled, _ in self.spans]
        return tuple(Turn(role, text) for role, text in zip(roles, texts, strict=True))


@dataclass(frozen=True)
class Sample:
    """One scored response to one row of the data set."""

    row: int
    prompt: list[int]
    trajectory: Trajectory
    score: Score


@dataclass(frozen=True)
class Group:
    """The G responses to one prompt."""

    samples: list[Sample]
    greedy: Score | None = None  # score of the greedy response, if the advantage needs one

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards [G]."""
        return np.array([sample.score.value for sample in self.samples])

    @property
    def row(self) -> int:
        """Row of the data set that the prompt comes from."""
        return self.samples[0].row


@dataclass(frozen=True)
class StepGroups[T]:
    """The groups that one step took from the staleness buffer. T is Group, except in simulations."""

    numbers: list[int]  # prompt requests of the trained groups, in the order of drawing
    groups: list[T]
    filtered_numbers: list[int]  # prompt requests of the groups that the group filter rejected
    filtered: list[T]
    dropped: list[int]  # prompt requests that were dropped because they would be too old for the next step

    @property
    def all_numbers(self) -> list[int]:
        """Prompt requests that left the buffer with this step."""
        return [*self.numbers, *self.filtered_numbers, *self.dropped]


def to_block(groups: Sequence[Group]) -> TokenBlock:
    """Lay out the tokens of all groups, group after group."""
    samples = [sample for group in groups for sample in group.samples]
    trajectories = [sample.trajectory for sample in samples]
    routing = [trajectory.routed_experts for trajectory in trajectories if trajectory.routed_experts is not None]
    multi_turn = any(trajectory.sampled is not None for trajectory in trajectories)
    return TokenBlock.from_lists(
        [sample.prompt for sample in samples],
        [trajectory.token_ids for trajectory in trajectories],
        [trajectory.logprobs for trajectory in trajectories],
        routing or None,
        [trajectory.sampled or [True] * len(trajectory.token_ids) for trajectory in trajectories]
        if multi_turn
        else None,
    )


def block_trajectories(
    block: TokenBlock, truncated: NDArray[np.bool_], versions: NDArray[np.int64]
) -> list[Trajectory]:
    """Cut a token block back into trajectories, in the order of its sequences."""
    ends = np.cumsum(block.sampled_lengths)[:-1]
    spans = zip(block.cu_seqlens[:-1], block.prompt_lengths, block.cu_seqlens[1:], strict=True)
    trajectories = [
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
    return [
        replace(trajectory, turn_ends=_turn_ends(trajectory)) if trajectory.sampled else trajectory
        for trajectory in trajectories
    ]


def _turn_ends(trajectory: Trajectory) -> tuple[int, ...]:
    """Return the index of each assistant turn's last token, counted in sampled tokens."""
    return tuple(end - 1 for end in accumulate(len(ids) for is_sampled, ids in trajectory.spans if is_sampled))


def control_columns(groups: Sequence[Group]) -> dict[str, NDArray]:
    """Return the columns [B] that the driver sees: rows of the data set, group numbers, truncated, weight_versions."""
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    return dict(
        rows=np.array([sample.row for _, sample in samples]),
        groups=np.array([number for number, _ in samples]),
        truncated=np.array([sample.trajectory.truncated for _, sample in samples]),
        weight_versions=np.array([sample.trajectory.weight_version for _, sample in samples]),
    )


def version_spans(groups: Sequence[Group]) -> NDArray[np.int64]:
    """Return [M, 3]: (response, weight version, number of tokens) for each version that sampled tokens of a response."""
    samples = [sample.trajectory for group in groups for sample in group.samples]
    lines = [
        (number, version, tokens)
        for number, trajectory in enumerate(samples)
        for version, tokens in trajectory.versions or [(trajectory.weight_version, trajectory.num_sampled)]
    ]
    return np.array(lines, np.int64).reshape(-1, 3)


def to_scored_batch(groups: Sequence[Group]) -> ScoredBatch:
    """Return rewards and lengths of all groups, in the order of `to_block`."""
    samples = [sample for group in groups for sample in group.samples]
    scores = [sample.score for sample in samples]
    greedy = [group.greedy.value for group in groups for _ in group.samples if group.greedy is not None]
    names = dict.fromkeys(name for score in scores for name in score.terms)
    columns = control_columns(groups)
    return ScoredBatch(
        rewards=np.array([score.value for score in scores], np.float64),
        groups=columns["groups"],
        lengths=np.array([sample.trajectory.num_sampled for sample in samples]),
        truncated=columns["truncated"],
        turn_rewards=_turn_rewards(samples),
        parts={name: np.array([score.terms.get(name, 0.0) for score in scores]) for name in names},
        greedy_rewards=np.array(greedy) if greedy else None,
    )


def _turn_rewards(samples: Sequence[Sample]) -> NDArray[np.float64] | None:
    """Return [R] each turn's reward at the turn's last token; None if no response has rewards per turn."""
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
