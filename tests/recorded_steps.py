"""Computes log-probabilities and rewards of recorded steps again: log-probabilities with Transformers, rewards from the data."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mrl.core.types import TokenBlock
from mrl.data.tokenizer import decode


@torch.no_grad()
def log_distributions(folder: Path, block: TokenBlock) -> torch.Tensor:
    """Return [R, V] in float64: for each of the R sampled tokens, the log-probabilities of all V tokens that could be sampled.

    `folder` contains the model. The temperature is 1.
    """
    from transformers import AutoModelForCausalLM  # takes seconds to import

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.from_numpy(block.tokens).long()
    logits = [model(tokens[None, start:end]).logits[0] for start, end in pairwise(block.cu_seqlens.tolist())]
    before = torch.from_numpy(block.sampled_index - 1)
    return torch.cat(logits)[before].double().log_softmax(-1)


def sampled_logprobs(log_probs: torch.Tensor, block: TokenBlock) -> NDArray[np.float64]:
    """Return [R]: the log-probability of each sampled token in `log_probs` [R, V]."""
    sampled = torch.from_numpy(block.tokens[block.sampled_index]).long()
    return log_probs.gather(1, sampled[:, None])[:, 0].numpy()


def exact_matches(block: TokenBlock, rows: NDArray[np.int64], folder: Path) -> NDArray[np.float64]:
    """Return [B]: 1 for a response that is the right answer, else 0. `folder` contains the input files of the quickstart."""
    import pyarrow.parquet as pq

    truths = pq.read_table(folder / "train.parquet", columns=["reward_model"]).column(0).to_pylist()
    texts = decode(str(folder / "model"), [block.response(index).tolist() for index in range(len(rows))])
    pairs = zip(texts, rows.tolist(), strict=True)
    return np.array([float(text == truths[row]["ground_truth"]) for text, row in pairs])
