"""parallel.packing: a pack describes its tokens and what each token attends to, for any segment tree and any cp."""

from collections.abc import Iterator
from itertools import pairwise
from math import lcm
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel import device

device.patch_megatron_for_cpu()  # before the first import from Megatron

from segment_trees import ancestors, dense_attention, positions, visible  # noqa: E402
from varlen_kernel import sink_kernels, varlen_attn  # noqa: E402

from parallel.packing import PackedSequences, Segment, pack  # noqa: E402

CPU = torch.device("cpu")
many = settings(max_examples=60)


@st.composite
def trees(draw, most: int = 8, parents: bool = True) -> list[Segment]:
    """Draw a pack of up to `most` segments, in trees with a depth of up to 3."""
    segments: list[Segment] = []
    for number in range(draw(st.integers(1, most))):
        above = [s for s in range(number) if len(ancestors(segments, s)) < 2] if parents else []
        segments.append(Segment(draw(st.integers(1, 9)), draw(st.sampled_from([None, *above]))))
    return segments


cp_sizes, tp_multiples = st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4])


def all_ranks(segments: list[Segment], cp_size: int, tp_multiple: int) -> list[PackedSequences]:
    return [pack(segments, CPU, cp_rank=r, cp_size=cp_size, multiple=tp_multiple) for r in range(cp_size)]


def seen(packs: list[PackedSequences], rank: int) -> Iterator[tuple[int, list[int]]]:
    """Yield (row of a query of `rank`, rows of its keys) as the attention calls say. Rows are numbered over all ranks."""
    packed, local = packs[rank], len(packs[rank].token_index)
    queries = range(local) if packed.query_index is None else packed.query_index.tolist()
    keys = range(local * len(packs)) if packed.key_index is None else packed.key_index.tolist()
    query = key = 0
    for call in packed.calls:
        for _ in range(call.count):
            for place in range(call.num_queries):
                end = key + call.num_keys - call.num_queries + place + 1
                yield rank * local + queries[query + place], list(keys[key:end])
            query, key = query + call.num_queries, key + call.num_keys
    assert (query, key) == (len(queries), len(keys)), "the calls take all that the indices name"


@many
@given(trees(), cp_sizes, tp_multiples)
def test_every_token_is_on_one_rank(segments, cp_size, tp_multiple):
    packs = all_ranks(segments, cp_size, tp_multiple)
    total = sum(segment.length for segment in segments)
    held = [token for packed in packs for token in packed.token_index.tolist() if token >= 0]
    assert sorted(held) == list(range(total))
    assert {packed.num_tokens for packed in packs} == {total}


@many
@given(trees(), cp_sizes, tp_multiples)
def test_ranks_have_equal_token_counts_and_little_padding(segments, cp_size, tp_multiple):
    packs = all_ranks(segments, cp_size, tp_multiple)
    (local,) = {len(packed.token_index) for packed in packs}
    assert local % tp_multiple == 0
    # A segment gets less padding than it has chunks. The last segment is also padded to the next common multiple.
    chunks = 2 * cp_size if cp_size > 1 else 1
    most = (chunks - 1) * len(segments) + lcm(chunks, cp_size * tp_multiple) - chunks
    assert 0 <= local * cp_size - packs[0].num_tokens <= most
    for packed in packs:
        pads = torch.from_numpy(packed.token_index < 0)
        assert torch.equal(pads, torch.zeros_like(pads) if packed.padding is None else packed.padding)


@many
@given(trees(), cp_sizes, tp_multiples)
def test_positions_count_from_the_start_of_the_root_segment(segments, cp_size, tp_multiple):
    expected = positions(segments)
    for packed in all_ranks(segments, cp_size, tp_multiple):
        for token, position in zip(packed.token_index.tolist(), packed.position_ids.tolist(), strict=True):
            assert position == expected[token] if token >= 0 else position >= 0
        assert packed.max_position == packed.position_ids.max()


@many
@given(trees(), cp_sizes, tp_multiples)
def test_local_of_is_the_inverse_of_source(segments, cp_size, tp_multiple):
    for packed in all_ranks(segments, cp_size, tp_multiple):
        for token, place in enumerate(packed.index_on_rank.tolist()):
            assert packed.token_index[place] == token if place >= 0 else token not in packed.token_index
        for place, token in enumerate(packed.token_index.tolist()):
            assert token < 0 or packed.index_on_rank[token] == place


