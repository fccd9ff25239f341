"""From a configuration to what it asks of the hosts."""

from math import prod
from pathlib import Path

from models.conversion.hf_io import HFWeights
from mrl.config.schema import Config
from mrl.controller.plan_train import engine_layout, plan_models, pools_of
from mrl.doctor.groups import groups_of
from mrl.doctor.wanted import Wanted

LARGE = 10**9
"""Parameters beyond which nobody trains on a CPU."""
OPTIMIZER_BYTES = 12  # of a parameter, in a checkpoint: two moments and the copy that is trained, in float32


def wanted_by(config: Config) -> Wanted:
    """What this configuration needs; what is wrong in it is among its mistakes."""
    try:
        _, models = plan_models(config, weights=True)
        base, pools = models["actor"], pools_of(config, {role: model.dims for role, model in models.items()})
        if not config.rollout.replay:
            engine_layout(config, base)
    except ValueError as error:
        return Wanted(model=config.model.path, run_dir=config.run.dir, mistakes=[str(error)])
    parameters = sum(map(prod, HFWeights(base.model_path).shapes().values()))
    bytes_each = parameters * (config.model.itemsize + OPTIMIZER_BYTES)
    every = config.checkpoint.every
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best + 1 if every else int(config.trainer.save)
    return Wanted(
        gpus=pools.size,
        cuda=_needs_cuda(config, parameters),
        layout=str(base.dims),
        groups={name: list(ranks) for name, ranks in groups_of(base.dims).items()},
        model=str(Path(base.model_path).absolute()),
        parameters=parameters,
        run_dir=config.run.dir,
        checkpoint_bytes=max(0, bytes_each * kept - _written(Path(config.run.dir, "checkpoints"))),
        address=config.cluster.address,
        engines_take_turns=any("engines" in roles for roles in pools.shared),
    )


def _written(folder: Path) -> int:
    """Bytes of the checkpoints that a run which goes on has already."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _needs_cuda(config: Config, parameters: int) -> bool:
    named = config.sglang.get("device") == "cuda" or config.weight_sync.transport == "cuda_ipc"
    return named or parameters > LARGE
