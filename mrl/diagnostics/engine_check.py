"""Compares an SGLang engine with the trainer on the same weights, and finds the first trace point that differs, and the cause.

A trace point is a point of the forward pass at which a tensor is recorded. mrl.core.types explains the letters of the array
dimensions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from mrl.config.schema import CertifyConfig
from mrl.core.types import TokenBlock, TrainBatch
from mrl.diagnostics.engine_causes import find_cause
from mrl.diagnostics.engine_difference import LAYER_IDENTITY, Cause, ModelFacts, PointEvidence, Side, Trace
from mrl.diagnostics.layout_comparison import random_groups
from mrl.rollout.client import EngineClient, SamplingParams
from mrl.rollout.engines.forward_recorder import (
    Arrays,
    engine_trace,
    engine_weights,
    read_forward_recording,
    write_request,
)
from mrl.weight_sync.engine_layout import HF_EMBEDDING_WEIGHT, HF_OUTPUT_WEIGHT, EngineLayout
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.group import WorkerGroup
from mrl.workers.worker import TrainWorker
from parallel.dims import ParallelDims

LAYER_POINTS = (
    *("input", "attention_norm", "query_latent", "key_latent", "query", "key", "value", "normed_query", "normed_key"),
    *("rotated_query", "rotated_key", "attention", "attention_output", "mlp_input", "mlp_norm", "gate", "up"),
    *("activation", "router_logits", "routing", "routed_experts", "shared_experts", "mlp_output"),
)
"""Trace points of a layer in the order of computation. `input`, `mlp_input`: residual stream; `attention`: input of o_proj."""
LOGPROBS = "logprobs"


@dataclass(frozen=True)
class EngineTolerances:
    """Largest differences between an engine and the trainer that round-off explains."""

    # Distance between the engine's and the trainer's activation of a token. It is relative to the norm of the trainer's
    # activation, or to the mean of these norms over all tokens if the mean is larger.
    points: float
    logprobs: float  # absolute, in nats


# In bfloat16, each operation rounds to 8 bits, and the errors of all layers add up.
TOLERANCES = {"float32": EngineTolerances(3e-5, 1e-4), "bfloat16": EngineTolerances(0.1, 0.3)}


@dataclass(frozen=True)
class PointDifference:
    """Difference of engine and trainer at one trace point of the model."""

    point: str
    layer: int | None  # None: the trace point is outside the layers
    absolute: float  # largest absolute difference of two elements
    relative: float  # see EngineTolerances.points; for log-probabilities, the same as `absolute`
    token: int  # index, in the block, of the token with the largest difference; for last_logits: index of the row
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether the difference is within its tolerance."""
        return self.relative <= self.tolerance

    @property
    def name(self) -> str:
        """The trace point in words, such as `layer 3, rotated query`."""
        words = self.point.replace("_", " ")
        return words if self.layer is None else f"layer {self.layer}, {words}"


@dataclass(frozen=True)
class EngineReport:
    """Result of one comparison."""

    differences: list[PointDifference]  # in the order of computation; the last entry compares the log-probabilities
    cause: Cause | None  # None: engine and trainer agree
    num_tokens: int
    num_prompts: int
    # number of tokens (prompt tokens included) for which round-off decides to which experts they, or earlier tokens of their
    # rows, are routed; their log-probabilities are not compared
    tokens_with_undecided_experts: int

    @property
    def first(self) -> PointDifference | None:
        """The first trace point that differs, or None."""
        return next((each for each in self.differences if not each.within), None)


def point_name(point: str, layer: int | None) -> str:
    """Return the full name of a trace point, which is its key in a trace."""
    return point if layer is None else f"layers.{layer}.{point}"


def ordered_points(num_layers: int) -> list[tuple[str, int | None]]:
    """Return all pairs (point, layer) of a model in the order of computation."""
    inner = [(point, layer) for layer in range(num_layers) for point in LAYER_POINTS]
    return [("embedding", None), *inner, ("final_norm_input", None), ("final_norm", None), ("last_logits", None)]


def compare_points(
    engine: Trace, trainer: Trace, block: TokenBlock, num_layers: int, tolerance: float
) -> tuple[list[PointDifference], NDArray[np.bool_]]:
    """Compare all trace points that both sides have. The trainer must have routed each token as the engine did.

    At the trace point `routing`, a token is not compared if round-off decides its experts.

    Returns the differences, and a mask [S] of the tokens that were not compared at `routing` and of all later tokens of their
    rows. While the engine sampled, it may have chosen other experts for these tokens than in the compared forward pass.
    """
    undecided = np.zeros(len(block.tokens), bool)
    differences = []
    for point, layer in ordered_points(num_layers):
        name = point_name(point, layer)
        if name not in engine or name not in trainer:
            continue
        first, second = engine[name], trainer[name]
        compared = np.ones(len(first), bool)
        if point == "routing" and first.shape == second.shape:
            compared = ~_undecided_routing(first, second, trainer.get(point_name("router_logits", layer)), tolerance)
            undecided |= ~compared
        differences.append(_point_difference(point, layer, first, second, compared, tolerance))
    rows = np.split(undecided, block.cu_seqlens[1:-1])
    return differences, np.concatenate([np.logical_or.accumulate(row) for row in rows])


