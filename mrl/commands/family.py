"""`mrl family derive`: proposes a model family from a config of transformers, and proves it by comparison with transformers."""

import argparse
import logging
import multiprocessing
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.conversion.convert_checkpoint import ConversionCheck
    from models.derive.proposal import Proposal

HELP = """\
usage: mrl family derive MODEL [--output FILE] [--draft] [--layouts]

Proposes a model family for mrl from a config of transformers, and proves it. MODEL is a Hugging Face folder or a config.json.
The command reads no weights and needs no GPU and no network.

It shrinks the config, builds a random model, and finds by experiments what each tensor does. Then it writes a draft, and
compares Megatron with transformers, on this tiny model and on models with another value of one config field: every tensor byte
for byte after a conversion to Megatron and back, the logits, and the gradient of every tensor. For the whole config, it compares
the numbers of parameters.

For each operator or config field that the command does not know, it prints a line with the name. The exit status is 0 if the
family is proven, 1 if it is not, and 2 for a wrong argument, an unreadable model or an existing FILE. Without --draft, only a
proven family is written to FILE.

  --output FILE  file for the family. Default: ./ARCHITECTURE.py, such as ./llama.py for LlamaForCausalLM.
  --draft        writes the file also if the family is not proven. Comments at the top of the file say what is missing.
  --layouts      also compares a training step under parallel.tp=2 and under parallel.pp=2 with the step in one process

Examples:
  mrl family derive Qwen3-0.6B
  mrl family derive config.json --output my_family.py --layouts
"""
LAYOUTS = ("tp", "pp")  # keys of the section parallel; --layouts sets each of them to 2 in turn


@dataclass(frozen=True)
class FamilyArguments:
    """Arguments of `mrl family derive`."""

    model: Path
    output: Path | None
    draft: bool
    layouts: bool


def parse(argv: Sequence[str]) -> FamilyArguments:
    """Parse the arguments after `derive`. Raises ValueError if an argument is missing or unknown."""
    parser = argparse.ArgumentParser(prog="mrl family derive", add_help=False, exit_on_error=False)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--layouts", action="store_true")
    try:
        found, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}; `mrl family --help` describes the arguments.") from None
    if found.model is None:
        raise ValueError("mrl family derive needs MODEL, a Hugging Face folder or a config.json.")
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r} of mrl family derive; `mrl family --help` lists them.")
    return FamilyArguments(found.model, found.output, found.draft, found.layouts)


def derive(arguments: FamilyArguments) -> int:
    """Propose, prove and write a family. Return the exit status. Raises ValueError if the model cannot be read."""
    from models.derive.proposal import propose  # imports transformers, which takes seconds
    from models.derive.tiny_config import read_fields

    if arguments.output:
        _check_is_new(arguments.output)
    proposal = propose(read_fields(arguments.model))
    _print_summary(proposal)
    plan = proposal.plan  # content of the file; `plan.constant` is the name of the family in it, such as LLAMA
    output = arguments.output or Path(f"{plan.constant.lower()}.py")
    _check_is_new(output)
    with TemporaryDirectory() as folder:
        draft = Path(folder) / f"{plan.constant.lower()}.py"
        draft.write_text(plan.code())
        checks = [] if proposal.problems else _prove(proposal, arguments, f"{draft}:{plan.constant}", Path(folder))
    is_proven = bool(checks) and all(check.passed for check in checks)
    if is_proven or arguments.draft:
        failed = [*proposal.problems, *(f"{c.name}: {c.detail}" for c in checks if not c.passed)]
        output.write_text("".join(f"# not proven: {line}\n" for line in failed) + plan.code())
        sys.stdout.write(
            f"{output}: {'proven' if is_proven else 'NOT proven'}; model.family={output}:{plan.constant}\n"
        )
    else:
        sys.stdout.write("not proven, so no file is written; --draft writes it nevertheless\n")
    return 0 if is_proven else 1


def _check_is_new(output: Path) -> None:
    if output.exists():
        raise ValueError(f"--output {output}: the file exists; choose another name or remove it.")


def _prove(proposal: "Proposal", arguments: FamilyArguments, family: str, folder: Path) -> "list[ConversionCheck]":
    from models.derive.proof import check_whole_config, prove, write_model

    # in a new process, because Megatron's state is global
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _silence_megatron) as pool:
        checks = pool.submit(prove, proposal.models_to_prove, family).result()
    checks.append(check_whole_config(proposal.config_fields, arguments.model, family))
    if arguments.layouts:
        write_model(proposal.tiny, folder / "tiny")
        checks += [_certify(axis, family, folder) for axis in LAYOUTS]
    _print_checks(checks)
    return checks


def _certify(axis: str, family: str, folder: Path) -> "ConversionCheck":
    """Run `mrl certify` with two ranks on the tiny model in `folder`."""
    from models.conversion.convert_checkpoint import ConversionCheck

    command = [sys.executable, "-m", "mrl.cli", "certify", f"model.path={folder / 'tiny'}", f"model.family={family}"]
    command += [
        f"parallel.{axis}=2",
        f"run.dir={folder / axis}",
        "certify.prompt_tokens=10",
        "certify.response_tokens=10",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (result.stdout + result.stderr).strip().splitlines() or [""]
    verdict = next((line for line in lines if line.startswith(("equal within ", "NOT EQUAL:"))), lines[-1])
    return ConversionCheck(f"the tiny model: parallel.{axis}=2", verdict, result.returncode == 0)


def _silence_megatron() -> None:
    """Turn warnings off, because Megatron warns about every optional library that is not installed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> None:
    from rich.console import Console  # imported here, because `mrl --help` does not need rich
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def _print_summary(proposal: "Proposal") -> None:
    from models.derive.summary import summary

    _print_table(("part", "found", "evidence"), summary(proposal), proposal.plan.architecture)
    for note in proposal.notes:
        sys.stdout.write(f"note: {note}\n")
    for problem in proposal.problems:
        sys.stdout.write(f"unknown: {problem}\n")


def _print_checks(checks: "Sequence[ConversionCheck]") -> None:
    rows = [(check.name, check.detail, "equal" if check.passed else "[bold red]DIFFERS") for check in checks]
    _print_table(("check", "result", ""), rows, "Megatron / transformers")


def main(argv: list[str]) -> int:
    """Entry point of `mrl family`. Returns the exit status."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(HELP)
        return 0 if argv else 2
    if argv[0] != "derive":
        sys.stderr.write(f"mrl family: unknown subcommand {argv[0]!r}; expected derive.\n")
        return 2
    try:
        return derive(parse(argv[1:]))
    except (ValueError, OSError) as error:  # a mistake of the user, or a disk that is full or not writable
        sys.stderr.write(f"mrl: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
