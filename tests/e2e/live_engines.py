"""Helpers for tests with real SGLang servers: compare log-probabilities, push weights, slow an engine down, read its load."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from models.architecture import Family
from models.conversion.mapping import Box
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.process_schema import WeightSyncConfig
from mrl.rollout.client import EngineClient, SamplingParams
from mrl.weight_sync.engine_layout import EngineLayout
from mrl.weight_sync.session import LiveSync
from parallel.dims import ParallelDims

PROMPTS = [[5 + (7 * i + j) % 27 for j in range(1 + i % 9)] for i in range(40)]


@torch.no_grad()
def max_logprob_difference(client, model, temperature: float = 1.0) -> float:
    """Return the largest difference between log-probabilities of the engine and of Transformers, over sampled responses."""
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature, ignore_eos=True)
    largest = 0.0
    for prompt, done in zip(PROMPTS, client.generate(PROMPTS, sampling), strict=True):
        assert len(done.token_ids) == len(done.logprobs) == 12
        logits = model(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
        ours = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        largest = max(largest, (ours - torch.tensor(done.logprobs)).abs().max().item())
    return largest


def delay_forward_passes(client: EngineClient, seconds: float | None) -> None:
    """Make the engine sleep before each forward pass; None ends the delay."""
    client._call("/slow_down", forward_sleep_time=seconds)


@contextmanager
def slow_engines(*clients: EngineClient, pass_s: float) -> Iterator[None]:
    """Delay every forward pass by `pass_s` seconds, so that n tokens take at least `n * pass_s` seconds on any machine.

    With this delay, a test that must act while an engine samples has enough time, whatever the speed of the engine.
    """
    with ExitStack() as stack:
        for client in clients:
            stack.callback(delay_forward_passes, client, None)
            delay_forward_passes(client, pass_s)
        yield


def num_running(client: EngineClient, since: float = 0.0) -> int:
    """Return the number of requests for which the engine samples, according to its last report.

    Returns 0 if the report is older than `since` (seconds since the epoch). The engine reports after each prefill, after every
    fifth forward pass, and when it becomes idle. It does not report while it is paused.
    """
    loads = client._get("/v1/loads")["loads"]
    return sum(load["num_running_reqs"] for load in loads if load["timestamp"] > since)


def perturb(model) -> None:
    """Add noise to all weights, enough to change which tokens are likely."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


class UnshardedModel:
    """A Hugging Face state dict with the interface of a trainer rank. This rank is the only one, so it holds all parameters."""

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
    """Context with a LiveSync from this process, the only trainer rank, to engines. `family`: by default, the model's family."""
    weights = UnshardedModel(folder, tensors)
    layout_of = partial(EngineLayout.of, family or weights.family, weights.arch)
    sync = LiveSync(urls, weights, layout_of, WeightSyncConfig(**dict(bucket_bytes=1 << 20, timeout_s=30.0) | settings))
    try:
        yield sync
    finally:
        sync.close()
