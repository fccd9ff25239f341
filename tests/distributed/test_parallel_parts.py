"""Parts of parallel/ against plain float64 formulas."""

from types import SimpleNamespace

import pytest

from parallel.dims import ParallelDims


def attention_output(lengths: list[int], heads: int, groups: int):
    import torch

    from parallel.attention import PackedAttention
    from parallel.packing import pack

    generator = torch.Generator().manual_seed(0)
    total, width = sum(lengths), 8
    q, k, v = (torch.randn(total, n, width, generator=generator, dtype=torch.float64) for n in (heads, groups, groups))
    config = SimpleNamespace(context_parallel_size=1, kv_channels=width, attention_dropout=0.0)
    module = PackedAttention(config, 1, None, "self").eval()
    return q, k, v, module(q, k, v, packed_seq_params=pack(lengths, torch.device("cpu")))


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [1, 7, 7, 2, 7, 1]])
def test_packed_attention_stays_inside_each_sequence(run_ranks, lengths, heads, groups):
    import torch

    q, k, v, found = attention_output(lengths, heads, groups)
    start = 0
    for length in lengths:
        for head in range(heads):
            part = slice(start, start + length)
            scores = q[part, head] @ k[part, head * groups // heads].T / 8**0.5
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
            expected = scores.softmax(-1) @ v[part, head * groups // heads]
            torch.testing.assert_close(found[part].view(length, heads, 8)[:, head], expected)
        start += length
    assert start == len(found), "one row out for every token in: no padding"


def test_a_pack_describes_its_sequences(run_ranks):
    import torch

    from parallel.packing import pack

    packed = pack([3, 1, 1, 2], torch.device("cpu"))
    assert packed.cu_seqlens_q.tolist() == [0, 3, 4, 5, 7]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 0, 1]
    assert packed.runs == ((1, 3), (2, 1), (1, 2)) and packed.max_seqlen_q == 3
    for bad in ([], [2, 0]):
        with pytest.raises(ValueError, match="no empty one"):
            pack(bad, torch.device("cpu"))


def test_rank_arithmetic_follows_megatron(run_ranks):
    dims = ParallelDims(tp=2, dp=2)
    found = run_ranks(dims, group_positions)
    assert found == [(dims.tp_rank(r), dims.dp_rank(r)) for r in range(dims.world_size)]


def group_positions(rank: int):
    from parallel import groups

    return groups.tp_group().rank(), groups.dp_group().rank()
