"""Real SGLang servers beside a Transformers model: its weights pushed into them, its log-probabilities compared with theirs."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from models.architecture import Family
from models.conversion.mapping import Box
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.schema import WeightSyncConfig
from mrl.rollout.client import SamplingParams
from mrl.weight_sync.engine_layout import EngineLayout
from mrl.weight_sync.session import LiveSync
from parallel.dims import ParallelDims

PROMPTS = [[5 + (7 * i + j) % 27 for j in range(1 + i % 9)] for i in range(40)]


@torch.no_grad()
def largest_gap(client, model, temperature: float = 1.0) -> float:
    """Largest difference between the engine's log-probabilities and Transformers', over sampled responses."""
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature, ignore_eos=True)
    gap = 0.0
    for prompt, done in zip(PROMPTS, client.generate(PROMPTS, sampling), strict=True):
        assert len(done.token_ids) == len(done.logprobs) == 12
        logits = model(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
        ours = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        gap = max(gap, (ours - torch.tensor(done.logprobs)).abs().max().item())
    return gap


def perturb(model) -> None:
    """Other weights, with which other tokens are likely."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


class WholeModel:
    """A Hugging Face state dict in the place of a trainer rank that holds everything."""

    def __init__(self, folder, tensors: dict[str, Tensor]) -> None:
        config = HFConfig.load(folder)
        self.family = family_of(config)
        self.arch = self.family.read(config)
        self.dims, self.rows, self.sizes = ParallelDims(), self.family.param_mappings(self.arch), self.arch.sizes
        self.tensors = tensors

    def stage(self, name: str) -> int:
        return 0

    def reader(self) -> Callable[[str, Box], Tensor]:
        return lambda name, box: self.tensors[name][box.slices]


@contextmanager
def connected(urls: list[str], folder, tensors: dict[str, Tensor], family: Family | None = None, **settings):
    """A LiveSync from this process, the only trainer rank there is; `family`: in place of the folder's."""
    weights = WholeModel(folder, tensors)
    layout_of = partial(EngineLayout.of, family or weights.family, weights.arch)
    sync = LiveSync(urls, weights, layout_of, WeightSyncConfig(**dict(bucket_bytes=1 << 20, timeout_s=30.0) | settings))
    try:
        yield sync
    finally:
        sync.close()
