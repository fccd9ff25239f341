"""A trainer rank's micro-batch: rows of a token block as packed tensors on its device."""

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
    """Input of one packed forward pass.

    The micro-batch has R sampled tokens; this context-parallel rank predicts local R of them. The rank has L tokens, including
    padding (see parallel.packing). Columns are ordered by row, then by token.
    """

    tokens: Tensor  # [L]
    packed: PackedSequences
    predictor_index: Tensor  # [local R] index in L of the token whose hidden state predicts the sampled token
    targets: Tensor  # [local R] the sampled tokens
    rollout_logprobs: Tensor  # [local R]
    weights: Tensor  # [local R] float64 weight in the loss
    local_sampled: Tensor  # [local R] index in R of each sampled token of this rank
    num_sampled: int  # R
    responses: Responses
    columns: Mapping[str, Tensor]  # [local R] by name: advantages, old_logprobs, returns, ...
    origin: Ints  # [L] index of the token in the whole block; -1: padding
    routing: Tensor | None = None  # [L, layers, topk] experts that the engine chose; None: the router chooses

    @classmethod
    def build(
        cls,
        block: TokenBlock,
        rows: Ints,
        batch: RankBatch,
        pack: Callable[[list[Segment]], PackedSequences],
        reduce: Callable[[Tensor], Tensor] = Responses.reduce,
    ) -> "MicroBatch":
        """Pack the rows `rows` of `block`, in that order; without rows, one token with no weight in the loss.

        `reduce` sums over context-parallel ranks, see `Responses`.
        """
        part = block.select(rows) if len(rows) else _one_token(block)
        groups = batch.groups[rows] if batch.groups is not None and len(rows) else None
        segments, packed_tokens, predictor_index = _lay_out(part, groups)
        packed = pack(segments)
        local = packed.local_of[predictor_index]
        (local_sampled,) = np.nonzero(local >= 0)
        response_of = np.repeat(np.arange(len(part.lengths)), part.sampled_lengths)
        targets = part.tokens[part.sampled_index]

        if len(rows):
            block_index = np.concatenate([np.arange(block.cu_seqlens[row], block.cu_seqlens[row + 1]) for row in rows])
        else:
            block_index = np.full(1, -1)

        def to_device(values: NDArray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(packed.position_ids.device)

        tokens = np.where(packed.source >= 0, part.tokens[packed_tokens][packed.source], 0)
        routing = None if part.routed_experts is None else _routing(part, packed_tokens, packed.source)
        return cls(
            tokens=to_device(tokens.astype(np.int64)),
            packed=packed,
            predictor_index=to_device(local[local_sampled]),
            targets=to_device(targets[local_sampled].astype(np.int64)),
            rollout_logprobs=to_device(part.rollout_logprobs[local_sampled]),
            weights=to_device(batch.weights[rows][response_of[local_sampled]]),
            local_sampled=to_device(local_sampled),
            num_sampled=len(response_of),
            responses=Responses(to_device(response_of[local_sampled]), to_device(part.sampled_lengths), reduce),
            columns={name: to_device(values[local_sampled]) for name, values in part.columns.items()},
            origin=np.where(packed.source >= 0, block_index[packed_tokens][packed.source], -1),
            routing=None if routing is None else to_device(routing),
        )


def _one_token(block: TokenBlock) -> TokenBlock:
    """Return a block of one token without a response, with the columns of `block`."""
    routing = None if block.routed_experts is None else np.full((1, *block.routed_experts.shape[1:]), -1, np.int16)
    empty = TokenBlock.from_lists([[0]], [[]])
    return replace(empty, routed_experts=routing, columns=dict.fromkeys(block.columns, np.empty(0, np.float32)))


def _lay_out(part: TokenBlock, groups: Ints | None) -> tuple[list[Segment], Ints, Ints]:
    """Lay out a pack of S tokens.

    Returns its segments, [S] the index of each token in `part`, and [R] the index in S of the token that predicts each sampled
    token. With `groups`, the rows of a group share one prompt segment; without, each row is one segment.
    """
    starts, ends = part.cu_seqlens[:-1], part.cu_seqlens[1:]
    if groups is None:
        return [Segment(int(length)) for length in part.lengths], np.arange(len(part.tokens)), part.sampled_index - 1
    segments: list[Segment] = []
    indices: list[Ints] = [np.empty(0, np.int64)]
    predictor_index: list[Ints] = [np.empty(0, np.int64)]
    prompts: dict[int, tuple[int, int, int]] = {}  # group -> (segment of its prompt, index of its last token in S, row)
    end = 0  # tokens so far
    for row, group in enumerate(groups.tolist()):
        response_start = int(starts[row] + part.prompt_lengths[row])
        if group not in prompts:
            indices.append(np.arange(starts[row], response_start))
            end += len(indices[-1])
            prompts[group] = (len(segments), end - 1, row)
            segments.append(Segment(len(indices[-1])))
        prompt_segment, last_prompt_token, first_row = prompts[group]
        assert np.array_equal(part.prompt(row), part.prompt(first_row)), f"group {group} has more than one prompt"
        indices.append(np.arange(response_start, ends[row]))
        length = len(indices[-1])
        segments.append(Segment(length, prompt_segment))
        predictor_index.append(np.concatenate([[last_prompt_token], np.arange(end, end + length - 1)]))
        end += length
    predicting = np.concatenate(predictor_index)
    if part.sampled is not None:
        in_response = part.positions >= np.repeat(part.prompt_lengths, part.lengths)
        predicting = predicting[part.sampled[in_response]]
    return segments, np.concatenate(indices), predicting


def _routing(part: TokenBlock, packed_tokens: Ints, source: Ints) -> NDArray[np.int64]:
    """Return [L, layers, topk] the experts of this rank's tokens.

    Padding, and tokens that the engine did not compute, do not influence the result; they are spread evenly over the experts.
    """
    assert part.routed_experts is not None, "the caller has checked that the block has routed experts"
    experts = part.routed_experts[packed_tokens][source].astype(np.int64)
    unknown = (source < 0)[:, None, None] | (experts < 0)
    num_experts = int(part.routed_experts.max()) + 1
    topk = experts.shape[-1]
    round_robin = (np.arange(len(source))[:, None, None] * topk + np.arange(topk)) % max(num_experts, topk)
    return np.where(unknown, round_robin, experts)
