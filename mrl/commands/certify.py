"""`mrl certify`: compares a training step under a layout with the same step in one process, or compares engine and trainer."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mrl.algorithms.objective import Objective
from mrl.algorithms.parts import build_objective, build_value_loss, refuse_distillation
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.controller import build, plan_tools
from mrl.diagnostics.engine_check import EngineReport, PointDifference
from mrl.workers.trace_comparison import ParityDifference

USAGE = """usage: mrl certify [KEY=VALUE ...] [experiment=NAME] [--cfg job]
       mrl certify engine [KEY=VALUE ...] [experiment=NAME] [--json FILE]

Checks a parallel layout: takes one training step under the layout and the same step in one process, and compares the loss, the
gradient norm, all gradients and all weights. The exit status is 1 if a difference exceeds its tolerance.

  mrl certify experiment=quickstart parallel.tp=2 parallel.pp=2
  mrl certify model.path=Qwen3-0.6B parallel.tp=4 parallel.cp=2 certify.critic=true

It takes the keys of `mrl train`, and the keys of the section certify (`mrl config certify` describes them):
  prompts               number of groups in the batch, which consists of random tokens
  responses_per_prompt  number of responses to each prompt
  prompt_tokens         largest length of a prompt
  response_tokens       largest length of a response
  critic                whether to compare a critic in place of an actor
  lr                    learning rate of the step
  dtype                 precision of both steps. Default: float32.

run.dir/parity.json lists all differences. docs/tutorials/model.md describes parallel layouts.

`mrl certify engine` starts an SGLang engine and one trainer rank with the same weights. The engine samples responses to random
prompts. Both sides then run a forward pass over prompts and responses, and record the activations of each layer. The command
names the first difference (layer, and trace point in the layer, such as the input of o_proj) and its cause, such as a missing
bias, another RoPE base, the order of the experts, or stale weights. The exit status is 1 if a difference exceeds its
tolerance, and 2 if settings are wrong or a process cannot start.

  mrl certify engine experiment=quickstart
  mrl certify engine model.path=runs/a/hf certify.prompts=2 --json engine.json

  certify.prompts, certify.prompt_tokens, certify.response_tokens   number and lengths of the sequences
  certify.dtype    precision of both sides. float32 shows small errors; bfloat16 runs the kernels that a run on GPUs uses.
  rollout.engine_tp, sglang.*   settings of the engine. If rollout.engine_tp > 1, the partial sums of the ranks are not compared.
  --json FILE      file for the differences and the cause. Default: engine.json in run.dir.