@many
@given(trees(), cp_sizes, tp_multiples)
def test_attention_calls_list_exactly_the_tokens_that_each_token_attends_to(segments, cp_size, tp_multiple):
    packs = all_ranks(segments, cp_size, tp_multiple)
    source = [token for packed in packs for token in packed.token_index.tolist()]  # token of each gathered row
    expected = [set(row.nonzero()[0].tolist()) for row in visible(segments)]
    ends = [sum(s.length for s in segments[: number + 1]) - 1 for number in range(len(segments))]
    whole = {
        frozenset(expected[end]): number for number, end in enumerate(ends)
    }  # tokens that the last token of a segment attends to -> segment
    owner, padding_keys, queries = {}, {}, []
    for rank in range(cp_size):
        for query, keys in seen(packs, rank):
            queries.append(query)
            assert len(keys) == len(set(keys)), "no key counts twice"
            real = {source[key] for key in keys if source[key] >= 0}
            if source[query] >= 0:
                assert real == expected[source[query]] and len(real) == len(keys), "no padding key"
            else:  # a padding token follows all tokens of its segment
                owner[query] = whole[frozenset(real)]
                padding_keys[query] = [key for key in keys if source[key] < 0]
    assert sorted(queries) == list(range(len(source))), "each row asks once"
    for query, keys in padding_keys.items():
        assert query in keys and all(owner[key] == owner[query] for key in keys)


@many
@given(trees(), cp_sizes, tp_multiples)
def test_ranks_compute_equal_numbers_of_attention_scores(segments, cp_size, tp_multiple):
    scores = {
        sum(call.count * call.num_queries * call.num_keys for call in packed.calls)
        for packed in all_ranks(segments, cp_size, tp_multiple)
    }
    assert len(scores) == 1


@many
@given(trees())
def test_chunks_of_equal_shape_share_one_call(segments):
    shapes = [(call.num_queries, call.num_keys) for call in pack(segments, CPU).calls]
    assert len(shapes) == len(set(shapes))


@many
@given(trees(parents=False), cp_sizes, tp_multiples)
def test_cu_seqlens_are_the_padded_lengths_of_all_ranks(segments, cp_size, tp_multiple):
    packs = [
        pack(segments, CPU, cp_rank=r, cp_size=cp_size, multiple=tp_multiple, cu_seqlens=True) for r in range(cp_size)
    ]
    for packed in packs:
        sums = packed.cu_seqlens_q.tolist()
        sizes = [end - start for start, end in pairwise(sums)]
        assert sums[0] == 0 and sums[-1] == len(packed.token_index) * cp_size
        assert all(size >= segment.length for size, segment in zip(sizes, segments, strict=True))
        assert all(size % (2 * cp_size) == 0 for size in sizes) or cp_size == 1
        assert packed.max_seqlen_q == packed.max_seqlen_kv == max(sizes)
        assert torch.equal(packed.cu_seqlens_q, packed.cu_seqlens_kv) and packed.cu_seqlens_q.dtype == torch.int32


def test_cu_seqlens_are_set_only_on_request():
    assert pack([Segment(3)], CPU).cu_seqlens_q is None


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], r"no segment may be empty: got lengths \[\]"),
        ([Segment(2), Segment(0)], r"no segment may be empty: got lengths \[2, 0\]"),
        ([Segment(2, 0)], "segment 0 continues segment 0, which does not come before it"),
        ([Segment(2), Segment(1, 2), Segment(1)], "segment 1 continues segment 2, which does not come before it"),
        ([Segment(2), Segment(1, -1)], "segment 1 continues segment -1"),
    ],
)
def test_an_invalid_pack_raises_an_error(segments, message):
    with pytest.raises(ValueError, match=message):
        pack(segments, CPU)


