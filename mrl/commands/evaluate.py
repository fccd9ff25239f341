"""`mrl evaluate`: computes pass@k, maj@k and the mean score of a model, with confidence intervals."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.commands import generate
from mrl.commands.convert import ConvertProgressBar
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.evaluation.evaluate_responses import PICTURE, REPORT, evaluate, write_evaluation, write_harness_results
from mrl.evaluation.evaluation_prompts import checked_rewards
from mrl.evaluation.evaluation_summary import (
    SCORES,
    Comparison,
    EvaluationSummary,
    IntervalEstimate,
    choose_k,
    read_scores,
)
from mrl.evaluation.generation import plan_generation
from mrl.evaluation.harness import HarnessError, HarnessPlan, HarnessResult, plan_harness, run_harness
from mrl.weight_sync.engine_control import EngineError

if TYPE_CHECKING:
    from rich.console import Console

USAGE = """usage: mrl evaluate [KEY=VALUE ...] [experiment=NAME] [--cfg job]

Samples responses as `mrl generate` does, or reads the responses of a finished `mrl generate` or of another tool. Reports these
numbers with confidence intervals, for each data source and for all prompts together:
  pass@k    probability that at least one of k responses passes (unbiased: Chen et al. 2021, equation 1)
  maj@k     probability that the most frequent answer of k responses passes (exact mean over all subsets and ties)
  mean@n    mean score

  mrl evaluate model.path=Qwen3-1.7B data.test=[gsm8k.parquet,math.parquet] reward=gsm8k generate.samples=16
  mrl evaluate evaluate.input=outputs/answers                    written by `mrl generate generate.output=outputs/answers ...`
  mrl evaluate evaluate.input=outputs/answers evaluate.rescore=true reward._target_=my_rewards.Strict
  mrl evaluate evaluate.input=outputs/answers evaluate.k=[1,8] evaluate.threshold=0.5
  mrl evaluate evaluate.input=verl/validation/60.jsonl reward=gsm8k       files of verl, lm-evaluation-harness or lighteval
  mrl evaluate evaluate.input=mine.parquet evaluate.columns='{prompt: question, response: completions}' reward=gsm8k
  mrl evaluate model.path=Qwen3-1.7B ... evaluate.compare=outputs/before  differences from an earlier evaluation
  mrl evaluate model.path=Qwen3-1.7B "evaluate.harness='lm_eval --tasks gsm8k,ifeval'"   your own lm-evaluation-harness

It takes the keys of `mrl generate` (see mrl generate --help) and the keys of the section evaluate:
  input         folder that a finished `mrl generate` has written, or files of another tool. Default: responses are generated.
  columns       columns in files of another tool: prompt, response, ground_truth, data_source, extra_info, num_tokens.
  compare       folder of an earlier evaluation of the same prompts.
  harness       command line of your own lm_eval, which then runs its tasks with mrl's engines.
  output        folder for evaluation.json, evaluation.png and scores.parquet. Default: run.dir.
  k             values of k. Default: 1, 2, 4, ... and the number of samples.
  threshold     a response passes if its score is at least this value. Default: 1.0.
  confidence    confidence level of the intervals. Default: 0.95.
  rescore       whether to compute all scores again with `reward`. Default: false, so the scores of the input are used.

