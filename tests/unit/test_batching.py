"""Cutting a batch: nothing dropped, nothing twice, loads even."""

import numpy as np
import pytest

from mrl.data.batching import micro_batches, partition
from mrl.types import TokenBlock

LENGTHS = np.random.default_rng(0).integers(1, 50, 37)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 64])
def test_partition_gives_every_row_to_one_part(parts):
    rows = np.arange(37)[::2]
    cut = partition(LENGTHS, rows, parts)
    assert len(cut) == parts
    assert sorted(np.concatenate(cut).tolist()) == rows.tolist()


def test_partition_evens_out_tokens():
    loads = [LENGTHS[part].sum() for part in partition(LENGTHS, np.arange(37), 4)]
    assert max(loads) - min(loads) <= LENGTHS.max() // 4


@pytest.mark.parametrize("budget", [1, 49, 64, 10_000])
def test_micro_batches_hold_every_row_once_within_the_budget(budget):
    packs = micro_batches(LENGTHS, np.arange(37), budget)
    assert sorted(np.concatenate(packs).tolist()) == list(range(37))
    assert all(LENGTHS[p].sum() <= budget or len(p) == 1 for p in packs)
    assert all((np.diff(LENGTHS[p]) >= 0).all() for p in packs)


def test_no_rows_make_no_micro_batches():
    assert micro_batches(LENGTHS, np.array([], dtype=np.int64), 10) == []


def test_a_block_keeps_every_token_and_selects_rows():
    prompts, responses = [[1, 2], [3], [4, 5, 6]], [[10], [11, 12], [13]]
    block = TokenBlock.from_lists(prompts, responses, [[-0.1], [-0.2, -0.3], [-0.4]])
    assert block.tokens.tolist() == [1, 2, 10, 3, 11, 12, 4, 5, 6, 13]
    part = block.select(np.array([2, 1]))
    assert [part.prompt(i).tolist() for i in range(2)] == [[4, 5, 6], [3]]
    assert [part.response(i).tolist() for i in range(2)] == [[13], [11, 12]]
    np.testing.assert_allclose(part.rollout_logprobs, [-0.4, -0.2, -0.3])
    assert len(block.tokens) == sum(map(len, prompts + responses))  # no padding
