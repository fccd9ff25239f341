"""Estimates from the config how much memory a run needs, and finds the smallest changes that make the run fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from models.families import family_of
from mrl.algorithms.distillation import TEACHER_HIDDEN
from mrl.algorithms.parts import AlgorithmParts
from mrl.checkpoint.resume import continues_from_checkpoint
from mrl.config.schema import Config
from mrl.config.validate import teachers_of
from mrl.controller.plan_models import (
    ModelPlan,
    build_pools,
    check_layout,
    check_planned_transport,
    drop_lora_path_if_continuing,
    engine_parallel_sizes,
    gpu_transport,
    make_input_files,
    parallel_layout,
    plan_models,
    section_of,
)
from mrl.controller.plan_train import TrainPlan, actor_holds_reference, algorithm_of, plan_training
from mrl.placement.device_map import planned_device_map
from mrl.placement.resource_pools import Pools, check_capacity, gpus_of_nodes, with_node_count
from mrl.planner.micro_batch_shape import CPU_KERNELS, GPU_KERNELS
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import DEFAULT_MEM_FRACTION, RoleModel, RunMemory, model_shape, run_memory, trainer_settings
from mrl.rollout.engines.server_args import has_cuda
from mrl.weight_sync.engine_layout import EngineParallelSizes


@dataclass(frozen=True)
class MemoryEstimator:
    """Estimates the memory of a run. It reads the models once, so that many variants of the config can be estimated."""

    config: Config
    models: dict[str, ModelPlan]  # by role
    has_reference: bool  # whether the actor's trainer ranks also hold the reference
    parallel_sizes: EngineParallelSizes | None  # parallel sizes of one engine; None if the run starts no engines
    # Teachers whose output layers an update needs, because the loss distills over the whole vocabulary
    teachers: tuple[str, ...] = ()
    # Whether the loss has gradients through log-probabilities or entropies; False: only through divergences from teachers
    has_sampled_token_gradient: bool = True

    @classmethod
    def of(cls, config: Config) -> MemoryEstimator:
        """Read the models of a config and return an estimator. Raises ValueError for a mistake that is unrelated to memory."""
        algorithm = algorithm_of(config)
        make_input_files(config)
        read_config = drop_lora_path_if_continuing(config, continues_from_checkpoint(config))
        return cls._of(config, algorithm, plan_models(read_config, algorithm.required_inputs, weights=False))

    @classmethod
    def of_plan(cls, plan: TrainPlan) -> MemoryEstimator:
        """Return an estimator that uses the models of a finished plan."""
        return cls._of(plan.config, plan.algorithm, plan.models)

    @classmethod
    def _of(cls, config: Config, algorithm: AlgorithmParts, models: dict[str, ModelPlan]) -> MemoryEstimator:
        required_inputs, objective = algorithm.required_inputs, algorithm.objective
        starts_engines = not (config.rollout.replay or config.rollout.engine_urls)
        parallel_sizes = engine_parallel_sizes(config, models["actor"]) if starts_engines else None
        teachers = tuple(name for name in teachers_of(config) if TEACHER_HIDDEN in required_inputs and name in models)
        sampled = objective.uses_logprobs or objective.uses_entropy
        return cls(config, models, actor_holds_reference(required_inputs, models), parallel_sizes, teachers, sampled)

    @cached_property
    def shapes(self) -> dict[str, ModelShape]:
        """Tensor sizes of each model, by role."""
        return {role: model_shape(self.config, model.hf, model.arch) for role, model in self.models.items()}

    @cached_property
    def adapters(self) -> ModelShape:
        """Tensor sizes of the actor's LoRA adapters."""
        actor = self.models["actor"]
        return ModelShape.of_adapters(family_of(actor.hf), actor.arch, actor.config.lora)

    def estimate(self, config: Config) -> RunMemory:
        """Estimate the memory for a config with the same models.

        Raises ValueError if the config's layout is impossible, or if the weights cannot travel to the engines.
        """
        models = {role: self._model(config, role) for role in self.models}
        parallel_sizes = engine_parallel_sizes(config, self.models["actor"]) if self.parallel_sizes else None
        pools = build_pools(config, {role: model.dims for role, model in models.items()})
        check_planned_transport(config, pools)
        return run_memory(config, models, parallel_sizes, pools, self.has_reference)

    def _model(self, config: Config, role: str) -> RoleModel:
        plan = self.models[role]
        dims = parallel_layout(config, section_of(role))
        check_layout(config, plan.arch, dims)
        settings = trainer_settings(
            config,
            plan.context,
            role,
            head="value" if role == "critic" else "vocabulary",
            trained=plan.optimizer is not None,
            teacher_hidden=tuple(self.shapes[name].hidden for name in self.teachers) if role == "actor" else (),
            has_sampled_token_gradient=self.has_sampled_token_gradient,
            kernels=GPU_KERNELS if config.cluster.hardware.name else CPU_KERNELS,
            adapters=self.adapters if plan.lora else None,
        )
        return RoleModel(self.shapes[role], dims, settings, plan.context)


