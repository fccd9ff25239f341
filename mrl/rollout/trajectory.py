"""Trajectories, samples and groups, and their conversion to a token block (TokenBlock) and to the driver's columns.

The rows of data.offline.path become groups, too. A step trains on them in addition to the groups that the engines sample.

mrl.core.types explains the letters in shapes such as [G], [B] and [R].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.inputs import ScoredBatch
from mrl.core.types import OFFLINE, Column, ImageInputs, TokenBlock
from mrl.data.offline import OfflineRow, OfflineRows
from mrl.data.prompts import PromptDataset
from mrl.rewards.by_source import WHOLE_REWARD_PART
from mrl.rewards.reward_types import Score, Turn
from mrl.rollout.client import Completion


@dataclass(frozen=True)
class ResponseUsage:
    """Number of turns, tool calls and input tokens of one multi-turn response."""

    turns: int  # number of assistant turns
    tool_calls: int
    tool_errors: int  # tool calls that could not be parsed, failed or timed out
    input_tokens: int  # sum over all turns; the input of a turn contains all earlier turns
    cached_tokens: int  # input tokens that the engine found in its prefix cache


@dataclass(frozen=True)
class Trajectory:
    """One response: all tokens after the prompt. In a multi-turn response, tool results stand between the sampled turns."""

    token_ids: list[int]
    logprobs: list[float]  # log-probabilities of the sampled tokens, as the engine reports them
    truncated: bool  # whether the token limit or the turn limit ended the response
    weight_version: int  # weight version that sampled the first token
    sampled: list[bool] | None = None  # for each token, whether the policy sampled the token; None: all tokens
    turns: tuple[Turn, ...] = ()  # messages of a multi-turn response; empty if the response has a single turn
    turn_ends: tuple[int, ...] = ()  # index in `logprobs` of the last token of each assistant turn
    routed_experts: NDArray[np.int16] | None = None  # see Completion.routed_experts
    usage: ResponseUsage | None = None  # None if the response has a single turn or is read from a recorded step
    # (weight version, number of tokens that this version sampled), oldest version first; empty if there is only one version
    versions: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_completion(cls, completion: Completion) -> "Trajectory":
        """Return a single-turn trajectory. Raises RuntimeError if the completion is empty or was aborted."""
        if completion.finish_reason == "abort" or not completion.token_ids:
            raise RuntimeError(
                f"an engine returned an empty or aborted response (finish reason {completion.finish_reason})."
            )
        return cls(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            truncated=completion.finish_reason == "length",
            weight_version=int(completion.weight_version),
            routed_experts=completion.routed_experts,
            versions=completion.versions,
        )

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return len(self.logprobs)

    @property
    def spans(self) -> list[tuple[bool, list[int]]]:
        """(whether the policy sampled the part, token ids of the part) for each part of the response.

        A part is one assistant turn, or the tool results between two assistant turns, with the chat template's text around them.
        """
        if self.sampled is None:
            return [(True, self.token_ids)]
        pairs = zip(self.sampled, self.token_ids, strict=True)
        return [(is_sampled, [token for _, token in part]) for is_sampled, part in groupby(pairs, key=itemgetter(0))]

    def texts(self, decode: Callable[[list[list[int]]], list[str]]) -> tuple[Turn, ...]:
        """Return the messages of a multi-turn response. Returns () if the response has a single turn.

        A response from a recorded step has no messages, so its tokens are decoded. The chat template's text around the tool
        results is then part of the messages with the role "tool".
        """
        if self.turns or self.sampled is None:
            return self.turns
        texts = decode([ids for _, ids in self.spans])
        roles = ["assistant" if is_sampled else "tool" for is_sampled, _ in self.spans]
        return tuple(Turn(role, text) for role, text in zip(roles, texts, strict=True))


@dataclass(frozen=True)
class Sample:
    """One scored response to the prompt in one row of the data set."""

    row: int  # row of the data set
    prompt: list[int]  # token ids
    trajectory: Trajectory  # the response
    score: Score


@dataclass(frozen=True)
class Group:
    """The G responses to one prompt."""

    samples: list[Sample]
    greedy: Score | None = None  # score of the greedy response; None if the advantage needs no greedy response

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards of the responses, [G]."""
        return np.array([sample.score.value for sample in self.samples])

    @property
    def row(self) -> int:
        """Row of the data set that holds the prompt."""
        return self.samples[0].row


