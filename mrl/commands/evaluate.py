"""`mrl evaluate`: computes pass@k, maj@k and the mean score of a model, with confidence intervals."""

import json
import sys
from pathlib import Path

from mrl.commands import generate
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.evaluation.evaluate_responses import PICTURE, REPORT, SCORES, evaluate, write_evaluation
from mrl.evaluation.evaluation_summary import EvaluationSummary, IntervalEstimate, choose_k
from mrl.evaluation.generation_plan import checked_rewards, plan_generation

USAGE = """usage: mrl evaluate [KEY=VALUE ...] [experiment=NAME] [--cfg job]

Samples responses as `mrl generate` does, or reads the responses of a finished `mrl generate`. Reports these numbers with
confidence intervals, for each data source and for all prompts together:
  pass@k    probability that at least one of k responses passes (unbiased: Chen et al. 2021, equation 1)
  maj@k     probability that the most frequent answer of k responses passes (exact mean over all subsets and ties)
  mean@n    mean score

  mrl evaluate model.path=Qwen3-1.7B data.test=[gsm8k.parquet,math.parquet] reward=gsm8k generate.samples=16
  mrl evaluate evaluate.input=outputs/answers                    written by `mrl generate generate.output=outputs/answers ...`
  mrl evaluate evaluate.input=outputs/answers evaluate.rescore=true reward._target_=my_rewards.Strict
  mrl evaluate evaluate.input=outputs/answers evaluate.k=[1,8] evaluate.threshold=0.5

It takes the keys of `mrl generate` (see mrl generate --help) and the keys of the section evaluate:
  input         folder that a finished `mrl generate` has written. Default: the responses are generated first.
  output        folder for evaluation.json, evaluation.png and scores.parquet. Default: run.dir.
  k             values of k. Default: 1, 2, 4, ... and the number of samples.
  threshold     a response passes if its score is at least this value. Default: 1.0.
  confidence    confidence level of the intervals. Default: 0.95.
  rescore       whether to compute all scores again with `reward`. Default: false, so the scores of the input are used.

docs/reference/commands.md explains how each number and interval is computed.
"""


def job(config: Config) -> None:
    """Run one evaluation: print a table and write the report files."""
    try:
        folder = _response_folder(config)
        evaluation = evaluate(folder, config)
    except ValueError as error:
        hydra_entry.exit_with_error(error)
    output = Path(config.evaluate.output or config.run.dir)
    write_evaluation(evaluation, output, config)
    title = f"{folder}: responses of {evaluation.settings['model.path']}"
    sys.stdout.write(f"reward: {json.dumps(evaluation.reward)}\n")
    print_table(evaluation.summaries, title, config.evaluate.confidence)
    files = ", ".join(str(output / name) for name in (REPORT, PICTURE, SCORES))
    sys.stdout.write(f"written: {files}\n")


def _response_folder(config: Config) -> Path:
    """Return the folder of the responses. If evaluate.input is not set, generate the responses first.

    Raises ValueError for a mistake of the user.
    """
    if config.evaluate.input:
        return Path(config.evaluate.input)
    choose_k(config.evaluate.k, config.generate.samples)
    plan = plan_generation(config)
    if not config.generate.score:
        # a mistake in a reward is an error before the generation starts
        checked_rewards(config.reward, config.data.test_sets)
    generate.run_generation(plan)
    return plan.store.folder


def print_table(summaries: list[EvaluationSummary], title: str, confidence: float) -> None:
    """Print a table with one block for each data source and one row for each k.

    Below it, print how many responses of each source were truncated, not scored or had no answer.
    """
    from rich.console import Console  # not needed by `mrl --help`
    from rich.table import Table

    table = Table("data source", title=f"{title}\nmeans over prompts, {confidence:.0%} intervals", title_justify="left")
    for name in ("prompts", "mean@n", "k", "pass@k", "maj@k"):
        table.add_column(name, justify="right")
    for summary in summaries:
        for index, k in enumerate(summary.pass_at):
            head = (
                (summary.name, str(summary.prompts), _format_estimate(summary.mean_score))
                if index == 0
                else ("", "", "")
            )
            table.add_row(*head, str(k), _format_estimate(summary.pass_at[k]), _format_estimate(summary.maj_at[k]))
        table.add_section()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    for summary in summaries:
        console.print(
            f"{summary.name}: {summary.responses} responses of {summary.mean_tokens:.1f} tokens on average; "
            f"{summary.cut_fraction:.1%} truncated, {summary.failed_fraction:.1%} not scored, "
            f"{summary.unanswered_fraction:.1%} without an answer"
        )


def _format_estimate(estimate: IntervalEstimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def main(argv: list[str]) -> int:
    """Entry point of `mrl evaluate`."""
    return hydra_entry.run(argv, job, USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
