"""Measures a training step, and offloading (sleep) and loading (wake) of a trainer, with mrl's own code.

Each function `measure_*` is a section of `mrl bench gpu` (see mrl.bench.sections). This module imports Megatron, so
`parallel.device.patch_megatron_for_cpu` must run before the import.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from models.architecture import ModelSpec
from models.conversion.hf_reader import file_layout
from models.families import family_of
from models.hf_config import HFConfig
from mrl.algorithms.losses import PPOClip
from mrl.bench.device_rates import GIB, MIB, peak_memory, seconds_of
from mrl.bench.sections import SectionJob, Value
from mrl.core.types import TokenBlock, TrainBatch
from mrl.planner.micro_batch_shape import CPU_KERNELS, GPU_KERNELS, Kernels
from mrl.planner.model_shape import ModelShape
from mrl.planner.trainer_memory import TrainerSettings, trainer_memory
from mrl.workers.actor_critic import MegatronActor
from mrl.workers.dp_partition import Packing, StepPartition, partition_step
from parallel import collectives, groups
from parallel.device import capabilities, has_cuda, set_threads, synchronize
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

ALONE = ParallelDims()  # layout of one trainer rank
LOSS: Any = PPOClip()  # the type checker does not accept class attributes for the properties of the protocol Loss
LR = 1e-9  # so small that training does not change the measurement


def start_one_rank() -> None:
    """Set up the process groups of a trainer with one rank."""
    set_threads()
    collectives.init_process_group(0, 1, "127.0.0.1", 0, timeout_s=60.0)
    groups.initialize(ALONE, seed=0)
    torch.manual_seed(0)


def model_dtype() -> torch.dtype:
    """Return the dtype of the measured models: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if has_cuda() else torch.float32