docs/reference/commands.md explains how each number and interval is computed.
"""


def evaluate_or_submit(config: Config, overrides: Sequence[str] = ()) -> None:
    """Run one evaluation, print a table and write the report files; or submit the evaluation as a Slurm job.

    `overrides`: overrides of the command line. A Slurm job gets the same overrides.
    """
    with hydra_entry.exit_on_user_error():
        if config.evaluate.columns and not config.evaluate.input:
            raise ValueError(
                f"evaluate.columns={config.evaluate.columns}: applies only to the files in evaluate.input; set it, too."
            )
        harness = plan_harness(config) if config.evaluate.harness else None
        if config.evaluate.compare:
            read_scores(Path(config.evaluate.compare))  # so that a wrong folder is an error before the generation
        if generate.needs_submission(config) and not config.evaluate.input:
            if not harness:
                choose_k(config.evaluate.k, config.generate.samples)
                checked_rewards(config.reward, config.data.test_sets)
            return generate.submit(config, overrides, "evaluate")
        if harness:
            return _evaluate_with_harness(harness)
        folder = _response_folder(config)
        evaluation = evaluate(folder, config)
    output, confidence = Path(config.evaluate.output or config.run.dir), config.evaluate.confidence
    write_evaluation(evaluation, output, config)
    sys.stdout.write(f"reward: {json.dumps(evaluation.reward)}\n")
    print_table(evaluation.summaries, f"{folder}: responses of {evaluation.origin}", confidence)
    if evaluation.comparison:
        print_comparison(evaluation.comparison, confidence)
    files = ", ".join(str(output / name) for name in (REPORT, PICTURE, SCORES))
    sys.stdout.write(f"written: {files}\n")


def _evaluate_with_harness(plan: HarnessPlan) -> None:
    """Run the harness, print a table and write the report files. Exits with status 1 if the harness or the engines fail."""
    config, output = plan.config, Path(plan.config.evaluate.output or plan.config.run.dir)
    try:
        source, results = run_harness(plan, ConvertProgressBar("to Hugging Face"))
    except (EngineError, HarnessError) as error:
        sys.stderr.write(f"mrl: {error}\n")
        raise SystemExit(1) from None
    write_harness_results(results, source, output, config)
    print_harness_results(results, f"{config.evaluate.harness}: {config.model.path}", config.evaluate.confidence)
    sys.stdout.write(f"written: {output / REPORT}, {output / PICTURE}, {source}\n")


def _response_folder(config: Config) -> Path:
    """Return the folder of the responses. If evaluate.input is not set, generate the responses first.

    Raises ValueError for a mistake of the user.
    """
    if config.evaluate.input:
        return Path(config.evaluate.input)
    choose_k(config.evaluate.k, config.generate.samples)
    plan = plan_generation(config)
    if not config.generate.score:
        # so that a mistake in a reward is an error before the generation starts
        checked_rewards(config.reward, config.data.test_sets)
    generate.run_generation(plan)
    return plan.store.folder


def print_table(summaries: list[EvaluationSummary], title: str, confidence: float) -> None:
    """Print a table with one block for each data source and one row for each k.

    Below the table, print for each source how many responses were truncated, could not be scored or had no answer.
    """
    from rich.table import Table  # imported here, because `mrl --help` does not need rich

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
    console = _console()
    console.print(table)
    for summary in summaries:
        tokens = "" if summary.mean_tokens is None else f" of {summary.mean_tokens:.1f} tokens on average"
        truncated = "" if summary.truncated_fraction is None else f"{summary.truncated_fraction:.1%} truncated, "
        console.print(
            f"{summary.name}: {summary.responses} responses{tokens}; {truncated}{summary.failed_fraction:.1%} not scored, "
            f"{summary.unanswered_fraction:.1%} without an answer"
        )


def print_comparison(comparison: Comparison, confidence: float) -> None:
    """Print a table of the differences from an earlier evaluation, and how many prompts are in only one of the evaluations."""
    from rich.table import Table

    sys.stdout.write(f"difference from {comparison.folder}:\n")
    table = Table("data source", title=f"paired means over prompts, {confidence:.0%} intervals", title_justify="left")
    for name in ("prompts", "mean@n", "k", "pass@k", "maj@k"):
        table.add_column(name, justify="right")
    for difference in comparison.differences:
        head = [difference.name, str(difference.prompts), _format_estimate(difference.mean_score, "+.3f")]
        rows = [
            [str(k), *(_format_estimate(values[k], "+.3f") for values in (difference.pass_at, difference.maj_at))]
            for k in difference.pass_at
        ]
        for index, cells in enumerate(rows or [["", "", ""]]):
            table.add_row(*(head if index == 0 else ["", "", ""]), *cells)
        table.add_section()
    console = _console()
    console.print(table)
    if comparison.only_now or comparison.only_before:
        console.print(
            f"prompts that are left out: {comparison.only_now} only in this evaluation, "
            f"{comparison.only_before} only in the earlier one"
        )


def print_harness_results(results: Sequence[HarnessResult], title: str, confidence: float) -> None:
    """Print a table with a row for each metric of each task of the harness."""
    from rich.table import Table

    table = Table("task", title=f"{title}\n{confidence:.0%} intervals", title_justify="left")
    for name in ("prompts", "metric", "value"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for result in results:
        samples = "" if result.samples is None else str(result.samples)
        table.add_row(result.task, samples, result.metric, _format_estimate(result.value))
    _console().print(table)


def _console() -> "Console":
    from rich.console import Console  # imported here, because `mrl --help` does not need rich

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def _format_estimate(estimate: IntervalEstimate, form: str = ".3f") -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{form}}"
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def main(argv: list[str]) -> int:
    """Entry point of `mrl evaluate`."""
    return generate.run_command(argv, evaluate_or_submit, USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
