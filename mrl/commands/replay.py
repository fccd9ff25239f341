"""`mrl replay`: repeats one mini-batch of a dumped training step under two parallel layouts and compares the results."""

import json
import signal
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mrl.algorithms.parts import build_objective, refuse_distillation
from mrl.config.command_schema import Dtype
from mrl.config.hydra_entry import exit_on_user_error, exit_with_error
from mrl.config.schema import Config, ParallelConfig
from mrl.config.validate import from_hydra
from mrl.controller import build, plan_tools
from mrl.core.run_errors import ProcessesLostError, StartError
from mrl.diagnostics.layout_comparison import ReplayResult, TokenLocation, plot_layers
from mrl.diagnostics.step_dump import StepDump, WeightsLocation
from parallel.dims import ParallelDims

USAGE = """usage: mrl replay DUMP [parallel.KEY=N ...] [against [parallel.KEY=N ...]] [KEY=VALUE ...]

Repeats a dumped training step under two parallel layouts. It compares all hidden states, log-probabilities, the loss and all
gradients. If they differ, it names the first layer that differs. If values are not finite, it names the layer and the token of
the first such value. It changes no weights and starts no engine.

  DUMP             folder of a step dump, such as RUN/step_dumps/step_000007. A run dumps three kinds of steps: those in
                   step_dump.steps, each step whose gradient is not finite, and each step whose gradient norm is much larger
                   than before (step_dump.spike_factor).
  parallel.KEY=N   layout to examine: tp, sp, pp, vpp, cp, dp, ep, etp. Default: the layout of the run.
  against          the parallel keys after this word give the layout to compare with. Default: one process.

  model.dtype=float32   computes in float32, also if the run used bfloat16. Then no difference comes from rounding to bfloat16.
  weights=FOLDER        Hugging Face folder whose weights replace the weights of the dump
  output=FOLDER         folder for replay.json, replay.png and logs. Default: DUMP/replay.

Examples:
  mrl replay runs/a/step_dumps/step_000007                          does the run's own layout agree with one process?
  mrl replay runs/a/step_dumps/step_000007 parallel.tp=2            does tp=2 alone agree with one process?
  mrl replay runs/a/step_dumps/step_000007 parallel.tp=2 parallel.pp=2 against parallel.tp=2

The exit status is 0 if all values agree and are finite, and 1 if some values differ or are not finite. It is 2 if nothing was
compared: the arguments or the dump are wrong, or a process died or hung.

A step dump contains the config of its run. `mrl replay` runs the code of all classes that this config names, so use it only with
dumps from people whom you trust.
"""
OPTIONS = ("model.dtype", "weights", "output")  # accepted keys that do not begin with `parallel.`


@dataclass
class ReplayArguments:
    """The parsed command line.

    `layout` and `against` contain the sizes of the two layouts, such as {"tp": 2}. An empty `layout` means the layout of the run,
    and an empty `against` means one process. `options`: key in OPTIONS -> its value.
    """

    dump: Path
    layout: dict[str, Any] = field(default_factory=dict)
    against: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, argv: list[str]) -> "ReplayArguments":
        """Parse the command line. Raises ValueError for a wrong argument, and the message names this argument."""
        if not argv or "=" in argv[0]:
            raise ValueError(
                "the first argument must be a step dump: mrl replay RUN/step_dumps/step_000007 (see mrl replay --help)."
            )
        arguments = cls(Path(argv[0]))
        sizes = arguments.layout
        for argument in argv[1:]:
            key, equals, value = argument.partition("=")
            if argument == "against" and sizes is arguments.layout:
                sizes = arguments.against
            elif equals and key.startswith("parallel."):
                sizes[key.removeprefix("parallel.")] = _parse_size(argument)
            elif equals and key in OPTIONS:
                arguments.options[key] = value
            else:
                raise ValueError(f"{argument!r}: expected against, parallel.KEY=N, or one of {', '.join(OPTIONS)}.")
        return arguments


