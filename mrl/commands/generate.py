"""`mrl generate` samples responses of a model to held-out prompts, and writes the responses to parquet files."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.commands.convert import ConvertProgressBar
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.evaluation.engines import engine_pools
from mrl.evaluation.generation import GenerationPlan, describe_determinism, generate, plan_generation
from mrl.launch import slurm_job
from mrl.placement.device_map import idle_gpus_of_job
from mrl.placement.resource_pools import check_capacity, gpus_of_nodes, with_node_count
from mrl.weight_sync.engine_control import EngineError

USAGE = """usage: mrl generate [KEY=VALUE ...] [experiment=NAME] [--cfg job]

Samples responses to held-out prompts, computes their scores, and writes responses and scores to parquet files. To continue an
interrupted generation, run the same command with the same generate.output. It then writes only the missing files.

  mrl generate model.path=Qwen3-1.7B data.test=[test.parquet] generate.output=outputs/answers
  mrl generate ... generate.samples=1 generate.temperature=0     greedy decoding
  mrl generate ... generate.samples=32 reward=gsm8k              scores with another reward
  mrl generate ... rollout.num_engines=4 rollout.engine_tp=2     four engines on two GPUs each
  mrl generate ... rollout.engine_urls=[http://a:30000,http://b:30000]   SGLang servers that already run
  mrl generate ... cluster=slurm cluster.nodes=4 rollout.num_engines=32   a Slurm job; --dry-run only prints the job
  mrl generate ... cluster.address=HOST:PORT                     engines in a Ray cluster that already runs
  mrl generate model.path=RUN/checkpoints/step_000060/actor generate.base=Qwen3-1.7B ...   a Megatron checkpoint

It takes the keys of `mrl train`. Of these it reads model.*, data.*, run.dir, run.name (name of a Slurm job), run.seed, reward,
scoring.*, sglang.* (arguments of SGLang), all timeouts, cluster.*, fault_tolerance.*, rollout.max_response_tokens,
rollout.num_engines, rollout.engine_tp and rollout.engine_urls. It also takes the section generate:
  output                 folder for the parquet files. Default: generated/ in run.dir, a folder that is new for each run.
  samples                number of responses to each prompt. Default: 8.
  temperature            sampling temperature. Default: 1.0. 0 means greedy decoding.
  top_p, top_k           nucleus and top-k sampling. With the defaults 1.0 and -1, all tokens can be sampled.
  deterministic          whether each response has its own seed and kernels are batch-invariant. Default: true. false is faster.
  rows                   number of rows that are used, from the start of each file. Default: all.
  base                   Hugging Face folder with config and tokenizer. Required if model.path is a Megatron checkpoint.
  logprobs               whether to save the log-probability of each token. Default: false.
  score                  whether to compute and save the score of each response by `reward`. Default: true.
  prompts_per_file       number of prompts in one output file. Default: 64.
  requests_in_flight     largest number of concurrent requests to one engine. Default: 256.

docs/reference/commands.md explains the columns of the output and the effect of the seed.
"""


def generate_or_submit(config: Config, overrides: Sequence[str] = ()) -> None:
    """Run one generation, or submit it as a Slurm job.

    `overrides`: overrides of the command line. A Slurm job gets the same overrides.
    """
    with hydra_entry.exit_on_user_error():
        if needs_submission(config):
            submit(config, overrides, "generate")
        else:
            run_generation(plan_generation(config))


def needs_submission(config: Config) -> bool:
    """Return whether the command must be submitted to Slurm. Inside the job, where cluster.address is set, it returns False."""
    return bool(config.cluster.scheduler and not config.cluster.address)


def submit(config: Config, overrides: Sequence[str], command: str) -> None:
    """Submit `mrl generate` or `mrl evaluate` as a Slurm job. With cluster.dry_run, print the script instead.

    Raises ValueError if the settings of the job are wrong, for example if the job has too few GPUs for the engines.
    """
    pools = engine_pools(config)
    cluster = with_node_count(config.cluster, pools)
    if gpus := [count for count in gpus_of_nodes(cluster) if count]:
        check_capacity(pools, gpus, "GPU")
        for warning in idle_gpus_of_job(pools, gpus):
            sys.stderr.write(f"mrl: {warning}\n")
    if not config.evaluate.harness:
        plan_generation(
            config
        ).prompts()  # so that a mistake in a file or in a key is an error before the job waits for nodes
    job = slurm_job.make_job(cluster, config.run.name, Path(config.run.dir).resolve(), overrides, command)
    text = job.script if config.cluster.dry_run else slurm_job.submission_message(job, slurm_job.submit(job))
    sys.stdout.write(text)


def run_generation(plan: GenerationPlan) -> None:
    """Generate the missing responses, and print how many responses there are.

    Raises ValueError for a mistake of the user. Exits with status 1 if the engines do not start, if no engine is left, if an
    engine refuses a request, or if a request fails too often.
    """
    folder = plan.store.folder
    if totals := plan.store.finished:
        sys.stdout.write(f"{folder} is finished: {totals['responses']} responses to {totals['prompts']} prompts\n")
        return
    sys.stdout.write(f"determinism: {describe_determinism(plan.config)}\n")
    sys.stdout.flush()
    try:
        with ResponseBar() as progress:
            totals = generate(plan, progress, ConvertProgressBar("to Hugging Face"))
    except EngineError as error:
        sys.stderr.write(
            f"mrl: {error}\nfinished files are kept; to continue, run the same command with generate.output={folder}\n"
        )
        raise SystemExit(1) from None
    sys.stdout.write(f"{totals['responses']} responses to {totals['prompts']} prompts are in {folder}\n")


@dataclass
class ResponseBar:
    """Shows how many responses are finished.

    A terminal shows a progress bar. Other output gets a line every `interval_s` seconds and at the end.
    """

    interval_s: float = 10.0

    def __enter__(self) -> "ResponseBar":
        from rich import progress  # imported here, because `mrl --help` does not need rich
        from rich.console import Console

        self.console = Console(file=sys.stdout, highlight=False)
        columns = [progress.TextColumn("responses"), progress.BarColumn(), progress.MofNCompleteColumn()]
        columns += [progress.TextColumn("{task.fields[rate]}"), progress.TimeRemainingColumn()]
        self._bar = progress.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, total: int, done: int) -> None:
        """Start the display. An earlier, interrupted generation has already finished `done` of the `total` responses."""
        self.total, self.done, self.tokens = total, done, 0
        self._start = self._printed = time.monotonic()
        self._task = self._bar.add_task("", total=total, completed=done, rate="")
        self._bar.start()
        if done:
            self.console.print(f"continuing: {done} of {total} responses are done")

    def advance(self, responses: int, tokens: int) -> None:
        """Add `responses` finished responses, which have `tokens` tokens in total."""
        self.done, self.tokens, now = self.done + responses, self.tokens + tokens, time.monotonic()
        rate = f"{self.tokens / max(now - self._start, 1e-9):,.0f} tokens/s"
        self._bar.update(self._task, advance=responses, rate=rate)
        if not self.console.is_terminal and (now - self._printed > self.interval_s or self.done == self.total):
            self._printed = now
            self.console.print(f"{self.done} of {self.total} responses, {rate}")


def run_command(argv: list[str], command: Callable[[Config, Sequence[str]], None], usage: str) -> int:
    """Compose the config of `mrl generate` or `mrl evaluate`, and call `command(config, overrides)`."""
    argv = ["cluster.dry_run=true" if word == "--dry-run" else word for word in argv]
    with hydra_entry.exit_on_user_error():
        arguments = hydra_entry.prepare_arguments(argv)
    overrides = [word for word in arguments if "=" in word and not word.startswith("-")]
    return hydra_entry.run(arguments, lambda config: command(config, overrides), usage)


def main(argv: list[str]) -> int:
    """Entry point of `mrl generate`."""
    return run_command(argv, generate_or_submit, USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