# Fields of config.json: of Qwen3-4B, of Qwen3-0.6B, and of a model of toy size
QWEN3_4B: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    attention_bias=False,
    head_dim=128,
    hidden_size=2560,
    intermediate_size=9728,
    max_position_embeddings=40960,
    num_attention_heads=32,
    num_hidden_layers=36,
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    vocab_size=151936,
    use_sliding_window=False,
)
QWEN3_06B = QWEN3_4B | dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_hidden_layers=28)
TOY = QWEN3_4B | dict(
    head_dim=16,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    vocab_size=512,
)


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a training step. The model has fewer layers if not all layers fit into memory."""

    config: dict[str, Any]  # fields of config.json
    num_groups: int  # number of prompts
    responses: int  # responses to each prompt
    prompt: tuple[int, int]  # smallest and largest number of tokens of a prompt
    response: tuple[int, int]  # smallest and largest number of tokens of a response
    max_tokens: int  # tokens of one micro-batch
    sleep_layers: int  # largest number of layers of the model that `measure_sleep` offloads


STEPS = {
    "full": StepSizes(QWEN3_4B, 8, 8, (256, 1024), (256, 2048), 16384, sleep_layers=12),
    "small": StepSizes(QWEN3_4B, 4, 8, (128, 512), (128, 1024), 8192, sleep_layers=6),
    "toy": StepSizes(TOY, 4, 4, (8, 16), (8, 32), 256, sleep_layers=2),
}
LONG_RESPONSES = {  # size -> name of the model, its config, and lengths in tokens (prompt and response together)
    "full": ("Qwen3-0.6B", QWEN3_06B, (16384, 65536)),
    "small": ("Qwen3-0.6B", QWEN3_06B, (8192, 16384)),
    "toy": ("small model", TOY, (64, 256)),
}
PROMPT = 8  # tokens before a long response
RECOMPUTED_MODULES = ["mlp", "layernorm"]  # modules of each layer whose activations are recomputed for long responses
USABLE_FRACTION = 0.85  # fraction of the free GPU memory that the measured model may use according to the planner
HOST_FRACTION = 0.4  # fraction of the free host memory for the copy of an offloaded model
PROFILED_KERNELS = 10  # number of kernels that the report names


def measure_step(job: SectionJob) -> None:
    """Section step: measure tokens/s, efficiency, memory and kernels of a training step, for several packings."""
    start_one_rank()
    sizes = STEPS[job.spec.size]
    layers = layers_that_fit(sizes, free_device_bytes(), sizes.config["num_hidden_layers"])
    config = sizes.config | dict(num_hidden_layers=layers)
    actor = build_actor(job, config)
    rng = np.random.default_rng(0)
    counts, bounds = (sizes.num_groups, sizes.responses), (sizes.prompt, sizes.response)
    block, batch = random_groups(rng, config["vocab_size"], counts, bounds)
    padded = padded_rows(rng, config["vocab_size"], block)
    rows = TrainBatch.of(padded, batch.groups)
    choices = {  # name -> (rows, their partition into micro-batches)
        "packed, shared prompts (mrl's choice)": (block, partition(batch, sizes.max_tokens, share_prompts=True)),
        "packed": (block, partition(batch, sizes.max_tokens, share_prompts=False)),
        "padded to the longest row": (padded, partition(rows, sizes.max_tokens, share_prompts=False)),
    }
    name = f"{layers} layers with the widths of Qwen3-4B" if job.spec.size != "toy" else f"{layers} small layers"
    tokens = int(block.lengths.sum())
    for choice, (rows_of_choice, plan) in choices.items():
        shared = choice.startswith("packed, shared")

        def update(rows_of_choice: TokenBlock = rows_of_choice, plan: StepPartition = plan) -> None:
            actor.update(rows_of_choice, [plan.replica_batches[0]], LOSS, [LR])

        with job.case(f"{name}: {choice}"):
            seconds = seconds_of(update, budget_s=1.0, least=2)
            flops = 6 * multiply_adds(config, rows_of_choice, plan, shared)
            values: list[Value] = [("time", seconds, "s"), ("speed", tokens / seconds, "tokens/s")]
            values += [*job.efficiency(flops / seconds / 1e12)]
            values += [("computed tokens", plan.metrics["batch/computed_tokens"], "tokens")]
            job.row(f"{name}: {choice}", *values)
            if shared:
                report_memory(job, sizes, config, update, plan, block)
                report_kernels(job, update)


def measure_long_responses(job: SectionJob) -> None:
    """Section long: measure updates of a small model on one long response.

    Some activations are recomputed, because otherwise the longest response does not fit on a card of 80 GB. The process builds
    only this model: torch cannot free a model that Megatron's DistributedDataParallel has wrapped.
    """
    start_one_rank()
    model, config, lengths = LONG_RESPONSES[job.spec.size]
    recomputed = dict(recompute_granularity="selective", recompute_modules=RECOMPUTED_MODULES)
    actor = build_actor(job, config, recomputed, share_prompts=False)
    for tokens in lengths:
        name = f"{model}: one response of {tokens} tokens, recomputes {' and '.join(RECOMPUTED_MODULES)}"
        with job.case(name):
            job.row(name, *_long_response(job, actor, config, tokens))


def _long_response(job: SectionJob, actor: MegatronActor, config: dict[str, Any], tokens: int) -> list[Value]:
    """Return speed and memory of an update on one sequence of `tokens` tokens."""
    bounds = ((PROMPT, PROMPT), (tokens - PROMPT, tokens - PROMPT))
    block, batch = random_groups(np.random.default_rng(0), config["vocab_size"], (1, 1), bounds)
    plan = partition(batch, tokens, share_prompts=False)

    def update() -> None:
        actor.update(block, [plan.replica_batches[0]], LOSS, [LR])

    seconds = seconds_of(update, budget_s=2.0, least=2)
    flops = 6 * multiply_adds(config, block, plan, shared=False)
    values: list[Value] = [("time", seconds, "s"), ("speed", tokens / seconds, "tokens/s")]
    return [*values, *job.efficiency(flops / seconds / 1e12), *peak_memory(update)]


def random_groups(
    rng: np.random.Generator,
    vocab: int,
    counts: tuple[int, int],  # number of prompts, and of responses to each
    bounds: tuple[
        tuple[int, int], tuple[int, int]
    ],  # (smallest, largest) number of tokens of prompts, and of responses
) -> tuple[TokenBlock, TrainBatch]:
    """Return a batch of random tokens with normally distributed advantages. A step trains on all rows of the batch."""

    def tokens(smallest: int, largest: int) -> list[int]:
        return rng.integers(0, vocab, rng.integers(smallest, largest + 1)).tolist()

    prompts = [prompt for _ in range(counts[0]) for prompt in [tokens(*bounds[0])] * counts[1]]
    responses = [tokens(*bounds[1]) for _ in prompts]
    # -9.0: an arbitrary log-probability
    block = TokenBlock.from_lists(prompts, responses, [[-9.0] * len(response) for response in responses])
    advantages = rng.normal(size=len(prompts)).astype(np.float32)
    block = block.with_columns(advantages=advantages.repeat(block.sampled_lengths))
    return block, TrainBatch.of(block, np.repeat(np.arange(counts[0]), counts[1]))


def padded_rows(rng: np.random.Generator, vocab: int, block: TokenBlock) -> TokenBlock:
    """Return a block in which all rows have the length of the longest row, as in a trainer that pads the rows."""
    longest, rows = int(block.lengths.max()), []
    prompts = [block.prompt(row).tolist() for row in range(len(block.lengths))]
    for prompt in prompts:
        rows.append(rng.integers(0, vocab, longest - len(prompt)).tolist())
    padded = TokenBlock.from_lists(prompts, rows, [[-9.0] * len(row) for row in rows])
    return padded.with_columns(advantages=np.ones(int(padded.sampled_lengths.sum()), np.float32))


def partition(batch: TrainBatch, max_tokens: int, share_prompts: bool) -> StepPartition:
    """Partition a batch into micro-batches as training does."""
    return partition_step(batch, ALONE, Packing(max_tokens, share_prompts))


def multiply_adds(config: dict[str, Any], block: TokenBlock, plan: StepPartition, shared: bool) -> float:
    """Return the multiply-adds of a forward pass: of all computed tokens in the layers, and of all sampled tokens in the head.

    `shared`: whether responses share their prompts. Then each micro-batch computes the prompt of a group once.
    """
    hf = HFConfig(Path("config.json"), config)
    # A forward pass over n tokens has linear * n + quadratic * n**2 multiply-adds, including the head.
    linear, quadratic = family_of(hf).read(hf).multiply_adds()
    head = config["hidden_size"] * config["vocab_size"]
    lengths, prompts = block.lengths.astype(float), block.prompt_lengths.astype(float)
    attention = (lengths**2).sum()
    if shared:
        first = np.concatenate([_first_rows(rows, plan) for rows in plan.replica_batches[0].micro_batches])
        attention += (prompts[first] ** 2).sum() - (prompts**2).sum()
    computed = plan.metrics["batch/computed_tokens"]
    return (linear - head) * computed + quadratic * attention + head * float(block.sampled_lengths.sum())


def _first_rows(rows: NDArray[np.int64], plan: StepPartition) -> NDArray[np.int64]:
    """Return the first row of each group in a micro-batch. With shared prompts, only these rows compute the prompt."""
    groups_of_rows = plan.replica_batches[0].groups
    assert groups_of_rows is not None, "prompts are shared"
    return rows[np.unique(groups_of_rows[rows], return_index=True)[1]]


def build_actor(
    job: SectionJob,
    config: dict[str, Any],
    overrides: dict[str, Any] | None = None,
    share_prompts: bool = True,
) -> MegatronActor:
    """Build an actor with random weights. `overrides`: fields of Megatron's TransformerConfig.

    The weight file is sparse: it needs no space on the disk and reads as zeros. The weights are drawn on the device.
    """
    job.progress(f"building {config['num_hidden_layers']} layers of hidden size {config['hidden_size']}")
    folder = Path(mkdtemp(prefix="model-"))  # in the temporary folder of the section
    (folder / "config.json").write_text(json.dumps(config))
    hf = HFConfig.load(folder)
    family, dtype = family_of(hf), model_dtype()
    spelling = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    shapes = {name: (spelling, shape) for name, shape in family.hf_shapes(family.read(hf)).items()}
    prefix, entries = file_layout(shapes)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(prefix)
        file.truncate(max(entry.start + entry.nbytes for entry in entries.values()))
    dtype_name, optimizer = str(dtype).removeprefix("torch."), OptimConfig(lr=LR)
    actor = MegatronActor(ModelSpec(str(folder), ALONE, dtype_name, optimizer, overrides or {}, share_prompts))
    with torch.no_grad():
        for chunk in actor.chunks:
            for param in chunk.module.parameters():
                param.fill_(1.0) if param.dim() == 1 else param.normal_(std=0.02)  # norms have one dimension
    actor.optimizer.reload_model_params()
    return actor


def layers_that_fit(sizes: StepSizes, free_bytes: int, most: int) -> int:
    """Return the largest number of layers up to `most` for which planned_bytes is at most USABLE_FRACTION of `free_bytes`.

    Raises ValueError if not even one layer fits. On a CPU, `free_bytes` is 0, and every number fits.
    """
    planned = 0
    for layers in range(most, 0, -1):
        planned = planned_bytes(sizes, sizes.config | dict(num_hidden_layers=layers))
        if not free_bytes or planned <= USABLE_FRACTION * free_bytes:
            return layers
    raise ValueError(
        f"one layer of hidden size {sizes.config['hidden_size']} needs {planned / GIB:.1f} GiB, but only "
        f"{free_bytes / GIB:.1f} GiB are free on the card; use --size toy, or end the other processes on the card."
    )


def free_device_bytes() -> int:
    """Return the free memory of the GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if has_cuda() else 0


