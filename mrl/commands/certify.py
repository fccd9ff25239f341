"""`mrl certify`: compares one training step under the parallel layout with the same step in one process (parity check)."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from mrl.algorithms.parts import build_objective
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.controller import build
from mrl.controller import plan_tools as planning
from mrl.workers.trace_comparison import ParityDifference

USAGE = """usage: mrl certify [KEY=VALUE ...] [experiment=NAME] [--cfg job]

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

Both results are in run.dir/parity.json. docs/tutorials/model.md describes parallel layouts.
"""


def job(config: Config) -> None:
    """Run one parity check: print a table and write parity.json. Exit with status 1 if a difference exceeds its tolerance."""
    try:
        loss = None if config.certify.critic else build_objective(config)
        plan = planning.plan_parity(config)
    except ValueError as error:
        hydra_entry.exit_with_error(error)
    differences = build.certify(plan, loss)
    path = Path(config.run.dir) / "parity.json"
    path.write_text(json.dumps([asdict(d) | {"within": d.within} for d in differences], indent=1) + "\n")
    print_table(differences, f"{'critic' if loss is None else 'actor'}, {plan.dims}, {config.certify.dtype}")
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
        f"equal: all {len(differences)} numbers and tensors agree with those of one process\nall differences: {path}\n"
    )


def print_table(differences: list[ParityDifference], title: str) -> None:
    """Print one row for each kind of tensor or number, with the largest difference over all layers and experts."""
    from rich.console import Console  # not needed by `mrl --help`
    from rich.table import Table

    kinds: dict[str, list[ParityDifference]] = {}
    for difference in differences:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", difference.name), []).append(difference)
    table = Table("quantity", "tensors", "largest absolute", "largest relative", "", title=f"{title} / one process")
    for kind, members in kinds.items():
        absolute, relative = (max(getattr(d, name) for d in members) for name in ("absolute", "relative"))
        mark = "equal" if all(d.within for d in members) else "[bold red]DIFFERS"
        table.add_row(kind, str(len(members)), f"{absolute:.1e}", f"{relative:.1e}", mark)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def main(argv: list[str]) -> int:
    """Entry point of `mrl certify`."""
    return hydra_entry.run(argv, job, USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
