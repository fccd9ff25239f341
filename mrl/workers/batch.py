"""A rank's micro-batch: rows of a token block as tensors on its device."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrl.types import Share, TokenBlock
from parallel.packing import PackedSequences, Segment

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass. R response tokens in all; R here: those that this context-parallel rank predicts.

    L tokens lie on this rank (see parallel.packing); all columns are in the order of the rows and their tokens.
    """

    tokens: Tensor  # [L]
    packed: PackedSequences
    predict: Tensor  # [R here] the token, of L, whose hidden state predicts each response token
    targets: Tensor  # [R here] the response tokens
    rollout_logprobs: Tensor  # [R here]
    advantages: Tensor  # [R here]
    weights: Tensor  # [R here] float64 shares of the loss
    kept: Tensor  # [R here] which of the R
    num_responses: int  # R
    old_logprobs: Tensor | None = None  # [R here] before the rollout's first update; None: this is the first

    @classmethod
    def build(
        cls, block: TokenBlock, rows: Ints, share: Share, pack: Callable[[list[Segment]], PackedSequences]
    ) -> "MicroBatch":
        """Rows `rows` of `block`, in that order; without any, one token that counts for nothing."""
        part = block.select(rows) if len(rows) else TokenBlock.from_lists([], [])
        groups = None if share.groups is None else share.groups[rows]
        segments, tokens, predict = _lay_out(part, groups)
        packed = pack(segments)
        local = packed.local_of[predict]
        (kept,) = np.nonzero(local >= 0)
        where = np.repeat(np.arange(len(rows)), part.response_lengths)
        position = np.arange(len(part.tokens)) - np.repeat(part.cu_seqlens[:-1], part.lengths)
        targets = part.tokens[position >= np.repeat(part.prompt_lengths, part.lengths)]

        def column(values: NDArray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(packed.position_ids.device)

        return cls(
            tokens=column(np.where(packed.source >= 0, tokens[packed.source], 0)),
            packed=packed,
            predict=column(local[kept]),
            targets=column(targets[kept].astype(np.int64)),
            rollout_logprobs=column(part.rollout_logprobs[kept]),
            advantages=column(share.advantages[rows][where[kept]]),
            weights=column(share.weights[rows][where[kept]]),
            kept=column(kept),
            num_responses=len(where),
        )

    def after(self, old_logprobs: Tensor) -> "MicroBatch":
        """The same rows, to be trained after other rows have changed the weights."""
        return replace(self, old_logprobs=old_logprobs)


def _lay_out(part: TokenBlock, groups: Ints | None) -> tuple[list[Segment], Ints, Ints]:
    """(segments, [S] their tokens, [R] which of S predicts each response token).

    With `groups`, rows of one group stand under one prompt; without, each row is a segment.
    """
    if not len(part.lengths):
        return [Segment(1)], np.zeros(1, np.int64), np.empty(0, np.int64)
    if groups is None:
        position = np.arange(len(part.tokens)) - np.repeat(part.cu_seqlens[:-1], part.lengths)
        (at,) = np.nonzero(position >= np.repeat(part.prompt_lengths, part.lengths))
        return [Segment(int(length)) for length in part.lengths], part.tokens.astype(np.int64), at - 1
    segments: list[Segment] = []
    pieces: list[NDArray] = []
    prompts: dict[int, tuple[int, int]] = {}  # group -> (segment, its last token among S)
    predict: list[Ints] = []
    end = 0
    for row, group in enumerate(groups.tolist()):
        if group not in prompts:
            prompt = part.prompt(row)
            end += len(prompt)
            prompts[group] = (len(segments), end - 1)
            segments.append(Segment(len(prompt)))
            pieces.append(prompt)
        parent, last = prompts[group]
        response = part.response(row)
        assert np.array_equal(part.prompt(row), pieces[parent]), f"group {group} has more than one prompt"
        segments.append(Segment(len(response), parent))
        pieces.append(response)
        predict.append(np.concatenate([[last], np.arange(end, end + len(response) - 1)]))
        end += len(response)
    return segments, np.concatenate(pieces).astype(np.int64), np.concatenate(predict)
