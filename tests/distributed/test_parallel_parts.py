"""Rank arithmetic compared with Megatron's process groups, and attention over sequences that are split over ranks."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from parallel.dims import ParallelDims

LAYOUTS = [
    ParallelDims(tp=2, dp=2),
    ParallelDims(tp=2, cp=2, pp=2),
    ParallelDims(cp=3, dp=2, ep=2),
    ParallelDims(tp=2, dp=3, ep=3, etp=2),
    ParallelDims(tp=2, pp=2, dp=2, ep=4, etp=1),
    ParallelDims(pp=2, vpp=2, cp=2, dp=2, ep=2, etp=2),
]


def group_places(rank: int):
    from megatron.core.parallel_state import get_data_parallel_group
    from torch.distributed import get_process_group_ranks

    from parallel import groups

    tp, cp, dp, pp = groups.tp_group(), groups.cp_group(), get_data_parallel_group(), groups.pp_group()
    experts = [get_process_group_ranks(group) for group in (groups.etp_group(), groups.ep_group())]
    summed = get_process_group_ranks(groups.dp_cp_group())
    ends = groups.is_first_stage(), groups.is_last_stage()
    return tuple(group.rank() for group in (tp, cp, dp, pp)), experts, summed, ends


@pytest.mark.extended_after(2)
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_rank_arithmetic_follows_megatron(run_ranks, dims):
    stage = dims.tp * dims.cp * dims.dp
    for rank, (places, (etp, ep), summed, ends) in enumerate(run_ranks(dims, group_places)):
        at = dims.coords(rank)
        assert places == (at.tp, at.cp, at.dp, at.pp)
        # neighboring ranks hold the shards of one expert, and ep * etp consecutive ranks hold one copy of all experts
        first = rank - rank % dims.expert_tp
        assert etp == list(range(first, first + dims.expert_tp))
        copy = rank // stage * stage + rank % stage // (dims.ep * dims.expert_tp) * dims.ep * dims.expert_tp
        start = copy + rank % dims.expert_tp
        assert ep == list(range(start, start + dims.ep * dims.expert_tp, dims.expert_tp))
        same = [r for r in range(dims.world_size) if (dims.coords(r).tp, dims.coords(r).pp) == (at.tp, at.pp)]
        assert sorted(summed) == same
        assert ends == (at.pp == 0, at.pp == dims.pp - 1)


def polling_threads(rank: int) -> tuple[int, int]:
    """Return the number of process groups of this rank, and the number of its threads that poll gloo's sockets."""
    from torch.distributed.distributed_c10d import _world

    threads = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    return len(_world.pg_map), threads.count("gloo_tcp_loop")


def test_the_gloo_groups_of_a_rank_share_one_polling_thread(run_ranks):
    for num_groups, num_threads in run_ranks(ParallelDims(tp=2), polling_threads):
        assert num_groups > 10 and num_threads == 1


def attention_case(seed: int):
    """Return (segments, tp_multiple, [query [S, n, d], key [S, g, d], value [S, g, d]], cotangent [S, n*d])."""
    from segment_trees import random_segments

    rng = np.random.default_rng(seed)
    segments = random_segments(rng)
    heads = [(4, 4), (4, 2), (2, 1)][seed % 3]
    total, width = sum(segment.length for segment in segments), 4
    columns = [rng.normal(size=(total, n, width)) for n in (heads[0], heads[1], heads[1])]
    return segments, 2 ** (seed % 2), columns, rng.normal(size=(total, heads[0] * width))


WINDOWS = [None, 1, 2, 5]


def attend(rank: int, dims: ParallelDims, seeds: range):
    """Return for each case the tokens on this rank, and [output, gradients of query, key and value] of these tokens."""
    import torch

    from parallel.attention import PackedAttention
    from parallel.packing import pack

    found = []
    for seed in seeds:
        segments, tp_multiple, columns, cotangent = attention_case(seed)
        packed = pack(segments, torch.device("cpu"), cp_rank=rank, cp_size=dims.cp, multiple=tp_multiple)
        real = torch.from_numpy(packed.token_index >= 0)
        mine = packed.token_index[packed.token_index >= 0]
        parts = []
        for column in columns:
            part = torch.full(
                (len(packed.token_index), *column.shape[1:]), 100.0, dtype=torch.float64
            )  # large values at padding tokens would show in the output
            part[real] = torch.from_numpy(column[mine])
            parts.append(part.requires_grad_())
        window = WINDOWS[seed % len(WINDOWS)]
        limits = dict(window_size=None if window is None else (window - 1, 0), window_attn_skip_freq=None)
        options = dict(attention_dropout=0.0, softmax_type="vanilla")
        config = SimpleNamespace(kv_channels=columns[0].shape[2], **options, **limits)
        out = PackedAttention(config, 1, None, "self")(*parts, packed_seq_params=packed)
        (out[real] * torch.from_numpy(cotangent[mine])).sum().backward()
        assert not any(part.grad[~real].any() for part in parts), "padding has no part in real tokens"
        found.append((mine, [x[real].detach().numpy() for x in (out, *(part.grad for part in parts))]))
    return found


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("cp", [2, 3])
def test_attention_under_context_parallelism_equals_attention_with_a_dense_mask(run_ranks, cp):
    import torch
    from segment_trees import dense_attention

    dims, seeds = ParallelDims(cp=cp), range(24)
    by_rank = run_ranks(dims, attend, dims, seeds)
    for seed, of_ranks in zip(seeds, zip(*by_rank, strict=True), strict=True):
        segments, _, columns, cotangent = attention_case(seed)
        tensors = [torch.from_numpy(column).requires_grad_() for column in columns]
        out = dense_attention(*tensors, segments=segments, window=WINDOWS[seed % len(WINDOWS)])
        (out * torch.from_numpy(cotangent)).sum().backward()
        order = np.concatenate([mine for mine, _ in of_ranks])
        assert sorted(order) == list(range(len(out)))
        for number, expected in enumerate((out.detach(), *(tensor.grad for tensor in tensors))):
            found = np.concatenate([tensors[number] for _, tensors in of_ranks])
            np.testing.assert_allclose(found, expected.numpy()[order], rtol=1e-10, atol=1e-11, err_msg=f"{segments}")
