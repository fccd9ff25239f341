"""Batched attention on a CPU gives the results of SGLang's attention, which runs sequence by sequence.

Tests import SGLang inside functions, because the import takes seconds, and every process of pytest-xdist imports this module.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

NUM_SLOTS = 20_000


@dataclass
class Case:
    """Random queries of the last `query_lens` tokens of sequences with `key_lens` tokens, and caches with their keys."""

    query_lens: Tensor
    key_lens: Tensor
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    requests: Tensor
    scaling: float

    @classmethod
    def random(cls, query_lens: list[int], prefix_lens: list[int], heads: int = 4, kv_heads: int = 2, size: int = 32):
        queries = torch.tensor(query_lens)
        keys = queries + torch.tensor(prefix_lens)
        rows = len(query_lens) + 3  # the pool has more requests than this batch
        slots = torch.randint(1, NUM_SLOTS, (rows, int(keys.max()) + 5), dtype=torch.int32)
        caches = [torch.randn(NUM_SLOTS, kv_heads, size) for _ in range(2)]
        caches[0][0] = caches[1][0] = float("nan")  # SGLang's padding slot, which must not be read
        requests = torch.randperm(rows)[: len(query_lens)]
        query = torch.randn(int(queries.sum()), heads, size)
        return cls(queries, keys, query, *caches, slots, requests, size**-0.5)

    def stock(self, window: int | None = None) -> Tensor:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        backend, output = object.__new__(TorchNativeAttnBackend), torch.empty_like(self.query)
        gqa = self.query.size(1) != self.k_cache.size(1)
        common = (self.query, output, self.k_cache, self.v_cache, self.slots, self.requests, self.key_lens)
        options = dict(scaling=self.scaling, enable_gqa=gqa, sliding_window_size=window)
        if (self.query_lens == 1).all():
            return backend._run_sdpa_forward_decode(*common, None, **options)
        prefix = self.key_lens - self.query_lens
        return backend._run_sdpa_forward_extend(*common, prefix, self.query_lens, None, causal=True, **options)

    def ours(self, window: int | None = None) -> Tensor:
        from mrl.rollout.cpu import sdpa_attention

        output = torch.full_like(self.query, float("nan"))
        for tile in sdpa_attention.make_plan(self.query_lens, self.key_lens, self.slots, self.requests):
            sdpa_attention.run_tile(tile, self.query, output, self.k_cache, self.v_cache, self.scaling, window)
        return output


def random_lens(count: int, low: int, high: int) -> list[int]:
    return torch.randint(low, high, (count,)).tolist()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 32), (4, 4, 16), (8, 1, 64), (6, 2, 24)])
def test_decode_equals_sglangs_attention(heads, kv_heads, size):
    case = Case.random([1] * 50, random_lens(50, 0, 40), heads, kv_heads, size)
    torch.testing.assert_close(case.ours(), case.stock(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (8, 1)])
def test_prefill_with_and_without_prefix_equals_sglangs_attention(heads, kv_heads):
    case = Case.random(random_lens(40, 1, 30), [0] * 10 + random_lens(30, 0, 60), heads, kv_heads)
    torch.testing.assert_close(case.ours(), case.stock(), atol=2e-6, rtol=1e-5)


def test_skewed_lengths_equal_sglangs_attention():
    """One long sequence among many short ones, in prefill and decode, and a prompt that is cut into several rows."""
    decode = Case.random([1] * 65, [3000] + random_lens(64, 0, 8))
    torch.testing.assert_close(decode.ours(), decode.stock(), atol=2e-6, rtol=1e-5)
    prefill = Case.random([1300, *random_lens(30, 1, 8)], [70, *random_lens(30, 0, 8)])
    torch.testing.assert_close(prefill.ours(), prefill.stock(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 3, 1000])
def test_sliding_window_equals_stock(window):
    for case in (
        Case.random([1] * 20, random_lens(20, 0, 40)),
        Case.random(random_lens(20, 1, 9), random_lens(20, 0, 9)),
    ):
        torch.testing.assert_close(case.ours(window), case.stock(window), atol=2e-6, rtol=1e-5)


def test_one_sequence_of_one_token():
    case = Case.random([1], [0])
    torch.testing.assert_close(case.ours(), case.stock())


def test_every_row_is_in_one_tile_and_tiles_stay_within_their_limits():
    """The limits of padding and memory hold for all lengths. A row that exceeds the limits has a tile of its own."""
    from mrl.rollout.cpu import sdpa_attention

    lens = [1, 1, 2, 3, 5, 9, 800, 5000, 70_000] * 30
    rows = sdpa_attention.split_rows([min(n, 700) for n in lens], lens)
    groups = sdpa_attention.group_rows(rows)
    assert sorted(row for group in groups for row in group) == sorted(rows)
    for group in groups:
        widest_Q, widest_L = max(r.num_queries for r in group), max(r.num_keys for r in group)
        wanted = sum(r.num_queries * r.num_keys for r in group)
        assert len(group) == 1 or sdpa_attention.fits_tile(len(group), widest_Q, widest_L, wanted)
    assert len(groups) < len(rows), "nothing was batched"


def test_the_rows_of_a_prompt_cover_its_tokens():
    from mrl.rollout.cpu import sdpa_attention

    rows = sdpa_attention.split_rows([1200, 1], [1300, 7])
    assert [r.num_queries for r in rows] == [512, 512, 176, 1]
    assert [r.num_keys for r in rows] == [612, 1124, 1300, 7]
    assert [r.first_token for r in rows] == [0, 512, 1024, 1200]


def test_sglang_finds_the_backend_by_name():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from mrl.rollout.cpu import ATTENTION_BACKEND, sdpa_attention

    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    assert isinstance(ATTENTION_BACKENDS[ATTENTION_BACKEND](runner), sdpa_attention.BatchedSdpaBackend)


@pytest.mark.extended
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_equals_sglangs(with_residual):
    from sglang.srt.layers.layernorm import RMSNorm

    from mrl.rollout.cpu import torch_ops

    norm = RMSNorm(64)
    norm.weight.data.normal_()
    x, residual = torch.randn(30, 64), torch.randn(30, 64) if with_residual else None
    ours, stock = torch_ops.rms_norm(norm, x, residual), norm.forward_native(x, residual)
    torch.testing.assert_close(ours, stock, atol=5e-6, rtol=1e-5)


def test_rms_norm_leaves_other_dtypes_to_sglang():
    from sglang.srt.layers.layernorm import RMSNorm

    from mrl.rollout.cpu import torch_ops

    norm, x = RMSNorm(64), torch.randn(30, 64, dtype=torch.bfloat16)
    assert torch.equal(torch_ops.rms_norm(norm, x), norm.forward_native(x))
