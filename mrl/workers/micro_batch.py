"""A rank's micro-batch: rows of a token block as tensors on its device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrl.algorithms.inputs import Responses
from mrl.core.types import RankBatch, TokenBlock
from parallel.packing import PackedSequences, Segment

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass. R sampled tokens in all; R here: those that this context-parallel rank predicts.

    L tokens lie on this rank (see parallel.packing); all columns are in the order of the rows and their tokens.
    """

    tokens: Tensor  # [L]
    packed: PackedSequences
    predict: Tensor  # [R here] the token, of L, whose hidden state predicts each sampled token
    targets: Tensor  # [R here] the sampled tokens
    rollout_logprobs: Tensor  # [R here]
    weights: Tensor  # [R here] float64 shares of the loss
    kept: Tensor  # [R here] which of the R
    num_sampled: int  # R
    responses: Responses
    columns: Mapping[str, Tensor]  # [R here] by name: advantages, old_logprobs, returns, ...
    origin: Ints  # [L] which token of the whole block lies there; -1: none, it only pads
    routing: Tensor | None = None  # [L, layers, topk] experts that the engine chose; None: the router chooses

    @classmethod
    def build(
        cls,
        block: TokenBlock,
        rows: Ints,
        share: RankBatch,
        pack: Callable[[list[Segment]], PackedSequences],
        reduce: Callable[[Tensor], Tensor] = Responses.reduce,
    ) -> "MicroBatch":
        """Rows `rows` of `block`, in that order; without any, one token that counts for nothing.

        `reduce` adds up over context-parallel ranks, see `Responses`.
        """
        part = block.select(rows) if len(rows) else _nothing(block)
        groups = share.groups[rows] if share.groups is not None and len(rows) else None
        segments, at, predict = _lay_out(part, groups)
        packed = pack(segments)
        local = packed.local_of[predict]
        (kept,) = np.nonzero(local >= 0)
        where = np.repeat(np.arange(len(part.lengths)), part.sampled_lengths)
        targets = part.tokens[part.sampled_index]

        if len(rows):
            index = np.concatenate([np.arange(block.cu_seqlens[row], block.cu_seqlens[row + 1]) for row in rows])
        else:
            index = np.full(1, -1)

        def column(values: NDArray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(packed.position_ids.device)

        return cls(
            tokens=column(np.where(packed.source >= 0, part.tokens[at][packed.source], 0).astype(np.int64)),
            packed=packed,
            predict=column(local[kept]),
            targets=column(targets[kept].astype(np.int64)),
            rollout_logprobs=column(part.rollout_logprobs[kept]),
            weights=column(share.weights[rows][where[kept]]),
            kept=column(kept),
            num_sampled=len(where),
            responses=Responses(column(where[kept]), column(part.sampled_lengths), reduce),
            columns={name: column(values[kept]) for name, values in part.columns.items()},
            origin=np.where(packed.source >= 0, index[at][packed.source], -1),
            routing=None if part.routed_experts is None else column(_routing(part, at, packed.source)),
        )


def _nothing(block: TokenBlock) -> TokenBlock:
    """One token and no response, with the columns of `block`."""
    routing = None if block.routed_experts is None else np.full((1, *block.routed_experts.shape[1:]), -1, np.int16)
    empty = TokenBlock.from_lists([[0]], [[]])
    return replace(empty, routed_experts=routing, columns=dict.fromkeys(block.columns, np.empty(0, np.float32)))


def _lay_out(part: TokenBlock, groups: Ints | None) -> tuple[list[Segment], Ints, Ints]:
    """(segments, [S] which of the block's tokens they hold, [R] which of S predicts each sampled token).

    With `groups`, rows of one group stand under one prompt; without, each row is a segment.
    """
    starts, ends = part.cu_seqlens[:-1], part.cu_seqlens[1:]
    if groups is None:
        return [Segment(int(length)) for length in part.lengths], np.arange(len(part.tokens)), part.sampled_index - 1
    segments: list[Segment] = []
    pieces: list[Ints] = [np.empty(0, np.int64)]
    predict: list[Ints] = [np.empty(0, np.int64)]
    prompts: dict[int, tuple[int, int, int]] = {}  # group -> (segment, its last token among S, its row)
    end = 0
    for row, group in enumerate(groups.tolist()):
        middle = int(starts[row] + part.prompt_lengths[row])
        if group not in prompts:
            pieces.append(np.arange(starts[row], middle))
            end += len(pieces[-1])
            prompts[group] = (len(segments), end - 1, row)
            segments.append(Segment(len(pieces[-1])))
        parent, last, first = prompts[group]
        assert np.array_equal(part.prompt(row), part.prompt(first)), f"group {group} has more than one prompt"
        pieces.append(np.arange(middle, ends[row]))
        segments.append(Segment(len(pieces[-1]), parent))
        predict.append(np.concatenate([[last], np.arange(end, end + len(pieces[-1]) - 1)]))
        end += len(pieces[-1])
    chosen = np.concatenate(predict)
    if part.sampled is not None:
        chosen = chosen[part.sampled[part.positions >= np.repeat(part.prompt_lengths, part.lengths)]]
    return segments, np.concatenate(pieces), chosen


def _routing(part: TokenBlock, at: Ints, source: Ints) -> NDArray[np.int64]:
    """[L, layers, topk] experts of this rank's tokens.

    Tokens that the engine never computed, and those that only pad, are seen by nobody and go to one expert after another.
    """
    assert part.routed_experts is not None, "callers look first"
    chosen = part.routed_experts[at][source].astype(np.int64)
    nobody = (source < 0)[:, None, None] | (chosen < 0)
    num_experts = int(part.routed_experts.max()) + 1
    topk = chosen.shape[-1]
    spread = (np.arange(len(source))[:, None, None] * topk + np.arange(topk)) % max(num_experts, topk)
    return np.where(nobody, spread, chosen)
