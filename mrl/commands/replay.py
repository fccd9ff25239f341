"""`mrl replay`: a step that a run kept whole, again under two layouts."""

import json
import signal
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mrl.algorithms.parts import build_objective
from mrl.config.hydra_entry import exit_on_user_error, exit_with_error
from mrl.config.schema import Config, ParallelConfig
from mrl.config.validate import from_hydra
from mrl.controller import build
from mrl.controller import plan_tools as planning
from mrl.core.run_errors import ProcessesLostError, StartError
from mrl.diagnostics.replay import Found, Verdict, draw
from mrl.diagnostics.step_dump import Capsule, Weights
from parallel.dims import ParallelDims

USAGE = """usage: mrl replay CAPSULE [parallel.KEY=N ...] [against [parallel.KEY=N ...]] [KEY=VALUE ...]

Runs the step in the folder CAPSULE again under two layouts, and says whether they agree on every hidden state, every
log-probability, the loss and every gradient; where they do not, which layer is the first that differs; and where numbers are
not finite, in which layer and at which token that begins. No weight changes, no engine starts.

  CAPSULE          a folder such as RUN/capsules/step_000007. A run writes one for the steps in step_dump.steps, for every
                   step whose gradient is not finite, and for steps whose gradient norm is a spike (step_dump.spike_factor)
  parallel.KEY=N   the layout to look at: tp, sp, pp, vpp, cp, dp, ep, etp; default: the one that the run had
  against          what follows is the layout to compare with; default: one process

  model.dtype=float32   compute in float32 what the run computed in bfloat16: mistakes stay, round-off goes
  weights=FOLDER        a Hugging Face folder in place of the capsule's weights
  output=FOLDER         where replay.json, replay.png and logs go; default: CAPSULE/replay

examples
  mrl replay runs/a/capsules/step_000007                            does the run's own layout agree with one process?
  mrl replay runs/a/capsules/step_000007 parallel.tp=2              does tp=2 alone?
  mrl replay runs/a/capsules/step_000007 parallel.tp=2 parallel.pp=2 against parallel.tp=2

exit status: 0 everything agrees and is finite, 1 something does not, 2 a mistake in the arguments or the capsule, or a
process that was lost or hung: nothing was compared
A capsule names classes, as every config does, and their code runs: replay only capsules of people you trust.
"""
OPTIONS = ("model.dtype", "weights", "output")


@dataclass
class Request:
    """What the command line asks for."""

    capsule: Path
    layout: dict[str, Any] = field(default_factory=dict)
    against: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, argv: list[str]) -> "Request":
        """Raises ValueError that says which argument is wrong."""
        if not argv or "=" in argv[0]:
            raise ValueError("name a capsule first: mrl replay RUN/capsules/step_000007 (mrl replay --help says more).")
        request = cls(Path(argv[0]))
        sizes = request.layout
        for argument in argv[1:]:
            key, equals, value = argument.partition("=")
            if argument == "against" and sizes is request.layout:
                sizes = request.against
            elif equals and key.startswith("parallel."):
                sizes[key.removeprefix("parallel.")] = _size(argument)
            elif equals and key in OPTIONS:
                request.options[key] = value
            else:
                raise ValueError(f"{argument!r}: expected against, parallel.KEY=N, or one of {', '.join(OPTIONS)}.")
        return request


def _size(argument: str) -> int | bool:
    key, _, value = argument.partition("=")
    names = [f"parallel.{name}" for name in ParallelConfig.__dataclass_fields__]
    if key not in names:
        raise ValueError(f"{argument!r}: expected one of {', '.join(names)}.")
    if value in ("true", "false"):
        return value == "true"
    if not value.isdecimal():
        raise ValueError(f"{argument!r}: expected a number of processes (parallel.sp: true or false).")
    return int(value)


def main(argv: list[str]) -> int:
    """Entry point of `mrl replay`; returns the exit status."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(USAGE)
        return 0 if argv else 2
    with exit_on_user_error():
        request = Request.parse(argv)
        capsule = Capsule.read(request.capsule.resolve())
        dims = _dims(request.layout) if request.layout else capsule.content.dims
        against = _dims(request.against)
        config, weights = _config(request, capsule), _weights(request, capsule)
        folder = capsule.folder_of(weights)
        plan = planning.plan_replay(config, weights.like if weights.checkpoint else str(folder), dims, against)
        objective = build_objective(config)
    if capsule.content.kl_coef is not None:
        objective = objective.with_kl_coef(capsule.content.kl_coef)
    sys.stdout.write(_introduction(capsule, weights, dims, against))
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # so that every process is ended
    try:
        found = build.replay(plan, capsule, weights, objective, against)
    except (
        StartError,
        ProcessesLostError,
    ) as error:  # what only the trainer processes can find; or one of them is gone or hangs
        exit_with_error(error)
    _report(found, capsule, f"{dims} / {against}", Path(config.run.dir))
    return 0 if found.equal else 1


def _dims(sizes: dict[str, Any]) -> ParallelDims:
    return ParallelDims.from_world_size(**(vars(ParallelConfig()) | sizes))


def _config(request: Request, capsule: Capsule) -> Config:
    """The run's, with another folder and dtype."""
    config = from_hydra(OmegaConf.create(capsule.content.config))
    output = Path(request.options.get("output", capsule.path / "replay")).resolve()
    dtype = request.options.get("model.dtype", config.model.dtype)
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"model.dtype={dtype}: expected float32 or bfloat16.")
    return replace(config, run=replace(config.run, dir=str(output)), model=replace(config.model, dtype=dtype))


