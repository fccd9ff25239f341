"""parallel.sparse_attention: the keys that an indexer chooses, compared with a float64 reference without packs."""

import numpy as np
import pytest
import torch

from parallel import device

device.patch_megatron_for_cpu()  # before the first import from Megatron

from segment_trees import random_segments, visible  # noqa: E402

from parallel import sparse_attention  # noqa: E402
from parallel.attention import SoftmaxSettings, attend_batched  # noqa: E402
from parallel.packing import AttentionCall, PackedSequences, Segment, pack  # noqa: E402
from parallel.sparse_attention import IndexerNorm, choose_keys  # noqa: E402

HEADS, CHANNELS = 6, 8
Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def indexer_columns(count: int, seed: int) -> Columns:
    """Return random queries [count, HEADS, CHANNELS], keys [count, CHANNELS] and weights of the heads [count, HEADS]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((count, HEADS, CHANNELS), (count, CHANNELS), (count, HEADS))
    query, key, weights = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, weights


def chosen_by_reference(columns: Columns, segments: list[Segment], topk: int) -> list[set[int]]:
    """Return for each token the tokens to which it attends: the best of equation 1, in float64, one pair at a time."""
    query, key, weights = (column.double() for column in columns)
    chosen = []
    for token, seen in enumerate(visible(segments)):
        scores = {}
        for other in np.flatnonzero(seen).tolist():
            products = query[token] @ key[other]
            scores[other] = float((weights[token] * products.clamp(min=0)).sum())
        chosen.append(set(sorted(scores, key=lambda other: (-scores[other], other))[:topk]))
    return chosen


def rows_of_rank(column: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
    """Return the rows of one rank. The rows of padding tokens are so large that a query would choose them if it could."""
    source = torch.from_numpy(packed.token_index)
    rows = column[source.clamp(min=0)].clone()
    rows[source < 0] = 100.0
    return rows


def chosen_in_packs(columns: Columns, packs: list[PackedSequences], topk: int) -> list[set[int]]:
    """Return the same sets for a pack on all context-parallel ranks, from the masks of the attention calls."""
    query, key, weights = columns
    keys = torch.cat([rows_of_rank(key, packed) for packed in packs])
    source = np.concatenate([packed.token_index for packed in packs])
    chosen: dict[int, set[int]] = {}
    for packed in packs:
        queries = np.arange(len(packed.token_index)) if packed.query_index is None else packed.query_index.numpy()
        key_index = np.arange(len(keys)) if packed.key_index is None else packed.key_index.numpy()
        first_query = first_key = 0
        for call in packed.calls:
            own = queries[first_query : first_query + call.count * call.num_queries]
            read = key_index[first_key : first_key + call.count * call.num_keys]
            of_query, of_heads = (rows_of_rank(column, packed)[own] for column in (query, weights))
            masks = choose_keys(of_query, keys[read], of_heads, call, topk).flatten(0, 1).numpy()
            others = source[read].reshape(call.count, call.num_keys).repeat(call.num_queries, 0)
            for token, mask, other in zip(packed.token_index[own].tolist(), masks, others, strict=True):
                if token >= 0:
                    assert token not in chosen and (other[mask] >= 0).all(), "a real token attends to padding"
                    chosen[token] = set(other[mask].tolist())
            first_query, first_key = first_query + len(own), first_key + len(read)
    return [chosen[token] for token in range(len(query))]


@pytest.mark.extended_after(3)
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("in_token_order", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_chosen_keys_are_the_best_inside_each_sequence(cp_size, in_token_order, seed):
    """The packs have sequences of different lengths and shared prompts. No token chooses a key of another sequence."""
    segments = random_segments(np.random.default_rng(seed))
    columns = indexer_columns(sum(segment.length for segment in segments), seed)
    packs = [
        pack(segments, torch.device("cpu"), cp_rank=rank, cp_size=cp_size, chunks_in_token_order=in_token_order)
        for rank in range(cp_size)
    ]
    lengths = []
    for topk in (1, 3, 7, 1000):
        expected = chosen_by_reference(columns, segments, topk)
        assert chosen_in_packs(columns, packs, topk) == expected
        lengths += map(len, expected)
    assert len(set(lengths)) > 4, "some tokens have fewer keys than the indexer may choose"


def test_a_pack_of_plain_sequences_has_the_choices_of_each_sequence():
    segments = [Segment(23), Segment(4), Segment(31)]
    columns = indexer_columns(58, 5)
    (packed,) = packs = [pack(segments, torch.device("cpu"))]
    assert {call.num_keys for call in packed.calls} == {23, 4, 31}
    found = chosen_in_packs(columns, packs, 6)
    assert found == chosen_by_reference(columns, segments, 6)
    assert all(min(found[token]) >= 27 for token in range(27, 58)), "a key of an earlier sequence"


def test_of_equal_scores_the_earliest_are_chosen():
    """Products below zero count as zero, so equal scores are common."""
    call = AttentionCall(1, 8, 8)
    query = torch.ones(8, 1, 1)
    key = torch.tensor([-1.0, -2.0, 3.0, -1.0, -3.0, 5.0, -1.0, 3.0])[:, None]
    for sign, expected in ((1.0, [0, 2, 5, 7]), (-1.0, [0, 1, 3, 4])):
        mask = choose_keys(query, key, torch.full((8, 1), sign), call, 4)[0]
        assert mask[7].nonzero().flatten().tolist() == expected
        assert mask[1].nonzero().flatten().tolist() == [0, 1], "fewer keys than the indexer may choose"
    mask = choose_keys(query, torch.zeros(8, 1), torch.ones(8, 1), call, 3)[0]
    assert mask.sum(1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3] and mask[7].nonzero().flatten().tolist() == [0, 1, 2]


def test_the_choice_does_not_depend_on_the_size_of_blocks(monkeypatch):
    query, _, weights = indexer_columns(24, 1)
    _, key, _ = indexer_columns(36, 2)
    call = AttentionCall(2, 12, 18)
    expected = choose_keys(query, key, weights, call, 5)
    blocks = []
    scores = sparse_attention.index_scores
    monkeypatch.setattr(sparse_attention, "index_scores", lambda *rows: blocks.append(len(rows[0][0])) or scores(*rows))
    monkeypatch.setattr(sparse_attention, "MAX_INDEX_PRODUCTS", 5 * 2 * HEADS * 18)
    assert torch.equal(choose_keys(query, key, weights, call, 5), expected)
    assert blocks == [5, 5, 2]


def test_attention_over_chosen_keys_is_that_over_these_keys_alone():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(20, 2, width, generator=generator, dtype=torch.float64) for width in (8, 8, 6))
    index = indexer_columns(20, 3)
    calls = (AttentionCall(2, 3, 3), AttentionCall(1, 14, 14))
    masks = [None, choose_keys(*(column[6:] for column in index), calls[1], 4)]
    for tensor in (query, key, value):
        tensor.requires_grad_()
    found = attend_batched(query, key, value, calls, SoftmaxSettings(0.3), masks)
    rows = []
    for token in range(20):
        keys = range(token // 3 * 3, token + 1) if token < 6 else 6 + masks[1][0, token - 6].nonzero().flatten()
        keys = torch.as_tensor([*map(int, keys)])
        logits = torch.einsum("nd,knd->nk", query[token], key[keys]) * 0.3
        rows.append(torch.einsum("nk,knv->nv", logits.softmax(-1), value[keys]))
    expected = torch.stack(rows)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(20, 2, 6, generator=generator, dtype=torch.float64)
    gradients = (torch.autograd.grad(out, (query, key, value), upstream) for out in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_norm_of_the_indexer_stays_in_float32():
    norm = IndexerNorm(4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 1 / 3, -2 / 3, 1e-3]))
    before = norm.weight.clone()
    torch.nn.Sequential(norm).to(torch.bfloat16).half()
    assert norm.weight.dtype == norm.bias.dtype == torch.float32 and torch.equal(norm.weight, before)
