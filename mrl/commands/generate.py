"""`mrl generate`: responses of a model to a data set, as parquet."""

import sys
import time
from dataclasses import dataclass

from mrl.commands import hydra_app
from mrl.commands.convert import Bar
from mrl.config.schema import Config
from mrl.evaluation.generation import generate
from mrl.evaluation.plan import GenerationPlan, determinism, plan_generation
from mrl.weight_sync.control import EngineError

USAGE = """usage: mrl generate [KEY=VALUE ...] [experiment=NAME] [--cfg job]

Samples responses to the prompts of data.test and keeps them as parquet, with their scores. Stopped, it goes on: the same
command with the same generate.output adds what is missing. Finished, it says so and does nothing.

  mrl generate model.path=Qwen3-1.7B data.test=[test.parquet] generate.output=outputs/answers
  mrl generate ... generate.samples=1 generate.temperature=0     the likeliest token each time
  mrl generate ... generate.samples=32 reward=gsm8k              scored by another reward; generate.score=false: by none
  mrl generate ... rollout.num_engines=4 rollout.engine_tp=2     four engines on two GPUs each; sglang.*: SGLang's arguments
  mrl generate ... rollout.engine_urls=[http://host:30000]       servers that run already
  mrl generate model.path=RUN/checkpoints/step_000060/actor generate.base=Qwen3-1.7B ...   a Megatron checkpoint

The same keys as `mrl train`, of which these matter: model.*, data.inputs, data.test, rollout.max_response_tokens, num_engines,
engine_tp, engine_urls and the timeouts, run.seed, reward, sglang; and the section generate:
  output                 folder of the parquet files; default: generated/ in run.dir, which is a new one each time
  samples                responses to each prompt (8)
  temperature            of sampling (1.0); 0 takes the likeliest token
  top_p, top_k           sample from the likeliest tokens only (1.0, -1: from all)
  max_response_tokens    a longer response is cut (rollout.max_response_tokens)
  deterministic          a seed for each response, and kernels that do not depend on the batch (true); false is faster
  rows                   the first rows of each file only (all)
  base                   Hugging Face folder with config and tokenizer of a Megatron checkpoint
  logprobs               also keep the log-probability of every token (false)
  score                  also keep what `reward` gives (true)
  prompts_per_file       a file appears when all its prompts are answered (64)
  requests_in_flight     responses that one engine is asked for at one time (256)

docs/evaluate.md explains the columns and what a seed promises.
"""


def job(config: Config) -> None:
    """One generation."""
    try:
        plan = plan_generation(config)
        answer(plan)
    except ValueError as error:
        hydra_app.refuse(error)


def answer(plan: GenerationPlan) -> None:
    """Generate what is missing and say how it went; raises ValueError at a mistake, ends the command where an engine fails."""
    folder = plan.store.folder
    if done := plan.store.finished:
        sys.stdout.write(f"{folder} is finished: {done['responses']} responses to {done['prompts']} prompts\n")
        return
    sys.stdout.write(f"determinism: {determinism(plan.config)}\n")
    sys.stdout.flush()
    try:
        with ResponseBar() as progress:
            done = generate(plan, progress, Bar("to Hugging Face"))
    except EngineError as error:
        sys.stderr.write(
            f"mrl: {error}\nfinished files are kept: the same command with generate.output={folder} goes on\n"
        )
        raise SystemExit(1) from None
    sys.stdout.write(f"{done['responses']} responses to {done['prompts']} prompts are in {folder}\n")


@dataclass
class ResponseBar:
    """Responses done: a bar on a terminal, elsewhere a line every `every_s` seconds and one at the end."""

    every_s: float = 10.0

    def __enter__(self) -> "ResponseBar":
        from rich import progress  # not needed by `mrl --help`
        from rich.console import Console

        self.console = Console(file=sys.stdout, highlight=False)
        columns = [progress.TextColumn("responses"), progress.BarColumn(), progress.MofNCompleteColumn()]
        columns += [progress.TextColumn("{task.fields[rate]}"), progress.TimeRemainingColumn()]
        self._bar = progress.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, total: int, done: int) -> None:
        """`done` are from an earlier, stopped generation."""
        self.total, self.done, self.tokens = total, done, 0
        self._start = self._printed = time.monotonic()
        self._task = self._bar.add_task("", total=total, completed=done, rate="")
        self._bar.start()
        if done:
            self.console.print(f"{done} of {total} responses are there from before")

    def advance(self, responses: int, tokens: int) -> None:
        """So many responses more, of so many tokens together."""
        self.done, self.tokens, now = self.done + responses, self.tokens + tokens, time.monotonic()
        rate = f"{self.tokens / max(now - self._start, 1e-9):,.0f} tokens/s"
        self._bar.update(self._task, advance=responses, rate=rate)
        if not self.console.is_terminal and (now - self._printed > self.every_s or self.done == self.total):
            self._printed = now
            self.console.print(f"{self.done} of {self.total} responses, {rate}")


def main(argv: list[str]) -> int:
    """Entry point of `mrl generate`."""
    return hydra_app.run(argv, job, USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