@many
@given(trees(), cp_sizes, st.booleans())
def test_the_bounds_of_chunks_are_those_of_the_calls(segments, cp_size, chunks_in_token_order):
    packed = pack(segments, CPU, cp_size=cp_size, chunks_in_token_order=chunks_in_token_order)
    shapes = [(call.num_queries, call.num_keys) for call in packed.calls for _ in range(call.count)]
    queries, keys = (bounds.diff().tolist() for bounds in (packed.chunks.queries, packed.chunks.keys))
    assert list(zip(queries, keys, strict=True)) == shapes
    assert (packed.chunks.max_queries, packed.chunks.max_keys) == tuple(map(max, zip(*shapes, strict=True)))


@many
@given(trees(), cp_sizes, tp_multiples)
def test_a_pack_in_order_needs_no_permutation_of_queries(segments, cp_size, tp_multiple):
    assert pack(segments, CPU, cp_size=cp_size, multiple=tp_multiple, chunks_in_token_order=True).query_index is None


@many
@given(trees(parents=False), tp_multiples)
def test_a_pack_in_order_without_shared_prompts_needs_no_permutation_of_keys(segments, tp_multiple):
    assert pack(segments, CPU, multiple=tp_multiple, chunks_in_token_order=True).key_index is None


def attend(
    *columns: torch.Tensor,
    packed: PackedSequences,
    window: int | None = None,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
):
    """Return the attention of a model that is evaluated. `columns`: query, key, value. `dropout` is the rate in training."""
    from parallel.attention import PackedAttention

    query, key, value = columns
    limits = dict(window_size=None if window is None else (window - 1, 0), window_attn_skip_freq=None)
    heads = dict(kv_channels=query.size(2), num_attention_heads=query.size(1), params_dtype=query.dtype)
    softmax = dict(attention_dropout=dropout, softmax_type="vanilla" if sinks is None else "learnable")
    group = SimpleNamespace(size=lambda: 1)
    alone = SimpleNamespace(cp=group, tp=group)
    config = SimpleNamespace(**heads, **softmax, **limits)
    module = PackedAttention(config, 1, None, "self", pg_collection=alone).eval()
    parameters = {} if sinks is None else dict(softmax_offset=sinks)
    return torch.func.functional_call(module, parameters, (query, key, value), dict(packed_seq_params=packed))


windows = st.sampled_from([None, 1, 2, 3, 6])
heads_of_queries_and_keys = st.sampled_from([(4, 4), (4, 2), (4, 1), (3, 1), (1, 1)])


@many
@given(trees(), heads_of_queries_and_keys, tp_multiples, windows, st.integers(0, 99))
def test_attention_equals_attention_with_a_dense_mask(segments, heads, tp_multiple, window, seed):
    check_attention(segments, pack(segments, CPU, multiple=tp_multiple), heads, window, seed)


@many
@given(trees(), heads_of_queries_and_keys, tp_multiples, windows, st.integers(0, 99))
def test_the_attention_of_gpus_equals_attention_with_a_dense_mask(segments, heads, tp_multiple, window, seed):
    from parallel import attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "supports_varlen", lambda device, dtype: True)
        patch.setattr(attention, "_varlen_kernel", lambda channels: varlen_attn)
        packed = pack(segments, CPU, multiple=tp_multiple, chunks_in_token_order=True)
        check_attention(segments, packed, heads, window, seed)


@many
@given(trees(), heads_of_queries_and_keys, tp_multiples, windows, st.integers(0, 99))
def test_attention_with_sinks_equals_a_further_column_of_logits(segments, heads, tp_multiple, window, seed):
    check_attention(segments, pack(segments, CPU, multiple=tp_multiple), heads, window, seed, sinks=True)


@pytest.mark.extended
@many
@given(trees(), heads_of_queries_and_keys, tp_multiples, windows, st.integers(0, 99))
def test_the_attention_of_gpus_with_sinks_equals_a_further_column_of_logits(segments, heads, tp_multiple, window, seed):
    from parallel import attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "supports_varlen", lambda device, dtype: True)
        patch.setattr(attention, "_varlen_kernel", lambda channels: varlen_attn)
        patch.setattr(attention, "_varlen_kernel_pair", sink_kernels)
        packed = pack(segments, CPU, multiple=tp_multiple, chunks_in_token_order=True)
        check_attention(segments, packed, heads, window, seed, sinks=True)


