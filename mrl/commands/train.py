"""`mrl train`: reinforcement learning, from config to exported model."""

import sys
from pathlib import Path

from mrl import build
from mrl import plan as planning
from mrl.commands import hydra_app
from mrl.config import Config
from mrl.trainer import Result
from mrl.workers.group import StartError


def job(config: Config) -> None:
    """One run."""
    try:
        plan = planning.plan_training(config)
    except ValueError as error:
        hydra_app.refuse(error)
    try:
        with build.trainer(plan) as trainer:
            result = trainer.fit()
            if config.trainer.save:
                trainer.actor.save(str(Path(config.run.dir).resolve()))
    except StartError as error:
        hydra_app.refuse(error)
    sys.stdout.write(summary(result, config.run.dir, config.trainer.stop_reward))


def summary(result: Result, run_dir: str, goal: float | None) -> str:
    """What a run achieved, for the terminal."""
    lines = [f"{result.steps} steps, mean reward {result.reward:.3f} over the last ones"]
    if goal is not None and not result.reward >= goal:
        lines.append(f"the goal trainer.stop_reward={goal} was not reached")
    for name, before in result.before.items():
        what = name.removeprefix("eval/").replace("_", " ")
        lines.append(f"held-out {what}: {before:.3f} before, {result.after[name]:.3f} after")
    return "\n".join([*lines, f"everything is in {run_dir}", ""])


def main(argv: list[str]) -> int:
    """Entry point of `mrl train`."""
    return hydra_app.run(argv, job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