The trainer's model must fit into the memory of one process.
"""
_ROW_WIDTH = 110  # width of a table in characters if the output is not a terminal


def certify_layout(config: Config) -> None:
    """Run one parity check: print a table and write parity.json. Exit with status 1 if a difference exceeds its tolerance."""
    try:
        loss = build_value_loss(config) if config.certify.critic else build_objective(config)
        if isinstance(loss, Objective):
            refuse_distillation(loss, "mrl certify")
        plan = plan_tools.plan_parity(config)
    except ValueError as error:
        hydra_entry.exit_with_error(error)
    differences = build.certify(plan, loss)
    path = Path(config.run.dir) / "parity.json"
    path.write_text(json.dumps([asdict(d) | {"within": d.within} for d in differences], indent=1) + "\n")
    print_table(differences, f"{'critic' if config.certify.critic else 'actor'}, {plan.dims}, {config.certify.dtype}")
    wrong = [d for d in differences if not d.within]
    if wrong:
        first = wrong[0]
        sys.stdout.write(
            f"NOT EQUAL: {len(wrong)} of {len(differences)} numbers and tensors differ. The first is {first.name}: "
            f"relative difference {first.relative:.1e}, absolute {first.absolute:.1e}, "
            f"tolerance {first.tolerance:.0e}\nall differences: {path}\n"
        )
        raise SystemExit(1)
    sys.stdout.write(
        f"equal within tolerances: all {len(differences)} numbers and tensors agree with those of one process\n"
        f"all differences: {path}\n"
    )


def print_table(differences: list[ParityDifference], title: str) -> None:
    """Print one row for each kind of tensor or number, with the largest difference over all layers and experts."""
    from rich.console import Console  # imported here, because `mrl --help` does not need rich
    from rich.table import Table

    kinds: dict[str, list[ParityDifference]] = {}
    for difference in differences:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", difference.name), []).append(difference)
    table = Table(
        "quantity", "tensors", "largest absolute", "largest relative", "", title=f"{title}, compared with one process"
    )
    for kind, members in kinds.items():
        absolute, relative = (max(getattr(d, name) for d in members) for name in ("absolute", "relative"))
        mark = "equal" if all(d.within for d in members) else "[bold red]DIFFERS"
        table.add_row(kind, str(len(members)), f"{absolute:.1e}", f"{relative:.1e}", mark)
    Console(width=None if sys.stdout.isatty() else _ROW_WIDTH).print(table)


def certify_engine(config: Config, json_path: str | None) -> None:
    """Compare an engine with the trainer: print a table and the cause, write a JSON file. Exit with status 1 if they differ."""
    try:
        plan, layout = plan_tools.plan_engine_check(config)
    except ValueError as error:
        hydra_entry.exit_with_error(error)
    report = build.certify_engine(plan, layout)
    path = Path(json_path or Path(config.run.dir) / "engine.json")
    path.write_text(json.dumps(engine_report_as_json(report), indent=1) + "\n")
    print_points(report, f"engine compared with trainer, {config.certify.dtype}")
    sys.stdout.write(f"{conclusion(report)}\nall differences: {path}\n")
    if report.first is not None:
        raise SystemExit(1)


def engine_report_as_json(report: EngineReport) -> dict[str, Any]:
    """Return the report as a JSON object."""
    return dict(
        equal=report.first is None,
        tokens=report.num_tokens,
        prompts=report.num_prompts,
        tokens_with_undecided_experts=report.tokens_with_undecided_experts,
        first=asdict(report.first) if report.first else None,
        cause=asdict(report.cause) if report.cause else None,
        differences=[asdict(d) | {"within": d.within} for d in report.differences],
    )


def conclusion(report: EngineReport) -> str:
    """Return the sentences below the table."""
    left_out = (
        f" The log-probabilities of {report.tokens_with_undecided_experts} tokens were not compared, because round-off decides "
        "to which experts they, or earlier tokens, are routed."
        if report.tokens_with_undecided_experts
        else ""
    )
    first, cause = report.first, report.cause
    if first is None or cause is None:
        largest = report.differences[-1].absolute
        return f"equal within {largest:.1e} nats over {report.num_tokens} tokens of {report.num_prompts} prompts.{left_out}"
    return f"NOT EQUAL: the first difference is in {first.name}.{left_out}\n{cause.part}: {cause.text}.\nTo do: {cause.advice}."


def print_points(report: EngineReport, title: str) -> None:
    """Print one row for each trace point, such as `attention`, over all layers (see mrl.diagnostics.engine_check).

    A row shows the first layer that differs at this trace point. If no layer differs, it shows the layer with the largest
    relative difference.
    """
    from rich.console import Console  # imported here, because `mrl --help` does not need rich
    from rich.table import Table

    table = Table("trace point", "layer", "max abs diff", "relative", "tolerance", "", title=title)
    points: dict[str, list[PointDifference]] = {}
    for each in report.differences:
        points.setdefault(each.point, []).append(each)
    for point, members in points.items():
        shown = next((d for d in members if not d.within), max(members, key=lambda d: d.relative))
        mark = "equal" if shown.within else "[bold red]FIRST DIFFERENCE" if shown is report.first else "[red]differs"
        layer = "" if shown.layer is None else str(shown.layer)
        row = (f"{shown.absolute:.1e}", f"{shown.relative:.1e}", f"{shown.tolerance:.0e}")
        table.add_row(point.replace("_", " "), layer, *row, mark)
    Console(width=None if sys.stdout.isatty() else _ROW_WIDTH).print(table)


def main(argv: list[str]) -> int:
    """Entry point of `mrl certify`."""
    if "engine" not in argv:
        return hydra_entry.run(argv, certify_layout, USAGE)
    words, json_path = [word for word in argv if word != "engine"], None
    if "--json" in words:
        index = words.index("--json")
        if index + 1 == len(words) or "=" in words[index + 1]:
            sys.stderr.write("mrl certify engine: --json needs the path of a file, such as --json engine.json\n")
            return 2
        json_path, words = words[index + 1], words[:index] + words[index + 2 :]
    return hydra_entry.run(words, lambda config: certify_engine(config, json_path), USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