def _undecided_routing(
    engine: NDArray, trainer: NDArray, logits: NDArray | None, tolerance: float
) -> NDArray[np.bool_]:
    """Return a mask [S] of the tokens whose experts differ between the two sides only because of round-off.

    Round-off decides between two experts if their logits differ by at most 2 x tolerance x (largest absolute logit). With the
    tolerances of float32, or without router logits, the mask is false for all tokens.
    """
    if logits is None or tolerance < 1e-3:
        return np.zeros(len(engine), bool)
    by_engine, by_trainer = engine > 0, trainer > 0
    only_engine = np.where(by_engine & ~by_trainer, logits, np.inf).min(1)
    only_trainer = np.where(by_trainer & ~by_engine, logits, -np.inf).max(1)
    limit = 2 * tolerance * np.abs(logits).max(1)
    return (by_engine != by_trainer).any(1) & (np.abs(only_trainer - only_engine) <= limit)


def _point_difference(
    point: str, layer: int | None, engine: NDArray, trainer: NDArray, compared: NDArray[np.bool_], tolerance: float
) -> PointDifference:
    if engine.shape != trainer.shape:
        return PointDifference(point, layer, np.inf, np.inf, 0, tolerance)
    delta = engine.astype(np.float64) - trainer
    norms = np.linalg.norm(trainer.astype(np.float64), axis=1)
    scale = np.maximum(norms, norms[np.isfinite(norms)].mean() if np.isfinite(norms).any() else 1.0)
    relative = np.linalg.norm(delta, axis=1) / np.maximum(scale, np.finfo(np.float32).tiny)
    relative = np.where(np.isfinite(relative), relative, np.inf) * compared
    relative = np.where(np.isnan(relative), 0.0, relative)  # infinity times 0: the token is not compared
    token = int(relative.argmax())
    return PointDifference(
        point, layer, float(np.abs(delta[compared]).max(initial=0)), float(relative[token]), token, tolerance
    )


def weights_near(point: str, layer: int | None) -> list[str]:
    """Return prefixes of the names of the weights that can cause a difference at a trace point."""
    if layer is not None:
        return [f"model.layers.{layer}."]
    return {
        "embedding": [HF_EMBEDDING_WEIGHT],
        "last_logits": [HF_OUTPUT_WEIGHT, HF_EMBEDDING_WEIGHT],
        LOGPROBS: [HF_OUTPUT_WEIGHT, HF_EMBEDDING_WEIGHT],
    }.get(point, ["model.norm."])


def model_facts(arch: Architecture) -> ModelFacts:
    """Return the sizes of the model that the search for a cause needs."""
    t = arch.transformer
    latent_head_sizes = (t["qk_head_dim"], t["v_head_dim"]) if arch.has_latent_attention else None
    expert_groups = t.get("moe_router_num_groups") or 1, t.get("moe_router_group_topk") or 1
    return ModelFacts(t["kv_channels"], t["num_query_groups"], arch.rotary_dim, latent_head_sizes, expert_groups)


def diagnose(
    first: PointDifference, engine: Side, trainer: Side, block: TokenBlock, facts: ModelFacts, undecided_tokens: int = 0
) -> Cause:
    """Return the cause of the first difference. `undecided_tokens`: EngineReport.tokens_with_undecided_experts."""
    if first.point == LOGPROBS:
        more = (
            " and raise certify.prompts, because round-off decides the experts of many tokens"
            if undecided_tokens
            else ""
        )
        return Cause(
            "sampling",
            "the forward pass over prompt and response agrees, but the log-probabilities that the engine reported while it "
            "sampled differ: its kernels for decoding, its KV cache or its sampler compute something else",
            f"compare rollout.temperature, sglang.kv_cache_dtype and sglang.attention_backend{more}",
        )
    tolerance = first.tolerance
    return find_cause(PointEvidence(engine, trainer, first.point, first.layer, block.positions, facts, tolerance))


