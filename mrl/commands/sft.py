"""`mrl sft`: supervised training on responses or preferences, and training of reward models."""

import sys
from pathlib import Path

from mrl.checkpoint.run_dir import check_not_in_use
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.controller import plan_tools
from mrl.controller.processes import supervised_trainer
from mrl.controller.supervised_stage import export_supervised, train_supervised
from mrl.workers.worker import TrainWorker

USAGE = """usage: mrl sft [KEY=VALUE ...] [experiment=NAME] [objective=NAME] [--cfg job]

Trains a model on responses (supervised fine-tuning), on preferences (DPO, IPO, KTO, ORPO, SimPO), or as a reward model. Writes a
Hugging Face folder and, if trainer.save is true, a checkpoint.

  mrl sft experiment=quickstart sft.output=null                  fine-tune the tiny model of the quickstart (null: write to
                                                                 hf/ in run.dir, not to the folder of the quickstart's warm start)
  mrl sft model.path=Qwen3-0.6B sft.train=rows.parquet sft.steps=500 sft.optim.lr=1e-5 parallel.dp=4
  mrl sft model.path=Qwen3-0.6B objective=dpo sft.objective.beta=0.05 sft.train=pairs.parquet sft.optim.lr=5e-7
  mrl sft model.path=Qwen3-0.6B objective=reward_model sft.train=pairs.parquet

It takes the keys of `mrl train`. `mrl config sft` describes all keys of the section sft. These keys matter most:
  model.path            Hugging Face folder of the model
  objective             cross_entropy (default), dpo, ipo, hinge, kto, orpo, simpo, reward_model or outcome_reward_model;
                        sft.objective has its arguments
  sft.train             parquet or jsonl file with the columns prompt and response; prompt, chosen and rejected (pairs); or
                        prompt, completion and label (kto, outcome_reward_model)
  sft.output            Hugging Face folder for the trained model. Default: hf/ in run.dir.
  sft.steps             number of optimizer steps
  sft.batch_size        number of rows (or pairs) in one optimizer step
  sft.optim.lr          learning rate; sft.optim has the other settings of the optimizer
  parallel.*            parallel layout of the trainer ranks

  --cfg job             prints the config and stops

docs/tutorials/data.md describes the rows.
"""


def fine_tune(config: Config) -> None:
    """Train on the rows in `sft.train`, write a Hugging Face folder and, if `trainer.save` is true, write a checkpoint.

    The Hugging Face folder is `sft.output`, or hf/ in the run directory if this key is not set.
    """
    with hydra_entry.exit_on_user_error():
        check_not_in_use(Path(config.run.dir))
        plan = plan_tools.plan_supervised(config)
    output = config.sft.output or str(Path(config.run.dir) / "hf")
    with supervised_trainer(plan) as actor:
        loss = train_supervised(actor, plan, config.sft)
        export_supervised(actor, config, output)
        if config.trainer.save:
            actor.call(TrainWorker.save, str(Path(config.run.dir).resolve() / "checkpoint"))
    sys.stdout.write(f"{config.sft.steps} steps, loss {loss:.4f}; Hugging Face model in {output}\n")


def main(argv: list[str]) -> int:
    """Entry point of `mrl sft`."""
    return hydra_entry.run(argv, fine_tune, USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
