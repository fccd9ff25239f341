"""Makes groups from the rows of data.offline.path. A step trains on them in addition to the groups that the engines sample."""

from dataclasses import replace

import numpy as np

from mrl.algorithms.inputs import ScoredBatch
from mrl.core.types import OFFLINE, Column, TokenBlock
from mrl.data.offline import OfflineRow, OfflineRows
from mrl.rewards.by_source import PLAIN_TERM
from mrl.rewards.reward_types import Score
from mrl.rollout.trajectory import Group, Sample, Trajectory


def offline_groups(rows: OfflineRows | None, step: int) -> list[Group]:
    """Return the groups that this step, counted from 0, gets from the file. Sample.row is -1 minus the row number in the file."""
    found = rows.of_step(step) if rows else []
    return [Group([_sample(row, step) for row in group]) for group in found]


def _sample(row: OfflineRow, step: int) -> Sample:
    logprobs = [float("nan")] * len(row.response) if row.logprobs is None else row.logprobs
    trajectory = Trajectory(row.response, logprobs, truncated=False, weight_version=step)
    return Sample(-1 - row.number, row.prompt, trajectory, Score(row.reward))


def with_offline_part(scored: ScoredBatch, num_offline: int) -> ScoredBatch:
    """If rewards have parts, also give the last `num_offline` responses a part, PLAIN_TERM, which equals their reward.

    An estimator that reads only the parts, such as GDPO (docs/concepts/algorithms.md), would otherwise ignore the rewards of the
    file.
    """
    if not scored.parts:
        return scored
    part = scored.parts.get(PLAIN_TERM, np.zeros(len(scored.rewards))).copy()
    part[len(part) - num_offline :] = scored.rewards[len(part) - num_offline :]
    return replace(scored, parts={**scored.parts, PLAIN_TERM: part})


def with_given_advantages(scored: ScoredBatch, num_offline: int, rows: OfflineRows | None) -> ScoredBatch:
    """Give the last `num_offline` responses the advantage `data.offline.advantage`. Returns `scored` if the key is not set."""
    if rows is None or rows.advantage is None:
        return scored
    given = np.full(len(scored.lengths), np.nan)
    given[len(given) - num_offline :] = rows.advantage
    return replace(scored, given_advantages=given)


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
