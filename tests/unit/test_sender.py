"""The contents of buckets: checksums notice every changed bit, and deltas are decoded exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.conversion.mapping import Box
from mrl.weight_sync.sender import _weighted_sum, checksum, chunk_views, decode_delta, encode_delta, fill_buffer
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
    checksums = fill_buffer(buffer, bucket, lambda name, box: tensors[name])
    for index, chunk in enumerate(bucket.chunks):
        expected = tensors[chunk.name].to(getattr(torch, chunk.dtype))
        assert torch.equal(chunk_views(buffer, bucket)[index], expected)
        assert checksums[index] == checksum(expected)


@pytest.mark.parametrize(
    "hash_of", [checksum, lambda t: _weighted_sum(t.view(-1).view(torch.uint8))], ids=["xxh3", "sum"]
)
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
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
