"""Requirements of a run, derived from its config: GPUs, process groups, model folder, disk space."""

from collections.abc import Iterator
from pathlib import Path

from models.families import family_of
from mrl.checkpoint.resume import continues_from_checkpoint
from mrl.config.schema import Config
from mrl.controller.memory_check import check_transport
from mrl.controller.plan_models import (
    build_pools,
    drop_lora_path_if_continuing,
    engine_layout,
    make_input_files,
    plan_models,
)
from mrl.controller.plan_train import algorithm_of
from mrl.doctor.host_facts import Requirements
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import checkpoint_disk_bytes, model_shape
from parallel.dims import ParallelDims

MAX_CPU_PARAMETERS = 10**9  # training a larger model on CPUs takes too long to be useful
AXES = ("tp", "cp", "dp", "pp")  # axes of a rank's coordinates; ep divides the ranks of a pipeline stage in another way


def requirements_of(config: Config) -> Requirements:
    """Derive the requirements of a run from its config. An error in the config is not raised, but returned in `mistakes`."""
    try:
        required_inputs = algorithm_of(config).required_inputs
        make_input_files(config)
        models = plan_models(drop_lora_path_if_continuing(config, continues_from_checkpoint(config)), required_inputs)
        actor, pools = models["actor"], build_pools(config, {role: model.dims for role, model in models.items()})
        if not config.rollout.replay:
            engine_layout(config, actor)
        check_transport(config, pools)
    except ValueError as error:
        return Requirements(model=config.model.path, run_dir=config.run.dir, mistakes=[str(error)])
    shapes = {role: model_shape(config, model.hf, model.arch) for role, model in models.items()}
    trained = {
        role: ModelShape.of_adapters(family_of(model.hf), model.arch, model.lora) if model.lora else shapes[role]
        for role, model in models.items()
        if model.optimizer
    }
    num_parameters = shapes["actor"].num_parameters
    needed = checkpoint_disk_bytes(config, trained)
    return Requirements(
        gpus=pools.size,
        cannot_run_on_cpus=_cannot_run_on_cpus(config, num_parameters),
        layout=str(actor.dims),
        process_groups={name: list(ranks) for name, ranks in process_groups(actor.dims).items()},
        model=str(Path(actor.model_path).absolute()),
        parameters=num_parameters,
        run_dir=config.run.dir,
        checkpoint_bytes=max(0, needed - _folder_bytes(Path(config.run.dir, "checkpoints"))),
        address=config.cluster.address,
        offloads_engines=any("engines" in roles for roles in pools.colocated_roles),
    )


def _folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder together, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _cannot_run_on_cpus(config: Config, parameters: int) -> bool:
    uses_cuda = config.sglang.get("device") == "cuda" or config.weight_sync.transport == "cuda_ipc"
    return uses_cuda or parameters > MAX_CPU_PARAMETERS


def process_groups(dims: ParallelDims) -> dict[str, tuple[int, ...]]:
    """Return the tp, cp, dp, pp and ep groups that have more than one trainer rank: name ("tp 0") -> global ranks."""
    groups: dict[str, tuple[int, ...]] = {}
    for axis in AXES:
        if getattr(dims, axis) > 1:
            groups |= _number_groups(axis, _groups_along_axis(dims, axis))
    if dims.ep > 1:
        groups |= _number_groups("ep", _expert_groups(dims))
    return groups


def _number_groups(name: str, groups: Iterator[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{name} {index}": ranks for index, ranks in enumerate(groups)}


def _groups_along_axis(dims: ParallelDims, axis: str) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that differ only in their coordinate of `axis`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(dims.world_size):
        coords = dims.coords(rank)
        groups.setdefault(tuple(getattr(coords, other) for other in AXES if other != axis), []).append(rank)
    yield from map(tuple, groups.values())


def _expert_groups(dims: ParallelDims) -> Iterator[tuple[int, ...]]:
    """Yield the expert-parallel groups. A group holds one expert-tensor shard of every expert of its pipeline stage."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    stage_size = dims.world_size // dims.pp  # ranks of one pipeline stage
    for rank in range(dims.world_size):
        etp, _ = dims.expert_coords(rank)
        groups.setdefault((rank // stage_size, rank % stage_size // (dims.expert_tp * dims.ep), etp), []).append(rank)
    yield from map(tuple, groups.values())