def planned_bytes(sizes: StepSizes, config: dict[str, Any], max_tokens: int = 0, keys_per_token: float = 1.5) -> int:
    """Return the bytes of memory that the planner of `mrl plan memory` predicts for an update.

    `max_tokens`: tokens of the largest micro-batch. 0: the largest number of tokens that a micro-batch may have.
    `keys_per_token`: keys that the attention reads, divided by the tokens (above 1 if responses share a prompt).
    """
    hf = HFConfig(Path("config.json"), config)
    family = family_of(hf)
    settings = TrainerSettings(
        max_tokens=max_tokens or sizes.max_tokens,
        itemsize=model_dtype().itemsize,
        keys_per_token=keys_per_token,
        bucket_bytes=0,
        kernels=_kernels(),
    )
    return trainer_memory(ModelShape.of(family, family.read(hf)), ALONE, settings).by_phase["update"]


def _kernels() -> Kernels:
    if not has_cuda():
        return CPU_KERNELS
    return GPU_KERNELS if capabilities().transformer_engine else replace(GPU_KERNELS, fused_mlp=False)


def largest_micro_batch(block: TokenBlock, plan: StepPartition) -> tuple[int, float]:
    """Return the tokens of the largest micro-batch with shared prompts, and the keys that its attention reads per token."""
    sizes = []
    for rows in plan.replica_batches[0].micro_batches:
        prompts = block.prompt_lengths[_first_rows(rows, plan)].sum()
        tokens = prompts + block.response_lengths[rows].sum()
        sizes.append((int(tokens), float((prompts + block.lengths[rows].sum()) / tokens)))
    return max(sizes)


