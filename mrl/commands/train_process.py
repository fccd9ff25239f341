"""The process that `mrl train` starts and supervises. It trains, or it submits the run as a Slurm job."""

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from mrl.checkpoint.run_dir import check_not_in_use
from mrl.checkpoint.store import CheckpointStore
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.controller import build
from mrl.controller.memory_check import plan_fitting_run
from mrl.controller.rehearsal import rehearse
from mrl.controller.trainer import TrainingResult
from mrl.core.metric_families import shown_evaluation
from mrl.core.run_errors import (
    REQUEUE_STATUS,
    UNHEALTHY_STATUS,
    PreemptedError,
    PreemptionHandler,
    StartupLostError,
    UnhealthyRunError,
)
from mrl.launch import slurm_job, supervisor
from mrl.placement.device_map import idle_gpus_of_job
from mrl.placement.resource_pools import gpus_of_nodes, with_node_count
from mrl.sweep.points import metric_value
from mrl.tracking.console import Startup
from mrl.tracking.learning_health import read_first_steps


def train(config: Config, overrides: Sequence[str] = ()) -> float | None:
    """Train one run to its end, or submit the run as a Slurm job. Return the metric by which sweeps compare runs.

    For a submitted run, return None. If the run directory has a checkpoint, training continues from this checkpoint. If the run
    is finished, only its result is printed. A preempted run saves a checkpoint, if training has begun, and exits with
    REQUEUE_STATUS.

    `overrides`: overrides of the command line. A Slurm job gets the same overrides.
    """
    if config.cluster.scheduler and not config.cluster.address:
        return _submit(config, overrides)
    # The supervisor adds this override to the arguments of a restart, so Hydra must be able to parse it.
    supervisor.tell_supervisor(hydra_entry.format_override("run.dir", config.run.dir))
    with hydra_entry.exit_on_user_error():
        check_not_in_use(Path(config.run.dir))
    if finished := build.finished_result(config):
        limits = "trainer.max_steps" if config.trainer.epochs is None else "trainer.max_steps and trainer.epochs"
        sys.stdout.write(f"this run is finished already, so nothing is trained; a larger {limits} continues it\n")
        sys.stdout.write(summary(finished, config, overrides))
        return metric_value(Path(config.run.dir), config.sweep.metric)
    sys.stdout.write(f"run directory: {config.run.dir}\n")
    sys.stdout.flush()
    startup = Startup()
    try:
        with closing(startup), PreemptionHandler() as preemption:
            startup.wait_for("the check of the config, the model and the data")
            with hydra_entry.exit_on_user_error():
                plan = plan_fitting_run(config)
                rehearse(plan)
            with build.trainer(plan, preemption, startup) as trainer:
                result = trainer.fit()
    except PreemptedError as reason:
        sys.stdout.write(f"{reason}: the same command with {_run_dir_word(config)} continues the run\n")
        raise SystemExit(REQUEUE_STATUS) from None
    except UnhealthyRunError as reason:
        sys.stdout.write(
            f"{reason}\nThe run wrote a checkpoint. The same command with {_run_dir_word(config)} and corrected keys continues "
            "it; trainer.on_unhealthy=warn continues it in spite of the problem.\n"
        )
        raise SystemExit(UNHEALTHY_STATUS) from None
    except StartupLostError as error:
        supervisor.request_restart()
        sys.stderr.write(f"mrl: {error}\n")
        raise SystemExit(1) from error
    sys.stdout.write(summary(result, config, overrides))
    return metric_value(Path(config.run.dir), config.sweep.metric)


def _run_dir_word(config: Config) -> str:
    """Return the override of the run directory as a word that can be pasted into a shell."""
    return shlex.quote(hydra_entry.format_override("run.dir", config.run.dir))