@dataclass(frozen=True)
class StepGroups[T]:
    """The groups that one step took from the staleness buffer. T is Group in runs and None in simulations."""

    numbers: list[int]  # serial numbers of the prompt requests of `groups`, ascending
    groups: list[T]  # the groups on which the step trains
    filtered_numbers: list[int]  # serial numbers of the prompt requests of `filtered`
    filtered: list[T]  # the groups that the rollout filter rejected
    dropped: list[int]  # serial numbers of dropped prompt requests, which would be too old for the next step

    @property
    def all_numbers(self) -> list[int]:
        """Serial numbers of all prompt requests that this step removed from the staleness buffer."""
        return [*self.numbers, *self.filtered_numbers, *self.dropped]


def to_block(groups: Sequence[Group]) -> TokenBlock:
    """Return the tokens of all groups as one block, group after group."""
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
    """Return one trajectory for each sequence of a token block: the inverse of `to_block`.

    `truncated`, `versions`: [B], the fields `truncated` and `weight_version` of the trajectories.
    """
    ends = np.cumsum(block.sampled_lengths)[:-1]
    spans = zip(block.cu_seqlens[:-1], block.prompt_lengths, block.cu_seqlens[1:], strict=True)
    trajectories = [
        Trajectory(
            token_ids=block.tokens[start + prompt : end].tolist(),
            logprobs=logprobs.tolist(),
            truncated=bool(cut),
            weight_version=int(version),
            sampled=None if block.sampled is None else block.sampled[start + prompt : end].tolist(),
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
    """Return, for each assistant turn, the index of its last token among all sampled tokens."""
    return tuple(end - 1 for end in accumulate(len(ids) for is_sampled, ids in trajectory.spans if is_sampled))


def driver_columns(groups: Sequence[Group]) -> dict[str, NDArray]:
    """Return the columns [B] that the driver sees. Each column becomes the field of Rollouts with the same name."""
    samples = [(index, sample) for index, group in enumerate(groups) for sample in group.samples]
    return dict(
        rows=np.array([sample.row for _, sample in samples]),
        groups=np.array([index for index, _ in samples]),
        truncated=np.array([sample.trajectory.truncated for _, sample in samples]),
        weight_versions=np.array([sample.trajectory.weight_version for _, sample in samples]),
    )


def version_spans(groups: Sequence[Group]) -> NDArray[np.int64]:
    """Return which weight versions sampled the tokens of each response.

    The result is an array with the 3 columns (index of the response, weight version, number of tokens). Each row describes
    consecutive tokens that one weight version sampled. The rows of a response are in the order of sampling.
    """
    trajectories = [sample.trajectory for group in groups for sample in group.samples]
    spans = [
        (index, version, tokens)
        for index, trajectory in enumerate(trajectories)
        for version, tokens in trajectory.versions or [(trajectory.weight_version, trajectory.num_sampled)]
    ]
    return np.array(spans, np.int64).reshape(-1, 3)


def prompt_images(data: PromptDataset, groups: Sequence[Group]) -> dict[int, ImageInputs]:
    """Return index of a response -> images of its prompt. The responses of a group share one object.

    `data`: the data set with the prompts of the groups.
    """
    if not data.has_images:
        return {}
    found: dict[int, ImageInputs] = {}
    first = 0
    for group in groups:
        if (inputs := data.image_inputs(group.row)) is not None:
            found |= dict.fromkeys(range(first, first + len(group.samples)), inputs)
        first += len(group.samples)
    return found


def to_scored_batch(groups: Sequence[Group]) -> ScoredBatch:
    """Return the rewards and lengths of all responses, in the order in which `to_block` lays out the responses."""
    samples = [sample for group in groups for sample in group.samples]
    scores = [sample.score for sample in samples]
    greedy = [group.greedy.value for group in groups for _ in group.samples if group.greedy is not None]
    names = dict.fromkeys(name for score in scores for name in score.gdpo_parts)  # names of the parts of the reward
    columns = driver_columns(groups)
    return ScoredBatch(
        rewards=np.array([score.value for score in scores], np.float64),
        groups=columns["groups"],
        lengths=np.array([sample.trajectory.num_sampled for sample in samples]),
        truncated=columns["truncated"],
        turn_rewards=_turn_rewards(samples),
        reward_parts={name: np.array([score.gdpo_parts.get(name, 0.0) for score in scores]) for name in names},
        greedy_rewards=np.array(greedy) if greedy else None,
    )


def _turn_rewards(samples: Sequence[Sample]) -> NDArray[np.float64] | None:
    """Return a reward for each of the R sampled tokens, [R]: the turn's reward at the last token of a turn, and 0 elsewhere.

    A response without rewards per turn has its whole reward at its last token. Returns None if no response has rewards per turn.
    """
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


def offline_groups(rows: OfflineRows | None, step: int) -> list[Group]:
    """Return the groups that `step` (from 0) gets from data.offline.path. Sample.row is -1 minus the row number in this file."""
    found = rows.of_step(step) if rows else []
    return [Group([_sample(row, step) for row in group]) for group in found]


def _sample(row: OfflineRow, step: int) -> Sample:
    logprobs = [float("nan")] * len(row.response) if row.logprobs is None else row.logprobs
    trajectory = Trajectory(row.response, logprobs, truncated=False, weight_version=step)
    return Sample(-1 - row.number, row.prompt, trajectory, Score(row.reward))


def with_offline_part(scored: ScoredBatch, num_offline: int) -> ScoredBatch:
    """Add the rewards of the last `num_offline` responses as the part WHOLE_REWARD_PART, if the other rewards have parts.

    An estimator that reads only the parts, such as GDPO (docs/concepts/algorithms.md), would otherwise ignore the rewards of the
    file.
    """
    if not scored.reward_parts:
        return scored
    part = scored.reward_parts.get(WHOLE_REWARD_PART, np.zeros(len(scored.rewards))).copy()
    part[len(part) - num_offline :] = scored.rewards[len(part) - num_offline :]
    return replace(scored, reward_parts={**scored.reward_parts, WHOLE_REWARD_PART: part})


def with_offline_advantages(scored: ScoredBatch, num_offline: int, rows: OfflineRows | None) -> ScoredBatch:
    """Give the last `num_offline` responses the advantage `data.offline.advantage`. Returns `scored` if the key is not set."""
    if rows is None or rows.advantage is None:
        return scored
    advantages = np.full(len(scored.lengths), np.nan)
    advantages[len(advantages) - num_offline :] = rows.advantage
    return replace(scored, offline_advantages=advantages)


def with_offline_column(block: TokenBlock, num_offline: int) -> TokenBlock:
    """Return the block with the column OFFLINE, which is 1 for the tokens of the last `num_offline` responses."""
    is_offline = np.arange(len(block.lengths)) >= len(block.lengths) - num_offline
    return block.with_columns(**{OFFLINE: np.repeat(is_offline, block.sampled_lengths).astype(np.float32)})


def known_rollout_logprobs(block: TokenBlock, old_logprobs: Column | None) -> Column:
    """Return the rollout log-probabilities, one for each sampled token.

    Offline rows may have no log-probabilities. Such rows get the old log-probabilities, if these are given.
    """
    if OFFLINE not in block.columns or old_logprobs is None:
        return block.rollout_logprobs
    is_unknown = (block.columns[OFFLINE] > 0) & np.isnan(block.rollout_logprobs)
    return np.where(is_unknown, old_logprobs, block.rollout_logprobs).astype(np.float32)
