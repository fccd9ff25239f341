"""What buckets carry: hashes that see every bit, and differences that come back exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.conversion.mapping import Box
from mrl.weight_sync.sender import _weighted_sum, checksum, decode, encode, fill, views
from mrl.weight_sync.transfer_plan import Bucket, TensorChunk

DTYPES = {"float32": 4, "bfloat16": 2}


def bucket_of(shapes, dtypes) -> Bucket:
    pieces = [
        TensorChunk(f"t{i}", Box.whole(shape), f"p{i}", dtype, DTYPES[dtype])
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    return Bucket(0, 0, (0,), tuple(pieces))


def laid_out(bucket, seed) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    fill(flat, bucket, lambda piece: torch.randn(piece.box.sizes, generator=generator))
    return flat


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    data=st.data(),
)
def test_a_difference_comes_back_exactly(shapes, data):
    dtypes = [data.draw(st.sampled_from(list(DTYPES))) for _ in shapes]
    bucket = bucket_of(shapes, dtypes)
    old, new = laid_out(bucket, 0), laid_out(bucket, 0)
    for index in range(len(shapes)):
        views(new, bucket)[index].mul_(1 + 1e-3 * index)
    packed = encode(new, old, bucket)
    if packed is not None:
        assert len(packed) < bucket.nbytes
        assert torch.equal(old ^ decode(torch.frombuffer(bytearray(packed), dtype=torch.uint8), bucket), new)


def test_small_changes_are_small():
    bucket = bucket_of([(64, 64)], ["bfloat16"])
    old = laid_out(bucket, 0)
    assert len(encode(old, old, bucket)) < 64
    new = old.clone()
    views(new, bucket)[0][:1] += 0.5
    assert len(encode(new, old, bucket)) < bucket.nbytes / 20
    assert (
        encode(laid_out(bucket, 1), old, bucket) is None
        or len(encode(laid_out(bucket, 1), old, bucket)) < bucket.nbytes
    )


def test_pieces_are_cast_and_read_back_in_place():
    bucket = bucket_of([(3, 5), (7,), (2, 2)], ["bfloat16", "float32", "bfloat16"])
    tensors = {f"t{i}": torch.randn(p.box.sizes) for i, p in enumerate(bucket.pieces)}
    flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    checksums = fill(flat, bucket, lambda piece: tensors[piece.name])
    for index, piece in enumerate(bucket.pieces):
        expected = tensors[piece.name].to(getattr(torch, piece.dtype))
        assert torch.equal(views(flat, bucket)[index], expected)
        assert checksums[index] == checksum(expected)


@pytest.mark.parametrize(
    "hashed", [checksum, lambda t: _weighted_sum(t.view(-1).view(torch.uint8))], ids=["xxh3", "sum"]
)
def test_every_bit_and_every_place_counts(hashed):
    tensor = torch.randn(6, 3)
    seen = {hashed(tensor)}
    for byte in range(tensor.nbytes):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            seen.add(hashed(changed))
    assert len(seen) == 1 + 8 * tensor.nbytes
    assert hashed(tensor.flip(0)) not in seen
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