def report_memory(
    job: SectionJob,
    sizes: StepSizes,
    config: dict[str, Any],
    update: Callable[[], None],
    plan: StepPartition,
    block: TokenBlock,
) -> None:
    """Report the peak memory of an update beside the planner's prediction."""
    planned = planned_bytes(sizes, config, *largest_micro_batch(block, plan))
    if not has_cuda():
        job.row("memory of an update", ("planned", planned / MIB, "MiB"))
        job.leave_out("peak memory of an update", "torch does not count the memory of a CPU")
        return
    torch.cuda.reset_peak_memory_stats()
    update()
    synchronize()
    peak = torch.cuda.max_memory_allocated()
    values: list[Value] = [("measured", peak / MIB, "MiB"), ("planned", planned / MIB, "MiB")]
    job.row("memory of an update", *values, ("measured over planned", 100 * peak / planned, "%"))


def report_kernels(job: SectionJob, update: Callable[[], None]) -> None:
    """Report the kernels that take the most time in an update; on a CPU, the operators of torch."""
    job.progress("profile by kernel")
    activity = torch.profiler.ProfilerActivity
    # evaluating CPU and CUDA events together takes minutes
    activities = [activity.CUDA if has_cuda() else activity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        update()
        synchronize()
    events = [
        (event.self_device_time_total if has_cuda() else event.self_cpu_time_total, event)
        for event in profile.key_averages()
        if not has_cuda() or event.device_type == torch.autograd.DeviceType.CUDA
    ]
    total = sum(taken for taken, _ in events) or 1.0
    for taken, event in sorted(events, key=lambda one: one[0], reverse=True)[:PROFILED_KERNELS]:
        values: list[Value] = [("time", taken / 1e3, "ms"), ("share", 100 * taken / total, "%")]
        job.row(f"kernel {event.key[:80]}", *values, ("calls", event.count, ""))


# Sleep and wake.


def measure_sleep(job: SectionJob) -> None:
    """Section sleep: measure the GB/s of offloading and loading a trainer, and the memory that stays on the device."""
    start_one_rank()
    sizes, free = STEPS[job.spec.size], free_device_bytes()
    layers = layers_that_fit(
        sizes, min(free, int(HOST_FRACTION * psutil.virtual_memory().available)), sizes.sleep_layers
    )
    config = sizes.config | dict(num_hidden_layers=layers)
    actor = build_actor(job, config)
    bounds = (sizes.prompt, sizes.response)
    block, batch = random_groups(np.random.default_rng(0), config["vocab_size"], (1, 2), bounds)
    plan = partition(batch, sizes.max_tokens, share_prompts=True)
    actor.update(block, [plan.replica_batches[0]], LOSS, [LR])  # creates the optimizer's state
    turns = []
    for turn in ("first sleep, which allocates the host memory", "second sleep", "third sleep"):
        job.progress(turn)
        turns.append(_sleep_and_wake(actor))
    actor.update(block, [plan.replica_batches[0]], LOSS, [LR])
    nbytes, residue = turns[-1][2:]
    for name, part in (("first sleep, which allocates the host memory", turns[:1]), ("later sleeps", turns[1:])):
        sleep_s, wake_s = (median(times) for times in list(zip(*part, strict=True))[:2])
        values: list[Value] = [("state", nbytes / GIB, "GiB"), ("sleep", nbytes / sleep_s / 1e9, "GB/s")]
        job.row(f"{layers} layers: {name}", *values, ("wake", nbytes / wake_s / 1e9, "GB/s"))
    if has_cuda():
        left: list[Value] = [("reserved by torch", residue / MIB, "MiB")]
        actor.offload(keep_weights=False)
        job.row(
            "left on the card", *left, ("with communicators and libraries", (free - free_device_bytes()) / MIB, "MiB")
        )
    else:
        job.row("left on the device", ("storages of the model", residue / MIB, "MiB"))


def _sleep_and_wake(actor: MegatronActor) -> tuple[float, float, int, int]:
    """Return (seconds of the sleep, seconds of the wake, bytes that moved, bytes left on the device)."""
    synchronize()
    begun = time.perf_counter()
    residue = actor.offload(keep_weights=False)
    synchronize()
    slept = time.perf_counter()
    nbytes = actor.offloader.offloaded_bytes
    actor.load_to_device()
    synchronize()
    return slept - begun, time.perf_counter() - slept, nbytes, residue