@dataclass(frozen=True)
class EngineCheck:
    """One comparison of `mrl certify engine`. mrl.controller.build creates it."""

    settings: CertifyConfig
    arch: Architecture
    layout: EngineLayout  # how the engine shards the model
    packing: Packing
    temperature: float  # sampling temperature
    seed: int
    folder: str  # where the tensors are written; the engine and the trainer rank can read it
    start_ranks: Callable[[ParallelDims], AbstractContextManager[WorkerGroup]]  # starts trainer ranks under a layout
    start_engine: Callable[[], AbstractContextManager[EngineClient]]

    def run(self) -> EngineReport:
        """Sample responses, run a forward pass over them on both sides, and compare the results."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        with self.start_engine() as client, self.start_ranks(ParallelDims()) as group:
            block = self._sample(client)
            engine = self._record(client, block)
            batch = partition_step(
                TrainBatch.of(block, None), ParallelDims(), replace(self.packing, share_prompts=False)
            ).replica_batches
            routing = {point: weights for point, weights in engine.items() if point.endswith(".routing")}
            path = f"{self.folder}/trainer_trace.safetensors"
            file, outputs = group.call_rank_0(TrainWorker.trace_forward, block, batch, self.temperature, routing, path)
            trainer = dict(file)
            tolerances = TOLERANCES[self.settings.dtype]
            differences, undecided = compare_points(engine, trainer, block, self.arch.num_layers, tolerances.points)
            logprobs = np.concatenate([outputs[row] for row in range(len(outputs))])
            differences.append(compare_logprobs(block, logprobs, undecided, tolerances.logprobs))
            report = EngineReport(differences, None, len(block.tokens), len(block.prompt_lengths), int(undecided.sum()))
            if report.first is None:
                return report
            sides = self._sides(client, group, block, (engine, trainer), report.first)
        cause = diagnose(report.first, *sides, block, model_facts(self.arch), report.tokens_with_undecided_experts)
        return replace(report, cause=cause)

    def _sample(self, client: EngineClient) -> TokenBlock:
        """Return sampled responses to random prompts, with the engine's log-probabilities."""
        random_block, _ = random_groups(replace(self.settings, responses_per_prompt=1), self.arch.vocab_size)
        prompts = [random_block.prompt(row).tolist() for row in range(len(random_block.prompt_lengths))]
        lengths = random_block.response_lengths.tolist()
        sampling = [
            SamplingParams(length, self.temperature, ignore_eos=True, seed=self.seed + row)
            for row, length in enumerate(lengths)
        ]
        done = client.generate(prompts, sampling)
        return TokenBlock.from_lists(prompts, [each.token_ids for each in done], [each.logprobs for each in done])

    def _record(self, client: EngineClient, block: TokenBlock) -> Arrays:
        """Make the engine compute each row again as one prompt, and return the engine's trace of all rows."""
        traces = []
        for row in range(len(block.prompt_lengths)):
            start, end = block.cu_seqlens[row], block.cu_seqlens[row + 1]
            ranks = self._record_pass(client, f"row_{row}", block.tokens[start:end].tolist())
            traces.append(engine_trace(ranks, self.arch))
        return {point: np.concatenate([trace[point] for trace in traces]) for point in traces[0]}

    def _record_pass(
        self, client: EngineClient, name: str, tokens: list[int], weights: Sequence[str] = ()
    ) -> list[Arrays]:
        """Make the engine compute `tokens` as one prompt, and return what each engine rank recorded.

        `name`: start of the names of the recorded files. `weights`: prefixes of the names of the weights that are also recorded.
        """
        request = write_request(self.folder, name, weights)
        try:
            client.generate([tokens], SamplingParams(1, 0.0, ignore_eos=True))
        finally:
            request.unlink()
        return read_forward_recording(self.folder, name, self.layout.parallel_sizes.tp)

    def _sides(
        self,
        client: EngineClient,
        group: WorkerGroup,
        block: TokenBlock,
        traces: tuple[Trace, Trace],
        first: PointDifference,
    ) -> tuple[Side, Side]:
        """Return both sides with the weights that can cause the difference."""
        prefixes = weights_near(first.point, first.layer)
        ranks = self._record_pass(client, "weights", block.prompt(0).tolist(), prefixes)
        weights = group.call_rank_0(
            TrainWorker.store_weights, prefixes, LAYER_IDENTITY, f"{self.folder}/trainer_weights.safetensors"
        )
        mine = engine_weights(ranks, self.layout)
        return Side("engine", traces[0], mine), Side("trainer", traces[1], dict(weights))


def compare_logprobs(
    block: TokenBlock, trainer: NDArray, undecided: NDArray[np.bool_], tolerance: float
) -> PointDifference:
    """Compare the engine's log-probabilities of the sampled tokens with the trainer's log-probabilities [R]."""
    delta = np.abs(block.rollout_logprobs.astype(np.float64) - trainer)
    delta = np.where(undecided[block.sampled_index], 0.0, np.where(np.isfinite(delta), delta, np.inf))
    index = int(delta.argmax())
    return PointDifference(
        LOGPROBS, None, float(delta[index]), float(delta[index]), int(block.sampled_index[index]), tolerance
    )
