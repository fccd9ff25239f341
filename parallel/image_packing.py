"""Images of a pack: where the vision tower's outputs go, and positions of tokens along three axes (time, height, width).

A square of merge_size**2 patches gives one output of the vision tower, and this output replaces the embedding of one image token.
This module does not communicate. In shapes, S is the number of tokens of all sequences of a micro-batch, and L is the number of
tokens of the pack on this rank.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallel.device import copy_to_device
from parallel.packing import PackedSequences

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PackedImages:
    """All images of a pack, and the image tokens of this rank."""

    # [patches, values of a patch] float32; on the host, because all packs of a step exist at the same time, and only the first
    # pipeline stage reads the pixels
    pixel_values: Tensor
    grid_thw: Tensor  # [images, 3] number of patches along time, height and width; on the host
    token_index: Tensor  # [image tokens of this rank] index of each image token among the L tokens of this rank
    # [image tokens of this rank] index of the token's embedding among the outputs of the vision tower
    output_index: Tensor


def multimodal_positions(is_image: NDArray[np.bool_], grids: Ints, merge_size: int) -> Ints:
    """Return the positions [3, n] of the n tokens of a sequence along time, height and width (arXiv:2409.12191, section 2.1).

    A text token has the same position along all axes. The tokens of an image start at the next free position p: the token in row
    y and column x of the image has the positions (p, p + y, p + x). The text after an image of H x W tokens continues at
    p + max(H, W).

    Args:
        is_image: [n] whether a token is an image token.
        grids: [images, 3] number of patches of each image along time, height and width.
        merge_size: merge_size**2 patches are one token.

    Raises AssertionError if `is_image` marks another number of tokens than the images of `grids` have.
    """
    sizes = grids // (1, merge_size, merge_size)
    assert is_image.sum() == sizes.prod(1).sum(), f"{is_image.sum()} image tokens for images of {sizes.tolist()} tokens"
    positions = np.empty((3, len(is_image)), np.int64)
    tokens = np.flatnonzero(is_image)
    # start: index of the next text; first: index in `tokens` of the next image's first token; position: next free position
    start, first, position = 0, 0, 0
    for frames, height, width in sizes.tolist():
        begin, count = int(tokens[first]), frames * height * width
        positions[:, start:begin] = position + np.arange(begin - start)
        position += begin - start
        inside = np.stack(np.unravel_index(np.arange(count), (frames, height, width)))
        positions[:, begin : begin + count] = position + inside
        position += max(height, width)
        start, first = begin + count, first + count
    positions[:, start:] = position + np.arange(len(is_image) - start)
    return positions


@dataclass
class SequenceImages:
    """Images of a micro-batch before packing. `positions` and `output_index` have one entry for each of the S tokens."""

    positions: Ints  # [3, S]
    # [S] index of the token's embedding among the outputs of the vision tower; -1: not an image token
    output_index: Ints
    pixel_values: list[NDArray[np.float32]] = field(default_factory=list)
    grids: list[Ints] = field(default_factory=list)

    @classmethod
    def without_images(cls, positions: Ints) -> "SequenceImages":
        """Return the description of sequences without images. `positions` [S]: position of each token in its sequence."""
        return cls(np.tile(positions, (3, 1)), np.full(len(positions), -1, np.int64))

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the vision tower for the images so far. The outputs of the next image begin at this index."""
        return int(self.output_index.max(initial=-1)) + 1

    def add(
        self,
        span: slice,
        is_image: NDArray[np.bool_],
        pixel_values: NDArray[np.float32],
        grids: Ints,
        merge_size: int,
        first_output: int | None = None,
    ) -> int:
        """Add the images of the sequence whose tokens are `span`. Returns the index of the first output of these images.

        `span`: indices of the tokens among the S tokens. `is_image`: whether each token of the sequence is an image token.
        `first_output`: result of an earlier call with the same images; the vision tower then computes these images only once.
        """
        start = self.num_outputs if first_output is None else first_output
        if first_output is None:
            self.pixel_values.append(pixel_values)
            self.grids.append(grids)
        self.positions[:, span] = multimodal_positions(is_image, grids, merge_size)
        self.output_index[span][is_image] = start + np.arange(is_image.sum())
        return start

    def pack(self, packed: PackedSequences, index_in_part: Ints) -> PackedSequences:
        """Return `packed` with the images.

        `index_in_part`: for each real token of the pack, its index among the S tokens of the micro-batch (a part of the
        mini-batch).
        """
        device, is_real = packed.position_ids.device, packed.token_index >= 0
        tokens = index_in_part[packed.token_index]  # for padding, the index is arbitrary
        output_index = np.where(is_real, self.output_index[tokens], -1)
        local = np.flatnonzero(output_index >= 0)
        return replace(
            packed,
            axis_position_ids=copy_to_device(np.ascontiguousarray(self.positions[:, tokens] * is_real), device),
            images=PackedImages(
                torch.from_numpy(np.concatenate(self.pixel_values)),
                torch.from_numpy(np.concatenate(self.grids)),
                copy_to_device(local, device),
                copy_to_device(output_index[local], device),
            ),
        )
