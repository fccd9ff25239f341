"""Memory of the run that a config describes, counted by mrl.planner.memory, and whether its GPUs have as much."""

from dataclasses import dataclass
from functools import cached_property

from models.families import family_of
from mrl.algorithms.parts import AlgorithmParts
from mrl.config.schema import Config
from mrl.controller import plan_train as planning
from mrl.controller.plan_train import ModelPlan, TrainPlan
from mrl.placement.resource_pools import Pools
from mrl.planner.activation_bytes import CPU, GPU
from mrl.planner.memory_advice import advice
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import Model, RunMemory, run_memory, trainer_settings
from mrl.weight_sync.engine_layout import Topology


@dataclass(frozen=True)
class Counted:
    """A config's models, read once, so that many configs around it can be counted."""

    config: Config
    models: dict[str, ModelPlan]
    reference: bool
    topology: Topology | None

    @classmethod
    def of(cls, config: Config) -> "Counted":
        """Raises ValueError where the run could not be, whatever memory there is."""
        return cls._of(config, *planning.plan_models(config))

    @classmethod
    def of_plan(cls, plan: TrainPlan) -> "Counted":
        """Of a run that was planned already."""
        return cls._of(plan.config, plan.behaviours, plan.models)

    @classmethod
    def _of(cls, config: Config, behaviours: AlgorithmParts, models: dict[str, ModelPlan]) -> "Counted":
        own = not (config.rollout.replay or config.rollout.engine_urls)
        topology = planning.engine_topology(config, models["actor"]) if own else None
        return cls(config, models, "ref_logprobs" in behaviours.needs, topology)

    @cached_property
    def shapes(self) -> dict[str, ModelShape]:
        return {role: ModelShape.of(family_of(model.hf), model.arch) for role, model in self.models.items()}

    def _pools(self, config: Config) -> Pools:
        """Pools of a config beside this one; raises ValueError."""
        dims = {role: planning.layout_of(config, "" if role == "actor" else role) for role in self.models}
        return planning.pools_of(config, dims)

    def memory(self, config: Config) -> RunMemory:
        """Of a config with the same models; raises ValueError where its layout cannot be."""
        models = {role: self._model(config, role) for role in self.models}
        topology = None
        if self.topology:
            topology = planning.engine_topology(config, self.models["actor"])
        return run_memory(config, models, topology, self._pools(config), self.reference)

    def _model(self, config: Config, role: str) -> Model:
        plan, own = self.models[role], "" if role == "actor" else role
        dims = planning.layout_of(config, own)
        planning.check_layout(config, plan.arch, dims)
        settings = trainer_settings(
            config,
            plan.context,
            head="value" if role == "critic" else "vocabulary",
            trained=plan.optimizer is not None,
            kernels=GPU if config.cluster.hardware.name else CPU,
        )
        return Model(self.shapes[role], dims, settings, plan.context)


def check_memory(plan: TrainPlan) -> None:
    """Raise ValueError where the run needs more than its machines have, as far as `cluster.hardware` says what these are."""
    config = plan.config
    if not (config.cluster.hardware.gpu_memory_gb and config.plan.check_memory):
        return
    counted = Counted.of_plan(plan)
    if (found := counted.memory(config)).fits:
        return
    lines = ["memory: the run does not fit", *found.problems]
    lines += [f"would fit: {' '.join(change.overrides)}" for change in advice(config, counted.memory)]
    raise ValueError(
        "\n  ".join([*lines, "mrl plan memory has the whole account; plan.check_memory=false starts anyway"])
    )