def _submit(config: Config, overrides: Sequence[str]) -> None:
    """Check everything that needs no GPU, then submit the Slurm job. With cluster.dry_run, print the script instead."""
    with hydra_entry.exit_on_user_error():
        plan = plan_fitting_run(config, check_hashes=False)  # only the job reads the checkpoint
        rehearse(plan)
        cluster = with_node_count(config.cluster, plan.pools)
        for warning in idle_gpus_of_job(plan.pools, gpus_of_nodes(cluster)):
            sys.stderr.write(f"mrl: {warning}\n")
        job = slurm_job.make_job(cluster, config.run.name, Path(config.run.dir).resolve(), overrides)
        text = job.script if config.cluster.dry_run else slurm_job.submission_message(job, slurm_job.submit(job))
    sys.stdout.write(text)


def summary(result: TrainingResult, config: Config, overrides: Sequence[str]) -> str:
    """Return the last output of a run: rewards, the paths of the model and of the checkpoint, and commands to run next."""
    folder, goal = Path(config.run.dir), config.trainer.stop_reward
    rewards = [step["reward/mean"] for step in read_first_steps(folder / "metrics.jsonl", "reward/mean")]
    first = f" ({rewards[0]:.3f} in the first step)" if rewards else ""
    lines = [f"{result.steps} steps, mean reward {result.reward:.3f} over the last steps{first}"]
    is_reached = goal is not None and result.reward >= goal
    if goal is not None and not is_reached:
        lines.append(f"the goal trainer.stop_reward={goal} was not reached")
    for name in shown_evaluation(result.before) | shown_evaluation(result.after):
        if name in result.before and name in result.after:
            what = re.sub("[_/]", " ", name.removeprefix("eval/"))
            lines.append(f"held-out {what}: {result.before[name]:.3f} before, {result.after[name]:.3f} after")
    model, checkpoint = folder / "hf", CheckpointStore(folder / "checkpoints").latest()
    lines += [f"model (Hugging Face folder): {model}"] if model.is_dir() else []
    lines += [f"checkpoint: {checkpoint.path}"] if checkpoint else []
    return "\n".join(
        [*lines, f"run directory: {folder}", "next:", *next_commands(config, overrides, model.is_dir(), is_reached), ""]
    )


def next_commands(config: Config, overrides: Sequence[str], has_model: bool, reached_goal: bool = False) -> list[str]:
    """Return commands that read the samples, evaluate the model, and continue the run.

    `reached_goal`: whether the run reached trainer.stop_reward. If so, the command that continues the run turns this key off.
    """
    # The Python function `mrl.train` passes its config as a temporary file, so no command line can repeat the config.
    if any(word.startswith("--config-path") for word in sys.argv):
        return [f"  mrl samples {shlex.quote(str(config.run.dir))} --worst"]
    epochs = config.trainer.epochs
    replaced = {"run.dir", "trainer.max_steps", *(["trainer.stop_reward"] if reached_goal else [])}
    replaced |= {"trainer.epochs"} if epochs else set()
    own = [word.lstrip("+") for word in overrides if hydra_entry.override_key(word) not in replaced]
    data = [word for word in own if hydra_entry.override_key(word).split(".")[0] in ("experiment", "data", "reward")]
    run_dir = hydra_entry.format_override("run.dir", config.run.dir)
    steps = [f"trainer.max_steps={max(1, 2 * config.trainer.max_steps)}"]
    steps += [f"trainer.epochs={2 * epochs:g}"] if epochs else []
    steps += ["trainer.stop_reward=null"] if reached_goal else []
    commands = [["samples", str(config.run.dir), "--worst"]]
    if has_model and (config.data.test or config.data.test_sets):
        commands.append(["evaluate", *data, hydra_entry.format_override("model.path", f"{config.run.dir}/hf")])
    commands.append(["train", *own, run_dir, *steps])
    return [f"  mrl {shlex.join(words)}" for words in commands]


def main(argv: list[str]) -> int:
    """Entry point of this process."""
    if not (hydra_entry.names_model(argv) or any(word.startswith("-") for word in argv)):
        sys.stdout.write("no experiment= or model.path= is given: training experiment=quickstart\n")
    with hydra_entry.exit_on_user_error():
        arguments = hydra_entry.prepare_arguments(argv)
    overrides = [word for word in arguments if "=" in word and not word.startswith("-")]
    return hydra_entry.run(arguments, partial(train, overrides=overrides))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