def test_attention_with_sinks_is_the_attention_of_gpt_oss_in_transformers():
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    mask = torch.full((7, 7), float("-inf"), dtype=torch.float64).triu(1)
    columns = [column.transpose(0, 1)[None] for column in (query, key, value)]
    expected, _ = eager_attention_forward(module, *columns, mask, scaling=0.5)
    found = attend(query, key, value, packed=pack([Segment(7)], CPU), sinks=sinks)
    torch.testing.assert_close(found, expected[0].flatten(1))


def test_sinks_are_not_rounded_to_16_bits():
    """Without keys that differ, the output is K / (K + exp(sink)). Sinks and keys are in bfloat16."""
    from parallel.attention import append_sinks

    sinks, scale = torch.tensor([3.015625, -1.5]).bfloat16(), 0.3  # sink / scale needs more than the 8 bits of bfloat16
    columns = [torch.zeros(1, 2, 5, 4, dtype=torch.bfloat16) for _ in range(3)]
    query, key, value = append_sinks(*columns, sinks, scale)
    logits = torch.einsum("bnqd,bnkd->bnqk", query.float(), key.float()) * scale
    torch.testing.assert_close(logits[0, :, 0, -1], sinks.float(), rtol=1e-4, atol=0)
    assert not logits[..., :-1].any() and not value.any() and value.shape == key.shape == (1, 2, 6, 6)


