"""Whether an engine stores weights where the family's table says, in any backend's form: what it loaded by itself, before any
sync, is compared with the files it was loaded from. Names and shapes alone would not tell a gate from an up projection."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from models.conversion.hf_io import HFWeights
from mrl.weight_sync.plan import Bucket, Piece, Place

_NUMBER = re.compile(r"\d+")


def misplaced(
    folder: Path, parameters: Mapping[str, Tensor], buckets: Sequence[tuple[Bucket, Sequence[Place]]]
) -> list[str]:
    """Pieces that differ between the engine and the Hugging Face folder it was started on; of each kind of tensor the first
    piece and the last are looked at, whatever their layer and expert."""
    ends: dict[str, list[tuple[Piece, Place]]] = {}
    for bucket, places in buckets:
        for piece, place in zip(bucket.pieces, places, strict=True):
            found = ends.setdefault(_NUMBER.sub("#", f"{piece.name} {place.param}"), [])
            found[1:] = [(piece, place)]
    weights = HFWeights(folder)
    return [
        f"{piece} in {place.param}"
        for found in ends.values()
        for piece, place in found
        if piece.name in weights and not _same(weights, piece, parameters[place.param][place.box.slices])
    ]


def _same(weights: HFWeights, piece: Piece, live: Tensor) -> bool:
    file = weights.read(piece.name, piece.box.starts, piece.box.sizes)
    return torch.equal(file.to(live.dtype).to(live.device).view(live.shape), live)
