"""`mrl sft`: supervised fine-tuning through the same trainer processes."""

import sys
from pathlib import Path

from mrl.commands import hydra_app
from mrl.config.schema import Config
from mrl.controller import plan_train as planning
from mrl.controller.processes import started


def job(config: Config) -> None:
    """One run: train on `sft.train`, write `sft.output` (default: hf/ in the run's folder) and a checkpoint."""
    try:
        plan = planning.plan_supervised(config)
    except ValueError as error:
        hydra_app.refuse(error)
    output = config.sft.output or str(Path(config.run.dir) / "hf")
    with started(plan, "sft") as processes:
        processes.group.wait_ready(config.cluster.start_timeout_s)
        loss = processes.warm_start(config.sft)
        processes.export(output)
        if config.trainer.save:
            processes.group.call("save", str(Path(config.run.dir).resolve() / "checkpoint"))
    sys.stdout.write(f"{config.sft.steps} steps, loss {loss:.4f} nats per token; Hugging Face model in {output}\n")


def main(argv: list[str]) -> int:
    """Entry point of `mrl sft`."""
    return hydra_app.run(argv, job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