def test_a_window_is_the_sliding_window_of_transformers():
    """The reference is the mask of Gemma 3 and OLMo 3 in transformers."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    mask = sliding_window_causal_mask_function(3)
    expected = [[bool(mask(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(7)] for q in range(7)]
    value = torch.eye(7, dtype=torch.float64)[:, None]  # the output of a token has its attention to each token
    query = key = torch.zeros(7, 1, 7, dtype=torch.float64)
    assert (attend(query, key, value, packed=pack([Segment(7)], CPU), window=3) > 0).tolist() == expected


def test_the_attention_of_gpus_accepts_values_with_fewer_channels_than_keys(monkeypatch):
    from parallel import attention

    packed = pack([Segment(3), Segment(2, 0)], CPU, chunks_in_token_order=True)
    query, key, value = (torch.randn(5, 2, width, dtype=torch.float64) for width in (6, 6, 4))
    expected = attend(query, key, value, packed=packed)
    monkeypatch.setattr(attention, "supports_varlen", lambda device, dtype: True)
    monkeypatch.setattr(attention, "_varlen_kernel", lambda channels: varlen_attn)
    torch.testing.assert_close(attend(query, key, value, packed=packed), expected)


@pytest.mark.parametrize(
    ("installed", "broken", "gpu", "activated"),
    [
        ("34", "", ((9, 0), 128), ["FA3"]),
        ("3", "", ((8, 0), 128), []),
        ("", "", ((9, 0), 128), []),
        ("4", "", ((9, 0), 128), []),
        ("34", "", ((10, 0), 128), ["FA4"]),
        ("4", "", ((10, 3), 256), ["FA4"]),
        ("4", "", ((10, 0), 192), []),
        ("4", "", ((12, 0), 128), []),
        ("34", "3", ((9, 0), 128), ["FA3"]),
        ("4", "4", ((10, 0), 128), ["FA4"]),
    ],
)
def test_flash_attention_3_and_4_are_used_if_they_are_installed_and_fit_the_gpu(
    monkeypatch, tmp_path, caplog, installed, broken, gpu, activated
):
    import sys

    from torch.nn import attention as torch_attention

    from parallel import attention

    (capability, channels), found = gpu, []

    def activate(name: str) -> None:
        found.append(name)
        if name[2:] in broken:
            raise ImportError(f"no kernel of {name}")

    def find_spec(name: str) -> object | None:
        version = {"flash_attn_interface": "3", "flash_attn": "4"}[name]
        return SimpleNamespace(submodule_search_locations=[tmp_path]) if version in installed else None

    (tmp_path / "cute").mkdir()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=varlen_attn))
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(attention, "has_cuda", lambda: True)
    monkeypatch.setattr(attention, "find_spec", find_spec)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert attention._varlen_kernel.__wrapped__(channels) is varlen_attn and found == activated
    assert [record.getMessage() for record in caplog.records] == [
        f"FlashAttention-{version} is installed but cannot be used: no kernel of FA{version}" for version in broken
    ]


def test_flash_attn_2_without_the_module_of_flash_attention_4_is_not_taken_for_it(monkeypatch, tmp_path):
    from parallel import attention

    monkeypatch.setattr(attention, "has_cuda", lambda: True)
    package = SimpleNamespace(submodule_search_locations=[tmp_path])
    monkeypatch.setattr(attention, "find_spec", lambda name: package if name == "flash_attn" else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert attention.flash_attention_versions(128) == [2]


def test_a_model_with_dropout_activates_no_flash_attention_that_has_none(monkeypatch):
    from parallel import attention

    packed = pack([Segment(3), Segment(2, 0)], CPU, chunks_in_token_order=True)
    inputs = [torch.randn(5, 2, 4) for _ in range(3)]
    expected = attend(*inputs, packed=packed)
    monkeypatch.setattr(attention, "supports_varlen", lambda device, dtype: True)
    monkeypatch.setattr(attention, "_varlen_kernel", lambda channels: pytest.fail("this activates a kernel"))
    torch.testing.assert_close(attend(*inputs, packed=packed, dropout=0.1), expected)


def test_gradients_of_shared_keys_are_summed_in_float32_on_gpus():
    from parallel.attention import _GatherRows, _gradient_sum_dtype

    on_gpu = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True)
    assert _gradient_sum_dtype(on_gpu) is torch.float32
    assert _gradient_sum_dtype(torch.ones(1, dtype=torch.bfloat16)) is torch.bfloat16
    prompt = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = _GatherRows.apply(prompt, torch.zeros(300, dtype=torch.int64), torch.float32)
    gathered.sum().backward()
    assert prompt.grad.item() == 300, "a sum of ones in bfloat16 stops at 256"


def test_attention_sums_the_gradients_of_keys_and_values_in_that_dtype(monkeypatch):
    """If float64 gradients are summed in float32, the sums have only the precision of float32."""
    from parallel import attention

    monkeypatch.setattr(attention, "_gradient_sum_dtype", lambda rows: torch.float32)
    packed = pack([Segment(3), *[Segment(2, 0)] * 4], CPU)
    generator = torch.Generator().manual_seed(0)
    query, key, value, cotangent = (torch.randn(11, 1, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = [column.requires_grad_() for column in (query, key, value)]
    attend(*inputs, packed=packed).backward(cotangent.flatten(1))
    rounded = [column.grad.float().double().equal(column.grad) for column in inputs]
    assert rounded == [False, True, True]


def check_attention(
    segments: list[Segment],
    packed: PackedSequences,
    heads: tuple[int, int],
    window: int | None,
    seed: int,
    sinks: bool = False,
) -> None:
    """Compare outputs and gradients with those of attention with a dense mask. `sinks`: whether each query head has a sink."""
    generator, width = torch.Generator().manual_seed(seed), 3

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    columns = [
        random(len(packed.token_index), n, width) for n in (heads[0], heads[1], heads[1])
    ]  # padding tokens have random values too
    where = torch.from_numpy(packed.index_on_rank)
    cotangent = random(packed.num_tokens, heads[0] * width)
    ours = [column.clone().requires_grad_() for column in columns]
    theirs = [column.clone().requires_grad_() for column in columns]
    of_heads = random(heads[0])
    ours += [of_heads.clone().requires_grad_()] * sinks
    theirs += [of_heads.clone().requires_grad_()] * sinks
    options = dict(packed=packed, window=window)
    found = attend(*ours[:3], **options, sinks=ours[3] if sinks else None)
    expected = dense_attention(
        *(column[where] for column in theirs[:3]),
        segments=segments,
        window=window,
        sinks=theirs[3] if sinks else None,
    )
    torch.testing.assert_close(found[where], expected, rtol=1e-12, atol=1e-12)
    (found[where] * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-11, atol=1e-12)
    for mine in ours[:3]:
        assert packed.padding is None or not mine.grad[packed.padding].any(), "padding has no part in real tokens"
