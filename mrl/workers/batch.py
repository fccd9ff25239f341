"""A rank's micro-batch: rows of a token block as tensors on its device."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrl.types import Share, TokenBlock
from parallel.packing import PackedSequences, pack


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass. Shapes: S tokens, R response tokens (see mrl.types)."""

    tokens: Tensor  # [S]
    packed: PackedSequences
    predict: Tensor  # [R] position whose logits predict each response token
    targets: Tensor  # [R] the response tokens
    rollout_logprobs: Tensor  # [R]
    advantages: Tensor  # [R]
    weights: Tensor  # [R] float64 shares of the loss

    @classmethod
    def build(cls, block: TokenBlock, rows: NDArray[np.int64], share: Share, device: torch.device) -> "MicroBatch":
        """Rows `rows` of `block`, in that order."""
        part = block.select(rows)
        lengths, responses = part.lengths, part.response_lengths
        position = np.arange(len(part.tokens)) - np.repeat(part.cu_seqlens[:-1], lengths)
        (at,) = np.nonzero(position >= np.repeat(part.prompt_lengths, lengths))

        def column(values: NDArray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        return cls(
            tokens=column(part.tokens.astype(np.int64)),
            packed=pack(lengths.tolist(), device),
            predict=column(at - 1),
            targets=column(part.tokens[at].astype(np.int64)),
            rollout_logprobs=column(part.rollout_logprobs),
            advantages=column(np.repeat(share.advantages[rows], responses)),
            weights=column(np.repeat(share.weights[rows], responses)),
        )