def _weights(request: Request, capsule: Capsule) -> Weights:
    if named := request.options.get("weights"):
        return Weights(str(Path(named).resolve()), capsule.content.step - 1)
    if capsule.content.weights is None:
        raise ValueError(f"{capsule.path}: no weights were on disk then; name a Hugging Face folder: weights=FOLDER.")
    return capsule.content.weights


def _introduction(capsule: Capsule, weights: Weights, dims: ParallelDims, against: ParallelDims) -> str:
    content = capsule.content
    late = content.step - 1 - weights.step
    lines = [
        f"step {content.step}, kept because: {content.why}",
        f"mini-batch {content.mini_batch} of {len(content.lrs)}, under {dims}, against {against}",
    ]
    if late:
        lines.append(
            f"the weights are those after step {weights.step}: {late} steps lie between. Layouts are compared as well with "
            "them, but what was seen in the run need not be seen again"
        )
    return "\n".join([*lines, ""])


def _report(found: Verdict, capsule: Capsule, title: str, folder: Path) -> None:
    """A table for people, replay.json for programs, a picture for both."""
    content = dict(
        capsule=str(capsule.path),
        layouts=title,
        equal=found.equal,
        first_different=asdict(found.first_different) if found.first_different else None,
        first_not_finite=asdict(found.first_nonfinite) if found.first_nonfinite else None,
        gradients_not_finite=found.broken_gradients,
        grad_norm=found.grad_norms,
        loss=found.losses,
        places=[asdict(p) | {"within": p.within} for p in found.places],
        numbers=[asdict(d) | {"within": d.within} for d in found.numbers],
    )
    (folder / "replay.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(folder / "replay.png", found.places, title=f"step {capsule.content.step}: {title}")
    _show(found, title)
    sys.stdout.write("\n".join([*_conclusion(found, capsule), f"all numbers: {folder / 'replay.json'}, .png", ""]))


def _show(found: Verdict, title: str) -> None:
    from rich.console import Console  # not needed by `mrl --help`
    from rich.table import Table

    table = Table("place", "tokens", "largest difference", "tolerance", "", title=title)
    for place in found.places:
        mark = "equal" if place.within else "[bold red]DIFFERS"
        mark = mark if place.finite else "[bold red]NOT FINITE"
        table.add_row(place.name, f"{place.compared:,}", f"{place.largest:.1e}", f"{place.tolerance:.0e}", mark)
    worst = max(found.numbers, key=lambda d: d.relative / d.tolerance if d.name.startswith("gradient ") else -1.0)
    table.add_row("worst gradient", "", f"{worst.relative:.1e}", f"{worst.tolerance:.0e}", worst.name)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def _conclusion(found: Verdict, capsule: Capsule) -> list[str]:
    seen, number = capsule.content.grad_norms, capsule.content.mini_batch
    in_run = f"; the run saw {seen[number]:.6g}" if number < len(seen) else ""
    lines = [f"gradient norm {found.grad_norms[0]:.6g}, the other layout's {found.grad_norms[1]:.6g}{in_run}"]
    if found.first_nonfinite:
        lines.append(f"NOT FINITE: first in {_where(found.first_nonfinite)}")
    elif found.broken_gradients:
        lines.append(
            "NOT FINITE: every activation is finite, but not these gradients, of which the last ones are computed first: "
            + ", ".join(found.broken_gradients[-3:])
        )
    if found.first_different and not (
        found.first_nonfinite and found.first_nonfinite.name == found.first_different.name
    ):
        lines.append(f"NOT EQUAL: the first that differs is {_where(found.first_different)}")
    wrong = [d for d in found.numbers if not d.within]
    if wrong and not found.first_different and not found.first_nonfinite:
        lines.append(f"NOT EQUAL: hidden states agree, but {wrong[0].name} does not ({wrong[0].relative:.1e})")
    return lines if not found.equal else [*lines, "equal: every hidden state, log-probability and gradient agrees"]


def _where(found: Found) -> str:
    if found.row < 0:
        return f"{found.name}, which only one of the layouts has"
    part = "prompt" if found.in_prompt else "response"
    return f"{found.name}, at token {found.token} in place {found.position} of row {found.row} (in its {part})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
