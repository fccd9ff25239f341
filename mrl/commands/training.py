"""The process that trains, from config to exported model; `mrl train` watches over it."""

import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from mrl.commands import hydra_app, supervised
from mrl.config.schema import Config
from mrl.controller import build
from mrl.controller import plan_train as planning
from mrl.controller.memory_check import check_memory
from mrl.controller.plan_train import TrainPlan
from mrl.controller.trainer import TrainingResult
from mrl.core.errors import PreemptedError, StartupLostError
from mrl.core.preemption import REQUEUE, PreemptionHandler
from mrl.launch import slurm_job
from mrl.placement.resource_pools import check_room, gpus_of_nodes, with_nodes


def job(config: Config) -> None:
    """One run, or what is left of it; a signal to leave ends it with the status that asks to be started again."""
    if config.cluster.scheduler and not config.cluster.address:
        return _submit(config)
    if HydraConfig.get().mode == RunMode.RUN:  # a sweep's points have folders of their own
        supervised.say(f"run.dir={config.run.dir}")
    with PreemptionHandler() as leaving:
        try:
            result = _fit(config, leaving)
        except PreemptedError as reason:
            sys.stdout.write(f"{reason}: the same command with run.dir={config.run.dir} goes on from here\n")
            raise SystemExit(REQUEUE) from None
    sys.stdout.write(summary(result, config.run.dir, config.trainer.stop_reward))


def planned(config: Config) -> TrainPlan:
    """The run, checked, on machines that can hold it as far as they are known; raises ValueError."""
    plan, cluster = planning.plan_training(config), config.cluster
    check_memory(plan)
    if cluster.scheduler and not cluster.address and cluster.gpus_per_node:
        check_room(plan.pools, gpus_of_nodes(with_nodes(cluster, plan.pools)), "GPU")
    if cluster.nodes and not (cluster.scheduler or cluster.address):
        raise ValueError(f"cluster.nodes={cluster.nodes}: is for a job, and this run starts here; add cluster=slurm.")
    return plan


def _submit(config: Config) -> None:
    """Check all that can be checked where there are no GPUs; then a job runs the command, or the job is only shown."""
    with hydra_app.as_user_error():
        cluster = with_nodes(config.cluster, planned(config).pools)
        run_dir, overrides = Path(config.run.dir).resolve(), HydraConfig.get().overrides.task
        job = slurm_job.make_job(cluster, config.run.name, run_dir, overrides)
        text = job.script if config.cluster.dry_run else slurm_job.told(job, slurm_job.submit(job))
    sys.stdout.write(text)


def _fit(config: Config, leaving: PreemptionHandler) -> TrainingResult:
    try:
        plan = planned(config)
    except ValueError as error:
        hydra_app.refuse(error)
    try:
        with build.trainer(plan, leaving) as trainer:
            return trainer.fit()
    except StartupLostError as error:
        supervised.start_again()
        sys.stderr.write(f"mrl: {error}\n")
        raise SystemExit(1) from error


def summary(result: TrainingResult, run_dir: str, goal: float | None) -> str:
    """What a run achieved, for the terminal."""
    lines = [f"{result.steps} steps, mean reward {result.reward:.3f} over the last ones"]
    if goal is not None and not result.reward >= goal:
        lines.append(f"the goal trainer.stop_reward={goal} was not reached")
    for name, before in result.before.items():
        what = name.removeprefix("eval/").replace("_", " ")
        lines.append(f"held-out {what}: {before:.3f} before, {result.after[name]:.3f} after")
    return "\n".join([*lines, f"everything is in {run_dir}", ""])


def main(argv: list[str]) -> int:
    """Entry point of the process."""
    supervised.register()
    return hydra_app.run(argv, job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
