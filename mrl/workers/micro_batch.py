"""Micro-batch of a trainer rank: rows of a token block, as packed tensors on the device of the rank.

A trainer rank has L tokens of a micro-batch, including padding (see parallel.packing). The micro-batch has R sampled tokens, and
a context-parallel rank predicts `local R` of these tokens. All tensors [local R] are ordered by row, then by token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from models.architecture import VisionTower
from mrl.algorithms.inputs import Responses
from mrl.core.types import ReplicaBatch, TeacherOutputs, TokenBlock
from parallel.device import copy_to_device
from parallel.image_packing import SequenceImages
from parallel.packing import PackedSequences, Segment

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TeacherTensors:
    """The outputs of one teacher for n of the sampled tokens that a rank predicts."""

    index: Tensor  # [n] index of each of the n tokens among the `local R` sampled tokens of the rank
    outputs: Mapping[str, Tensor]  # name -> [n, width], see mrl.core.types.TeacherOutputs


@dataclass(frozen=True)
class MtpTargets:
    """The n sampled tokens that one MTP layer predicts on a rank. The layer predicts no tokens near the beginning of a row."""

    index: Tensor  # [n] which of the L tokens predicts the sampled token
    targets: Tensor  # [n] the sampled tokens


@dataclass(frozen=True)
class MicroBatch:
    """Input of one packed forward pass on one trainer rank."""

    tokens: Tensor  # [L]
    packed: PackedSequences  # layout of these L tokens, see parallel.packing
    predictor_index: Tensor  # [local R] which of the L tokens predicts the sampled token
    targets: Tensor  # [local R] the sampled tokens
    rollout_logprobs: Tensor  # [local R]
    weights: Tensor  # [local R] float64; token weight of each sampled token
    local_sampled: Tensor  # [local R] which of the R sampled tokens this rank predicts
    num_sampled: int  # R
    responses: Responses  # the responses to which the sampled tokens belong
    columns: Mapping[str, Tensor]  # name (advantages, old_logprobs, returns, ...) -> [local R]
    block_index: Ints  # [L] index of each token in the whole block; -1: padding
    routing: Tensor | None = None  # [L, layers, topk] experts that the engine chose; None: the trainer's router chooses
    teachers: Mapping[str, TeacherTensors] = field(default_factory=dict)  # only teachers with outputs for these rows
    mtp: tuple[MtpTargets, ...] = ()  # one entry for each MTP layer; (): MTP layers do not run
    num_sampled_in_mini_batch: int = 1  # number of sampled tokens in the mini-batch, over all replicas

    @classmethod
    def build(
        cls,
        block: TokenBlock,
        rows: Ints,
        batch: ReplicaBatch,
        pack: Callable[[list[Segment]], PackedSequences],
        sum_over_ranks: Callable[[Tensor], Tensor] = Responses.sum_over_ranks,
        vision: VisionTower | None = None,
        mtp_layers: int = 0,
    ) -> "MicroBatch":
        """Pack the rows `rows` of `block`, in this order. If `rows` is empty, pack one token that has no weight in the loss.

        `batch` is the replica's part of the mini-batch: it has the token weights and the groups of the rows. `pack` lays out
        segments as one pack, and returns the part on this rank (see parallel.packing). `sum_over_ranks` sums a
        tensor over the context-parallel ranks, see `Responses`. `vision` describes the vision tower of an image model.
        `mtp_layers`: number of MTP layers that run; 0 if the rows of a group share one prompt.
        """
        part = block.select(rows) if len(rows) else _one_token(block)
        groups = batch.groups[rows] if batch.groups is not None and len(rows) else None
        segments, index_in_part, predictor_index = _lay_out(part, groups)
        packed = pack(segments)
        if part.images:
            assert vision is not None, "the driver gives images only to image models"
            packed = _images(part, vision).pack(packed, index_in_part)
        local = packed.index_on_rank[predictor_index]
        (local_sampled,) = np.nonzero(local >= 0)
        response_of = np.repeat(np.arange(len(part.lengths)), part.sampled_lengths)
        targets = part.tokens[part.sampled_index]

        if len(rows):
            index_in_block = np.concatenate(
                [np.arange(block.cu_seqlens[row], block.cu_seqlens[row + 1]) for row in rows]
            )
        else:
            index_in_block = np.full(1, -1)

        def to_device(values: NDArray) -> Tensor:
            return copy_to_device(np.ascontiguousarray(values), packed.position_ids.device)

        if mtp_layers:
            assert groups is None, "the plan refuses shared prompts with MTP layers"
            packed = replace(packed, later_tokens=to_device(_later_tokens(part, packed.token_index, mtp_layers)))
        tokens = np.where(packed.token_index >= 0, part.tokens[index_in_part][packed.token_index], 0)
        routing = None if part.routed_experts is None else _routing(part, index_in_part, packed.token_index)
        return cls(
            tokens=to_device(tokens.astype(np.int64)),
            packed=packed,
            predictor_index=to_device(local[local_sampled]),
            targets=to_device(targets[local_sampled].astype(np.int64)),
            rollout_logprobs=to_device(part.rollout_logprobs[local_sampled]),
            weights=to_device(batch.weights[rows][response_of[local_sampled]]),
            local_sampled=to_device(local_sampled),
            num_sampled=len(response_of),
            responses=Responses(to_device(response_of[local_sampled]), to_device(part.sampled_lengths), sum_over_ranks),
            columns={name: to_device(values[local_sampled]) for name, values in part.columns.items()},
            block_index=np.where(packed.token_index >= 0, index_in_block[index_in_part][packed.token_index], -1),
            routing=None if routing is None else to_device(routing),
            teachers={
                teacher: _teacher_tensors(by_row, part.sampled_lengths, local_sampled, to_device)
                for teacher, by_row in part.teachers.items()
                if by_row
            },
            mtp=tuple(_mtp_targets(part, packed, depth, to_device) for depth in range(1, mtp_layers + 1)),
            num_sampled_in_mini_batch=batch.sampled_tokens,
        )


def _one_token(block: TokenBlock) -> TokenBlock:
    """Return a block of one token without a response. It has the same columns as `block`."""
    routing = None if block.routed_experts is None else np.full((1, *block.routed_experts.shape[1:]), -1, np.int16)
    empty = TokenBlock.from_lists([[0]], [[]])
    return replace(empty, routed_experts=routing, columns=dict.fromkeys(block.columns, np.empty(0, np.float32)))


def _images(part: TokenBlock, vision: VisionTower) -> SequenceImages:
    """Return the images of the prompts of `part`. Images that several rows share are computed only once."""
    found = SequenceImages.without_images(part.positions)
    first_outputs: dict[int, int] = {}  # id of the images of a row -> index of their first output of the vision tower
    for row, images in sorted(part.images.items()):
        span = slice(part.cu_seqlens[row], part.cu_seqlens[row + 1])
        is_image = part.tokens[span] == vision.image_token
        is_image[part.prompt_lengths[row] :] = False  # a sampled token is never an image
        first_outputs[id(images)] = found.add(
            span, is_image, images.pixel_values, images.grid_thw, vision.merge_size, first_outputs.get(id(images))
        )
    return found


def _later_tokens(part: TokenBlock, token_index: Ints, mtp_layers: int) -> Ints:
    """Return [MTP layers, L]: for MTP layer k = 1, 2, ... and each token, the token k positions later in the same row.

    The entry is 0 if the row has no such token, and at padding. `token_index` [L]: index of each token in `part`; -1: padding.
    """
    ends = np.repeat(part.cu_seqlens[1:], part.lengths)[token_index]  # end of the row of each token
    later = token_index + np.arange(1, mtp_layers + 1)[:, None]
    exists = (token_index >= 0) & (later < ends)
    return np.where(exists, part.tokens[np.where(exists, later, 0)], 0).astype(np.int64)


def _mtp_targets(
    part: TokenBlock, packed: PackedSequences, depth: int, to_device: Callable[[NDArray], Tensor]
) -> MtpTargets:
    """Return the sampled tokens that MTP layer `depth` (1, 2, ...) predicts on this rank.

    The layer predicts a token from the token that is `depth` + 1 positions earlier in the same row, if there is one.
    """
    starts = np.repeat(part.cu_seqlens[:-1], part.sampled_lengths)  # first token of the row of each sampled token
    predictors = part.sampled_index - 1 - depth
    sampled, predictors = part.sampled_index[predictors >= starts], predictors[predictors >= starts]
    local = packed.index_on_rank[predictors]
    return MtpTargets(to_device(local[local >= 0]), to_device(part.tokens[sampled[local >= 0]].astype(np.int64)))


def _teacher_tensors(
    by_row: Mapping[int, TeacherOutputs], lengths: Ints, local_sampled: Ints, to_device: Callable[[NDArray], Tensor]
) -> TeacherTensors:
    """Return the teacher's outputs for the sampled tokens that this rank predicts.

    `by_row`: index of a row of the micro-batch -> outputs of its sampled tokens. `lengths` [B]: numbers of sampled tokens.
    `local_sampled` [local R]: which of the R sampled tokens this rank predicts, ascending.
    """
    ends = np.cumsum(lengths)
    taught = np.concatenate([np.arange(ends[row] - lengths[row], ends[row]) for row in by_row])
    is_local = np.isin(taught, local_sampled)
    outputs = {
        name: np.concatenate([outputs[name] for outputs in by_row.values()])[is_local]
        for name in next(iter(by_row.values()))
    }
    index = np.searchsorted(local_sampled, taught[is_local])
    return TeacherTensors(to_device(index), {name: to_device(values) for name, values in outputs.items()})


def _lay_out(part: TokenBlock, groups: Ints | None) -> tuple[list[Segment], Ints, Ints]:
    """Return the layout of a pack: (segments, index_in_part [S], predictor_index [R]).

    The pack has S tokens. `index_in_part` has, for each of the S tokens, its index in `part`. `predictor_index` says, for
    each sampled token, which of the S tokens predicts it.

    If `groups` is given, the rows of a group share one prompt segment. Otherwise, each row is one segment.
    """
    starts, ends = part.cu_seqlens[:-1], part.cu_seqlens[1:]
    if groups is None:
        return [Segment(int(length)) for length in part.lengths], np.arange(len(part.tokens)), part.sampled_index - 1
    segments: list[Segment] = []
    indices: list[Ints] = [np.empty(0, np.int64)]
    predictor_index: list[Ints] = [np.empty(0, np.int64)]
    prompts: dict[int, tuple[int, int, int]] = {}  # group -> (prompt segment, last prompt token in the pack, first row)
    end = 0  # number of tokens in the pack so far
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


def _routing(part: TokenBlock, index_in_part: Ints, token_index: Ints) -> NDArray[np.int64]:
    """Return the experts of this rank's tokens: [L, layers, topk].

    Padding, and tokens that the engine did not compute, are spread evenly over the experts. No sampled token depends
    on these tokens, so their experts do not influence the loss.
    """
    assert part.routed_experts is not None, "the caller has checked that the block has routed experts"
    experts = part.routed_experts[index_in_part][token_index].astype(np.int64)
    unknown = (token_index < 0)[:, None, None] | (experts < 0)
    num_experts = int(part.routed_experts.max()) + 1
    topk = experts.shape[-1]
    round_robin = (np.arange(len(token_index))[:, None, None] * topk + np.arange(topk)) % max(num_experts, topk)
    return np.where(unknown, round_robin, experts)
