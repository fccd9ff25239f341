"""`mrl evaluate`: pass@k, maj@k and mean score, with confidence intervals."""

import json
import sys
from pathlib import Path

from mrl.commands import generate, hydra_app
from mrl.config.schema import Config
from mrl.evaluation.evaluate import PICTURE, REPORT, SCORES, checked_reward, evaluate, write
from mrl.evaluation.intervals import Estimate
from mrl.evaluation.plan import plan_generation
from mrl.evaluation.report import Summary, choose_k

USAGE = """usage: mrl evaluate [KEY=VALUE ...] [experiment=NAME] [--cfg job]

How good is a model? Samples responses as `mrl generate` does, or takes those of a finished one, and reports of each data
source and of all prompts together, with intervals:
  pass@k    the probability that one of k responses passes (Chen et al. 2021, equation 1: unbiased)
  maj@k     the probability that the majority's answer of k responses passes (the exact mean over all subsets and ties)
  mean@n    the mean score

  mrl evaluate model.path=Qwen3-1.7B data.test=[gsm8k.parquet,math.parquet] reward=gsm8k generate.samples=16
  mrl evaluate evaluate.input=outputs/answers                    of `mrl generate generate.output=outputs/answers ...`
  mrl evaluate evaluate.input=outputs/answers evaluate.rescore=true reward._target_=my_rewards.Strict
  mrl evaluate evaluate.input=outputs/answers evaluate.k=[1,8] evaluate.threshold=0.5

The keys of `mrl generate` (its --help explains them), and the section evaluate:
  input         folder of a finished `mrl generate`; default: generate first
  output        folder of evaluation.json, evaluation.png and scores.parquet; default: run.dir
  k             default: 1, 2, 4, ... and all samples
  threshold     a response passes when its score is this or more (1.0)
  confidence    of the intervals (0.95)
  rescore       score again by `reward`; default: the scores that the input has (false)

docs/evaluate.md says how each number and interval is computed.
"""


def job(config: Config) -> None:
    """One evaluation: a table for people, evaluation.json for programs."""
    try:
        folder = _generated(config)
        found = evaluate(folder, config)
    except ValueError as error:
        hydra_app.refuse(error)
    output = Path(config.evaluate.output or config.run.dir)
    write(found, output, config)
    title = f"{folder}: responses of {found.settings['model.path']}"
    sys.stdout.write(f"reward: {json.dumps(found.reward)}\n")
    show(found.summaries, title, config.evaluate.confidence)
    files = ", ".join(str(output / name) for name in (REPORT, PICTURE, SCORES))
    sys.stdout.write(f"written: {files}\n")


def _generated(config: Config) -> Path:
    """The folder to evaluate, filled first unless it is named; raises ValueError at a mistake."""
    if config.evaluate.input:
        return Path(config.evaluate.input)
    choose_k(config.evaluate.k, config.generate.samples)
    plan = plan_generation(config)
    if not config.generate.score:
        checked_reward(config)  # it is needed when all is generated
    generate.answer(plan)
    return plan.store.folder


def show(summaries: list[Summary], title: str, confidence: float) -> None:
    """A table: a block per data source, a line per k."""
    from rich.console import Console  # not needed by `mrl --help`
    from rich.table import Table

    table = Table("source", title=f"{title}\nmeans over prompts, {confidence:.0%} intervals", title_justify="left")
    for name in ("prompts", "mean@n", "k", "pass@k", "maj@k"):
        table.add_column(name, justify="right")
    for summary in summaries:
        for number, k in enumerate(summary.pass_at):
            head = (summary.name, str(summary.prompts), _text(summary.mean_score)) if number == 0 else ("", "", "")
            table.add_row(*head, str(k), _text(summary.pass_at[k]), _text(summary.maj_at[k]))
        table.add_section()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    for summary in summaries:
        console.print(
            f"{summary.name}: {summary.responses} responses of {summary.mean_tokens:.1f} tokens on average; "
            f"{summary.cut_fraction:.1%} cut, {summary.failed_fraction:.1%} not scored, "
            f"{summary.unanswered_fraction:.1%} without an answer"
        )


def _text(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def main(argv: list[str]) -> int:
    """Entry point of `mrl evaluate`."""
    return hydra_app.run(argv, job, USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
