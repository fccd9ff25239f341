"""Functions that the benchmarks of training in one process share: a random model, a batch of groups, and timing.

`start` prepares torch and Megatron for this machine. Call `start` before the import of `mrl.workers.actor_critic`.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from models.architecture import ModelSpec
from mrl.core.types import ReplicaBatch, TokenBlock, TrainBatch
from mrl.workers.dp_partition import StepPartition
from parallel import device
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

ALONE = ParallelDims()


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, of the batch of groups, and of the micro-batches."""

    hidden: int
    layers: int
    vocab: int
    groups: int
    responses: int  # responses to each prompt
    prompt: tuple[int, int]  # smallest and largest number of tokens in a prompt
    response: tuple[int, int]  # smallest and largest number of tokens in a response
    max_tokens: int = 2048  # largest number of tokens in one micro-batch


def start() -> None:
    """Set up one process with one thread and process groups of one rank."""
    device.patch_megatron_for_cpu()
    torch.set_num_threads(1)
    import mrl.workers.actor_critic  # noqa: F401  imports Megatron; must be after patch_megatron_for_cpu and before the process group
    from parallel import groups

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups.initialize(ALONE, seed=0)


def write_model(sizes: Sizes) -> Path:
    """Write a random Qwen3 as a Hugging Face folder, which is removed when this process ends."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # the import is slow

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 32,
        num_key_value_heads=sizes.hidden // 64,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    folder = Path(tempfile.mkdtemp(prefix="mrl_benchmark_"))
    atexit.register(shutil.rmtree, folder)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def spec_of(folder: Path) -> ModelSpec:
    """Return the specification of a float32 model in one process.

    The learning rate is so small that training does not change the measurement.
    """
    return ModelSpec(str(folder), ALONE, "float32", OptimConfig(lr=1e-9), {})


def make_batch(sizes: Sizes, zero_fraction: float = 0.0) -> tuple[TokenBlock, TrainBatch]:
    """Return a batch of random tokens with normally distributed advantages.

    `zero_fraction` is the fraction of groups whose advantages are 0. A step does not train on these groups.
    """
    from mrl.bench.model_steps import random_groups  # imports Megatron, so it must come after start()

    bounds = (sizes.prompt, sizes.response)
    block, batch = random_groups(np.random.default_rng(0), sizes.vocab, (sizes.groups, sizes.responses), bounds)
    first = np.concatenate([[0], block.sampled_lengths.cumsum()[:-1]])
    advantages = block.columns["advantages"][first]  # [B]; all tokens of a row have the same advantage
    assert batch.groups is not None, "random_groups numbers the groups"
    advantages[batch.groups < round(zero_fraction * sizes.groups)] = 0.0
    block = block.with_columns(advantages=advantages.repeat(block.sampled_lengths))
    return block, replace(batch, rows=np.flatnonzero(advantages))


def partition(batch: TrainBatch, max_tokens: int, share_prompts: bool) -> StepPartition:
    """Partition the batch into micro-batches as training does."""
    from mrl.bench import model_steps  # imports Megatron, so it must come after start()

    return model_steps.partition(batch, max_tokens, share_prompts)


def gradients_of(actor, block: TokenBlock, replica_batch: ReplicaBatch, loss) -> dict[str, NDArray]:
    """Return the complete gradients by Hugging Face name, without an optimizer step."""
    from functools import partial

    from mrl.workers.actor_critic import policy_loss

    head = partial(actor.head, temperature=1.0)
    actor.accumulate_gradients(
        actor.micro_batches(block, replica_batch), head, partial(policy_loss, loss=loss), replica_batch, all_reduce=True
    )
    return {name: gradient.numpy().copy() for name, gradient in actor.export_gradients()}


def largest_difference(expected: dict[str, NDArray], found: dict[str, NDArray]) -> float:
    """Return the largest difference over all tensors. Differences are relative to the largest expected element of a tensor."""
    assert expected.keys() == found.keys(), f"different tensors: {expected.keys() ^ found.keys()}"
    return max(float(np.abs(a - found[name]).max() / np.abs(a).max()) for name, a in expected.items())


def interleaved(methods: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Run the methods in turn, `repeats` times each, after an unmeasured run of each. Returns their CPU-seconds.

    The order of the methods is reversed after each turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in track(range(repeats + 1), "measuring", console=Console(stderr=True), transient=True):
        for name in list(methods) if repeat % 2 else reversed(list(methods)):
            gc.collect()
            start = time.process_time()
            methods[name]()
            if repeat:
                seconds[name].append(time.process_time() - start)
    return seconds


def ratio(seconds: Sequence[float], base: Sequence[float]) -> str:
    """Divide each run by the neighboring run of the other method. Returns "median (smallest to largest)" of the ratios."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