def check_memory(plan: TrainPlan) -> None:
    """Raise ValueError if the run needs more memory than `cluster.hardware` has.

    Checks nothing if the memory of a GPU is unknown, or with plan.check_memory=false.
    """
    config = plan.config
    if not (config.cluster.hardware.gpu_memory_gb and config.plan.check_memory):
        return
    estimator = MemoryEstimator.of_plan(plan)
    if (memory := estimator.estimate(config)).fits:
        return
    lines = ["memory: the run does not fit", *memory.problems]
    lines += [f"would fit: {' '.join(advice.overrides)}" for advice in advise(config, estimator.estimate)]
    raise ValueError(
        "\n  ".join([*lines, "mrl plan memory shows the whole estimate; plan.check_memory=false starts the run anyway"])
    )


def check_transport(config: Config, pools: Pools) -> None:
    """Raise ValueError if the weights cannot travel from the GPUs of the actor to the GPUs of the engines.

    For a Slurm job, or if the config names GPUs and this machine has none, the planned GPUs are checked. Otherwise the GPUs of
    this machine are checked. For a run on CPUs, nothing is checked.
    """
    cluster = config.cluster
    if cluster.scheduler or (cluster.hardware.name and not has_cuda()):
        check_planned_transport(config, pools)
    elif has_cuda():
        gpu_transport(config, planned_device_map(pools, pools.size))


def plan_fitting_run(config: Config, *, check_hashes: bool = True) -> TrainPlan:
    """Plan a training run. Also check that memory and GPUs suffice, and that the weights can travel to the engines.

    A check is skipped if the hardware is unknown. If `check_hashes` is False, the check of a checkpoint compares only the sizes
    of its files, not their hashes. Raises ValueError if the config has a mistake or the run does not fit.
    """
    plan, cluster = plan_training(config, check_hashes=check_hashes), config.cluster
    check_memory(plan)
    if cluster.scheduler and not cluster.address and cluster.gpus_per_node:
        check_capacity(plan.pools, gpus_of_nodes(with_node_count(cluster, plan.pools)), "GPU")
    check_transport(config, plan.pools)
    if cluster.nodes and not (cluster.scheduler or cluster.address):
        raise ValueError(
            f"cluster.nodes={cluster.nodes}: applies only to a Slurm job, but this run starts on this machine; add cluster=slurm."
        )
    return plan


MAX_CHANGES = 4  # `advise` searches sets of config changes; a set has at most this many changes
BEAM_WIDTH = 6  # number of sets that a round of the search extends by one change: those that are nearest to fitting
MAX_SHOWN = 6  # `advise` returns at most this many sets
FULL_RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)

EstimateMemory = Callable[[Config], RunMemory]
"""Estimates the memory of a config. Raises ValueError if the config's layout is impossible."""
ChangedConfig = tuple[tuple[str, ...], Config]
"""A pair: command-line overrides, and the config with these overrides."""


@dataclass(frozen=True)
class MemoryAdvice:
    """Command-line overrides, and the memory that the run needs with them."""

    overrides: tuple[str, ...]
    config: Config
    memory: RunMemory


def advise(config: Config, estimate: EstimateMemory) -> list[MemoryAdvice]:
    """Return the smallest sets of changes that make the run fit. Sets that need the fewest GPUs come first.

    This is a beam search over sets of at most MAX_CHANGES changes. Returns an empty list if no visited set fits.
    """
    beam = [MemoryAdvice((), config, estimate(config))]
    visited: set[tuple[str, ...]] = {()}
    for _ in range(MAX_CHANGES):
        extended = list(_extend(beam, estimate, visited))
        if fitting := [advice for advice in extended if advice.memory.fits]:
            return sorted(fitting, key=lambda advice: (advice.memory.gpus, advice.overrides))[:MAX_SHOWN]
        beam = sorted(extended, key=lambda advice: (len(advice.memory.problems), advice.memory.excess))[:BEAM_WIDTH]
    return []


