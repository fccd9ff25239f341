"""Memory of a run, estimated from its config by mrl.planner, and a check that its GPUs have enough."""

from dataclasses import dataclass
from functools import cached_property

from models.families import family_of
from mrl.algorithms.parts import build_algorithm
from mrl.config.schema import Config
from mrl.controller.plan_models import (
    ModelPlan,
    build_pools,
    check_layout,
    engine_topology,
    make_input_files,
    parallel_layout,
    plan_models,
)
from mrl.controller.plan_train import TrainPlan, plan_training
from mrl.placement.resource_pools import check_capacity, gpus_of_nodes, with_node_count
from mrl.planner.activation_bytes import CPU_KERNELS, GPU_KERNELS
from mrl.planner.memory_advice import advise
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import RoleModel, RunMemory, run_memory, trainer_settings
from mrl.weight_sync.engine_layout import Topology


@dataclass(frozen=True)
class MemoryEstimator:
    """Estimates the memory of a run. Reads the models once, so that many variants of the config can be estimated."""

    config: Config
    models: dict[str, ModelPlan]  # by role
    has_reference: bool
    topology: Topology | None  # of one engine; None if the run starts no engines

    @classmethod
    def of(cls, config: Config) -> "MemoryEstimator":
        """Read the models of a config. Raises ValueError if the config is wrong for reasons other than memory."""
        needs = build_algorithm(config).needs
        make_input_files(config)
        return cls._of(config, needs, plan_models(config, needs, weights=False))

    @classmethod
    def of_plan(cls, plan: TrainPlan) -> "MemoryEstimator":
        """Take the models from a finished plan."""
        return cls._of(plan.config, plan.algorithm.needs, plan.models)

    @classmethod
    def _of(cls, config: Config, needs: frozenset[str], models: dict[str, ModelPlan]) -> "MemoryEstimator":
        starts_engines = not (config.rollout.replay or config.rollout.engine_urls)
        topology = engine_topology(config, models["actor"]) if starts_engines else None
        return cls(config, models, "ref_logprobs" in needs, topology)

    @cached_property
    def shapes(self) -> dict[str, ModelShape]:
        """Tensor sizes of each model, by role."""
        return {role: ModelShape.of(family_of(model.hf), model.arch) for role, model in self.models.items()}

    def estimate(self, config: Config) -> RunMemory:
        """Estimate the memory of a variant of the config with the same models. Raises ValueError for a layout that fails."""
        models = {role: self._model(config, role) for role in self.models}
        topology = engine_topology(config, self.models["actor"]) if self.topology else None
        pools = build_pools(config, {role: model.dims for role, model in models.items()})
        return run_memory(config, models, topology, pools, self.has_reference)

    def _model(self, config: Config, role: str) -> RoleModel:
        plan = self.models[role]
        dims = parallel_layout(config, "" if role == "actor" else role)
        check_layout(config, plan.arch, dims)
        settings = trainer_settings(
            config,
            plan.context,
            head="value" if role == "critic" else "vocabulary",
            trained=plan.optimizer is not None,
            kernels=GPU_KERNELS if config.cluster.hardware.name else CPU_KERNELS,
        )
        return RoleModel(self.shapes[role], dims, settings, plan.context)


def check_memory(plan: TrainPlan) -> None:
    """Raise ValueError if the run needs more memory than `cluster.hardware` has. Checks nothing if GPU memory is unknown."""
    config = plan.config
    if not (config.cluster.hardware.gpu_memory_gb and config.plan.check_memory):
        return
    estimator = MemoryEstimator.of_plan(plan)
    if (memory := estimator.estimate(config)).fits:
        return
    lines = ["memory: the run does not fit", *memory.problems]
    lines += [f"would fit: {' '.join(advice.overrides)}" for advice in advise(config, estimator.estimate)]
    raise ValueError(
        "\n  ".join([*lines, "mrl plan memory shows the whole estimate; plan.check_memory=false starts anyway"])
    )


def plan_fitting_run(config: Config) -> TrainPlan:
    """Plan a training run and check that its machines can hold it, as far as their sizes are known; raises ValueError."""
    plan, cluster = plan_training(config), config.cluster
    check_memory(plan)
    if cluster.scheduler and not cluster.address and cluster.gpus_per_node:
        check_capacity(plan.pools, gpus_of_nodes(with_node_count(cluster, plan.pools)), "GPU")
    if cluster.nodes and not (cluster.scheduler or cluster.address):
        raise ValueError(
            f"cluster.nodes={cluster.nodes}: applies to a job, and this run starts here; add cluster=slurm."
        )
    return plan
