"""The contents of buckets: checksums notice every changed bit, and deltas are decoded exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.conversion.mapping import Box
from mrl.weight_sync import sender
from mrl.weight_sync.sender import checksums, chunk_views, decode_delta, encode_delta, fill_buffer, weighted_sums
from mrl.weight_sync.transfer_plan import Bucket, TensorChunk

DTYPES = {"float32": 4, "bfloat16": 2}


def bucket_of(shapes, dtypes) -> Bucket:
    chunks = [
        TensorChunk(f"t{i}", Box.whole(shape), f"p{i}", dtype, DTYPES[dtype])
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    return Bucket(0, 0, (0,), tuple(chunks))


def random_buffer(bucket, seed) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    fill_buffer(buffer, bucket, lambda name, box: torch.randn(box.sizes, generator=generator))
    return buffer


@settings(max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    data=st.data(),
)
def test_a_decoded_delta_restores_the_new_bytes_exactly(shapes, data):
    dtypes = [data.draw(st.sampled_from(list(DTYPES))) for _ in shapes]
    bucket = bucket_of(shapes, dtypes)
    old, new = random_buffer(bucket, 0), random_buffer(bucket, 0)
    for index in range(len(shapes)):
        chunk_views(new, bucket)[index].mul_(1 + 1e-3 * index)
    packed = encode_delta(new, old, bucket)
    if packed is not None:
        assert len(packed) < bucket.nbytes
        assert torch.equal(old ^ decode_delta(torch.frombuffer(bytearray(packed), dtype=torch.uint8), bucket), new)


def test_a_small_change_gives_a_small_delta():
    bucket = bucket_of([(64, 64)], ["bfloat16"])
    old = random_buffer(bucket, 0)
    assert len(encode_delta(old, old, bucket)) < 64
    new = old.clone()
    chunk_views(new, bucket)[0][:1] += 0.5
    assert len(encode_delta(new, old, bucket)) < bucket.nbytes / 20
    assert (
        encode_delta(random_buffer(bucket, 1), old, bucket) is None
        or len(encode_delta(random_buffer(bucket, 1), old, bucket)) < bucket.nbytes
    )


def test_chunks_are_cast_to_the_engines_dtype_and_viewed_in_the_buffer():
    bucket = bucket_of([(3, 5), (7,), (2, 2)], ["bfloat16", "float32", "bfloat16"])
    tensors = {f"t{i}": torch.randn(p.box.sizes) for i, p in enumerate(bucket.chunks)}
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    found = fill_buffer(buffer, bucket, lambda name, box: tensors[name])
    for index, chunk in enumerate(bucket.chunks):
        expected = tensors[chunk.name].to(getattr(torch, chunk.dtype))
        assert torch.equal(chunk_views(buffer, bucket)[index], expected)
        assert found[index] == checksums([expected])[0]


def sum_of(tensor: torch.Tensor) -> int:
    """Return the hash that a GPU computes."""
    return weighted_sums([tensor])[0]


@pytest.mark.parametrize("hash_of", [lambda tensor: checksums([tensor])[0], sum_of], ids=["xxh3", "sum"])
def test_the_checksum_changes_with_every_bit_and_with_the_order(hash_of):
    tensor = torch.randn(6, 3)
    hashes = {hash_of(tensor)}
    for byte in range(tensor.nbytes):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            hashes.add(hash_of(changed))
    assert len(hashes) == 1 + 8 * tensor.nbytes
    assert hash_of(tensor.flip(0)) not in hashes
    assert checksums([tensor.t()]) == checksums([tensor.t().contiguous()])


def test_the_checksum_of_a_gpu_covers_all_blocks_and_the_number_of_bytes(monkeypatch):
    """With blocks of 4 words, 2 at once, the data has five parts, and the last part is not full."""
    monkeypatch.setattr(sender, "_BLOCK_WORDS", 4)
    monkeypatch.setattr(sender, "_BLOCKS_AT_ONCE", 2)
    data = torch.randint(0, 256, (2 * 4 * 4 * 4 + 13,), dtype=torch.uint8)
    words = data[: data.numel() // 4 * 4].view(-1, 4)
    hashes = {weighted_sums([data])[0]}
    for byte in range(len(data)):
        changed = data.clone()
        changed[byte] ^= 1
        hashes.add(weighted_sums([changed])[0])
    assert len(hashes) == 1 + len(data)
    swaps = [weighted_sums([words[torch.tensor(order)].reshape(-1)])[0] for order in orders_with_one_swap(len(words))]
    assert len(set(swaps)) == len(swaps)  # no swap of two words is missed
    zeros = [torch.zeros(n, dtype=torch.uint8) for n in range(70)]
    assert len(set(weighted_sums(zeros))) == 70


def orders_with_one_swap(count: int) -> list[list[int]]:
    orders = [list(range(count))]
    for a in range(count):
        for b in range(a):
            orders.append(list(range(count)))
            orders[-1][a], orders[-1][b] = b, a
    return orders


@pytest.mark.parametrize("start", [1, 4, 8])
def test_the_checksum_of_a_gpu_does_not_depend_on_the_position_in_memory(start):
    data = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    memory = torch.zeros(1100, dtype=torch.uint8)
    memory[start : start + 1000] = data
    assert weighted_sums([memory[start : start + 1000], data[:3]]) == (
        *weighted_sums([data]),
        *weighted_sums([data[:3]]),
    )


def test_the_checksum_of_a_gpu_is_the_documented_sum():
    """Python's integers have no overflow, so they give the sum modulo 2**64 by definition."""
    data = torch.randint(0, 256, (24,), dtype=torch.uint8)
    factors = sender._factors(0, sender._BLOCK_WORDS + sender._BLOCKS_AT_ONCE, data.device).tolist()
    assert len(set(factors)) == len(factors) and all(factor % 2 for factor in factors)
    words = data.view(torch.int32).tolist()
    total = sum(word * factor * factors[sender._BLOCK_WORDS] for word, factor in zip(words, factors, strict=False))
    assert weighted_sums([data]) == ((24 * sender._GOLDEN_RATIO + total) % 2**64,)