def _extend(
    beam: list[MemoryAdvice], estimate: EstimateMemory, visited: set[tuple[str, ...]]
) -> Iterator[MemoryAdvice]:
    """Yield the sets that consist of a set in `beam` and one more change, except those in `visited`. Add them to `visited`.

    Impossible layouts are skipped.
    """
    for before in beam:
        for override, config in single_changes(before.config):
            overrides = (*_without_keys_of(override, before.overrides), *override)
            if (key := tuple(sorted(overrides))) not in visited:
                visited.add(key)
                try:
                    yield MemoryAdvice(overrides, config, estimate(config))
                except ValueError:
                    continue


def _without_keys_of(later: tuple[str, ...], overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return `overrides` without the entries whose key is also set by `later`."""
    keys = {text.split("=")[0] for text in later}
    return tuple(text for text in overrides if text.split("=")[0] not in keys)


def single_changes(config: Config) -> Iterator[ChangedConfig]:
    """Yield every single change that may save memory."""
    if config.megatron.get("recompute_granularity") != "full":
        overrides = tuple(f"megatron.{name}={value}" for name, value in FULL_RECOMPUTE.items())
        yield overrides, replace(config, megatron=dict(config.megatron) | FULL_RECOMPUTE)
    yield from _smaller_budgets(config)
    if config.trainer.logprob_chunk > 256:
        yield _set_values(config, "trainer", logprob_chunk=config.trainer.logprob_chunk // 2)
    yield from _layout_changes(config)
    fraction = config.sglang.get("mem_fraction_static") or DEFAULT_MEM_FRACTION
    for other in (round(fraction - 0.1, 2), round(fraction + 0.1, 2)):
        if 0.2 <= other <= 0.9:
            sglang = dict(config.sglang) | dict(mem_fraction_static=other)
            yield (f"sglang.mem_fraction_static={other}",), replace(config, sglang=sglang)
    engine_tp = config.rollout.engine_tp * 2
    yield _set_values(config, "rollout", engine_tp=engine_tp, num_engines=max(1, config.rollout.num_engines // 2))
    if config.weight_sync.bucket_bytes > 64 << 20:
        yield _set_values(config, "weight_sync", bucket_bytes=64 << 20)


def _smaller_budgets(config: Config) -> Iterator[ChangedConfig]:
    """For each token budget that is set, yield the change that halves this budget.

    A budget that is not set follows a budget of the actor.
    """
    for section in ("trainer", "critic"):
        for name in ("max_tokens_per_micro_batch", "max_tokens_per_forward_micro_batch"):
            if (tokens := getattr(getattr(config, section), name)) and tokens > 1:
                yield _set_values(config, section, **{name: tokens // 2})
    for role, node in config.roles.items():
        if (tokens := node.get("max_tokens_per_micro_batch")) and tokens > 1:
            smaller = dict(config.roles) | {role: dict(node) | dict(max_tokens_per_micro_batch=tokens // 2)}
            yield (f"roles.{role}.max_tokens_per_micro_batch={tokens // 2}",), replace(config, roles=smaller)


def _layout_changes(config: Config) -> Iterator[ChangedConfig]:
    """Yield layouts in which one parallel axis is doubled, and the current layout with twice the value of world_size or dp.

    A dp that is not set counts as 1. If tp, pp or cp is doubled, the replicas are halved or the GPUs are doubled. If ep is
    doubled, the keys dp and world_size do not change.
    """
    p = config.parallel
    for axis in ("tp", "pp", "cp", "ep"):
        sizes = {axis: vars(p)[axis] * 2}
        if axis == "tp" and p.etp is None and p.ep > 1:
            sizes["etp"] = 1  # ranks hold whole experts, which are not sharded
        if p.world_size is not None or axis == "ep":
            yield _set_values(config, "parallel", **sizes)
        if p.dp and p.dp % 2 == 0 and axis != "ep":
            yield _set_values(config, "parallel", **sizes, dp=p.dp // 2)
        if p.world_size is None and axis != "ep":
            yield _set_values(config, "parallel", **sizes)
    if p.world_size is not None:
        yield _set_values(config, "parallel", world_size=p.world_size * 2)
    else:
        yield _set_values(config, "parallel", dp=(p.dp or 1) * 2)


def _set_values(config: Config, section: str, **values: Any) -> ChangedConfig:
    overrides = tuple(f"{section}.{name}={value}" for name, value in values.items())
    return overrides, replace(config, **{section: replace(vars(config)[section], **values)})