def _parse_size(argument: str) -> int | bool:
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
    """Entry point of `mrl replay`. Returns the exit status."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(USAGE)
        return 0 if argv else 2
    with exit_on_user_error():
        arguments = ReplayArguments.parse(argv)
        dump = StepDump.read(arguments.dump.resolve())
        dims = _parallel_dims(arguments.layout) if arguments.layout else dump.description.dims
        against = _parallel_dims(arguments.against)
        config, weights = _replay_config(arguments, dump), _weights(arguments, dump)
        folder = dump.weights_folder(weights)
        plan = plan_tools.plan_replay(config, weights.hf_folder if weights.checkpoint else str(folder), dims, against)
        objective = build_objective(config).with_coefs(dump.description.coefs)
        refuse_distillation(objective, "a step dump")
    sys.stdout.write(_introduction(dump, weights, dims, against))
    # SIGTERM raises SystemExit, so that context managers end all processes
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        result = build.replay(plan, dump, weights, objective, against)
    except (StartError, ProcessesLostError) as error:  # a trainer rank cannot build the model, died, or hangs
        exit_with_error(error)
    _report(result, dump, f"{dims} / {against}", Path(config.run.dir))
    return 0 if result.equal else 1


def _parallel_dims(sizes: dict[str, Any]) -> ParallelDims:
    return ParallelDims.from_world_size(**(vars(ParallelConfig()) | sizes))


def _replay_config(arguments: ReplayArguments, dump: StepDump) -> Config:
    """Return the config of the dumped run, with the output folder and the dtype that the arguments give."""
    config = from_hydra(OmegaConf.create(dump.description.config))
    output = Path(arguments.options.get("output", dump.path / "replay")).resolve()
    name = arguments.options.get("model.dtype", config.model.dtype)
    if name not in list(Dtype):
        raise ValueError(f"model.dtype={name}: expected {' or '.join(Dtype)}.")
    return replace(config, run=replace(config.run, dir=str(output)), model=replace(config.model, dtype=Dtype(name)))


def _weights(arguments: ReplayArguments, dump: StepDump) -> WeightsLocation:
    if folder := arguments.options.get("weights"):
        return WeightsLocation(str(Path(folder).resolve()), dump.description.step - 1)
    if dump.description.weights is None:
        raise ValueError(
            f"{dump.path}: no weights of this run are on disk; give a Hugging Face folder: weights=FOLDER."
        )
    return dump.description.weights


def _introduction(dump: StepDump, weights: WeightsLocation, dims: ParallelDims, against: ParallelDims) -> str:
    description = dump.description
    missing_steps = description.step - 1 - weights.step
    update = f"update {description.update} of " if description.update > 1 else ""
    lines = [
        f"{update}step {description.step}, which was dumped for this reason: {description.reason}",
        f"mini-batch {description.mini_batch} of {len(description.lrs)}, under {dims}, compared with {against}",
    ]
    if missing_steps:
        lines.append(
            f"the weights are from step {weights.step}, {missing_steps} steps before the weights of the dumped step. With these "
            "weights the layouts can be compared, but the values of the run may not be reproduced"
        )
    return "\n".join([*lines, ""])


def _report(result: ReplayResult, dump: StepDump, title: str, folder: Path) -> None:
    """Print a table and the conclusion, and write replay.json and replay.png."""
    content = dict(
        step_dump=str(dump.path),
        layouts=title,
        equal=result.equal,
        first_different=asdict(result.first_different) if result.first_different else None,
        first_nonfinite=asdict(result.first_nonfinite) if result.first_nonfinite else None,
        nonfinite_gradients=result.nonfinite_gradients,
        grad_norm=result.grad_norms,
        loss=result.losses,
        layers=[asdict(one) | {"within": one.within} for one in result.layers],
        differences=[asdict(one) | {"within": one.within} for one in result.differences],
    )
    (folder / "replay.json").write_text(json.dumps(content, indent=1) + "\n")
    plot_layers(folder / "replay.png", result.layers, title=f"step {dump.description.step}: {title}")
    _print_table(result, title)
    sys.stdout.write("\n".join([*_conclusion(result, dump), f"all values: {folder / 'replay.json'}, .png", ""]))


def _print_table(result: ReplayResult, title: str) -> None:
    from rich.console import Console  # imported here, because `mrl --help` does not need rich
    from rich.table import Table

    table = Table("layer", "tokens", "largest difference", "tolerance", "", title=title)
    for layer in result.layers:
        mark = "equal" if layer.within else "[bold red]DIFFERS"
        mark = mark if layer.finite else "[bold red]NOT FINITE"
        table.add_row(layer.name, f"{layer.compared:,}", f"{layer.largest:.1e}", f"{layer.tolerance:.0e}", mark)
    gradients = [one for one in result.differences if one.name.startswith("gradient ")]
    if gradients:
        worst = max(gradients, key=lambda one: one.relative / one.tolerance)
        table.add_row("worst gradient", "", f"{worst.relative:.1e}", f"{worst.tolerance:.0e}", worst.name)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def _conclusion(result: ReplayResult, dump: StepDump) -> list[str]:
    grad_norms, mini_batch = dump.description.grad_norms, dump.description.mini_batch
    in_run = f"; in the run it was {grad_norms[mini_batch]:.6g}" if mini_batch < len(grad_norms) else ""
    lines = [f"gradient norm {result.grad_norms[0]:.6g}; under the other layout {result.grad_norms[1]:.6g}{in_run}"]
    different, nonfinite = result.first_different, result.first_nonfinite
    if nonfinite:
        lines.append(f"NOT FINITE: the first value that is not finite is in {_describe_location(nonfinite)}")
    elif result.nonfinite_gradients:
        lines.append(
            "NOT FINITE: all activations are finite, but these gradients are not. The backward pass computes the last of "
            "them first: " + ", ".join(result.nonfinite_gradients[-3:])
        )
    if different and not (nonfinite and nonfinite.layer == different.layer):
        lines.append(f"NOT EQUAL: the first difference is in {_describe_location(different)}")
    wrong = [one for one in result.differences if not one.within]
    if wrong and not different and not nonfinite:
        lines.append(f"NOT EQUAL: the hidden states agree, but {wrong[0].name} differs ({wrong[0].relative:.1e})")
    return lines if not result.equal else [*lines, "equal: all hidden states, log-probabilities and gradients agree"]


def _describe_location(location: TokenLocation) -> str:
    if location.row < 0:
        return f"{location.layer}, which only one of the layouts has"
    part = "prompt" if location.in_prompt else "response"
    return f"{location.layer}, at token {location.token}, position {location.position} of row {location.row} (in its {part})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
