"""`mrl convert`: weights between Hugging Face folders and Megatron checkpoints."""

import difflib
import logging
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from models.families import located
from models.hf_config import HFConfig

if TYPE_CHECKING:
    import torch

    from models.conversion.check import Finding

HELP = """\
usage: mrl convert KIND KEY=VALUE ...

Weights between Hugging Face folders and Megatron checkpoints. No GPU is needed, and no more memory than the largest tensor
takes a few times, however large the model is. An interrupted conversion is taken up by the same command.

  to-megatron  a Hugging Face folder -> a Megatron checkpoint (weights only), which any parallel layout loads
  to-hf        a Megatron checkpoint of any layout -> a Hugging Face folder
  check        is it exact? every tensor there and back, and logits beside transformers; status 1 where it is not

Keys of to-megatron and to-hf:
  model=DIR            the Hugging Face folder; to-hf takes config and tokenizer from it, and needs no weights there
  checkpoint=DIR       (to-hf) the Megatron checkpoint, such as outputs/quickstart/TIME/checkpoints/step_000060/actor
  family=PLACE         where the model's family is, if it is none of ours, such as my_model.py:FAMILY
  output=DIR           what to write; it appears when it is complete, and must not exist
  dtype=TYPE           float32, float16 or bfloat16; default: as it is stored
  max_shard_bytes=N    largest file, such as 2e9 (the default); a larger tensor has a file of its own

Keys of check:
  model=DIR            the Hugging Face folder
  checkpoint=DIR       also compare this Megatron checkpoint, byte for byte
  family=PLACE         as above
  logits=false         leave out the logits, for which both models are in memory in float32

Examples:
  mrl convert to-megatron model=Qwen3-1.7B output=Qwen3-1.7B-megatron
  mrl convert to-hf checkpoint=RUN/checkpoints/step_000060/actor model=Qwen3-1.7B output=trained dtype=bfloat16
  mrl convert check model=Qwen3-1.7B checkpoint=Qwen3-1.7B-megatron logits=false
"""


class Given:
    """The KEY=VALUE arguments of one kind; a key that is asked for and was not given is an error."""

    def __init__(self, kind: str, arguments: Sequence[str], known: Sequence[str]) -> None:
        """Raises ValueError at an argument without '=', an unknown key or one given twice."""
        self.kind, self._values = kind, dict[str, str]()
        for argument in arguments:
            key, equals, value = argument.partition("=")
            if not equals or not value:
                raise ValueError(f"{argument!r}: expected KEY=VALUE; `mrl convert --help` lists the keys.")
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}."
                raise ValueError(f"unknown key {key!r} of mrl convert {kind}; {hint}")
            if key in self._values:
                raise ValueError(f"{key}= is given twice: {self._values[key]} and {value}.")
            self._values[key] = value

    def path(self, key: str) -> Path:
        """A folder that must be named."""
        if key not in self._values:
            raise ValueError(f"mrl convert {self.kind} needs {key}=DIR; `mrl convert --help` has examples.")
        return Path(self._values[key])

    def optional(self, key: str, read: Callable[[str], Any], default: Any, expected: str) -> Any:
        """What `read` makes of the value, or the default; raises ValueError where it makes nothing of it."""
        if key not in self._values:
            return default
        try:
            return read(self._values[key])
        except (ValueError, KeyError, OverflowError):
            raise ValueError(f"{key}={self._values[key]}: expected {expected}.") from None


def to_megatron(arguments: Sequence[str]) -> int:
    """`mrl convert to-megatron`."""
    given = Given("to-megatron", arguments, ("model", "family", "output", "dtype", "max_shard_bytes"))
    output, options = given.path("output"), _options(given)
    from models.conversion import convert  # torch, once the command line is known to be right

    with Bar("to Megatron") as bar:
        convert.to_megatron(_config(given), output, bar, **options)
    sys.stdout.write(f"{output}: a Megatron checkpoint (weights) that any layout loads\n")
    return 0


def to_hf(arguments: Sequence[str]) -> int:
    """`mrl convert to-hf`."""
    given = Given("to-hf", arguments, ("checkpoint", "model", "family", "output", "dtype", "max_shard_bytes"))
    checkpoint, output, options = given.path("checkpoint"), given.path("output"), _options(given)
    from models.conversion import convert  # torch, once the command line is known to be right

    with Bar("to Hugging Face") as bar:
        convert.to_hf(checkpoint, _config(given), output, bar, **options)
    sys.stdout.write(f"{output}: a Hugging Face folder, for transformers or SGLang\n")
    return 0


def check(arguments: Sequence[str]) -> int:
    """`mrl convert check`; 1 where something is not equal."""
    given = Given("check", arguments, ("model", "family", "checkpoint", "logits"))
    checkpoint = given.optional("checkpoint", Path, None, "a folder")
    logits = given.optional("logits", {"true": True, "false": False}.__getitem__, True, "true or false")
    config = _config(given)
    from models.conversion import check as checks  # torch, once the command line is known to be right

    findings = [checks.check_round_trip(config)]
    if checkpoint:
        findings.append(checks.check_against_checkpoint(config, checkpoint))
    if logits:  # in a process of its own: Megatron's state is global
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _quietly) as pool:
            findings.append(pool.submit(checks.check_logits, config).result())
    _show(findings, str(config.path.parent))
    return 0 if all(finding.good for finding in findings) else 1


def _quietly() -> None:
    """Megatron warns of every optional library that is not installed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _config(given: Given) -> HFConfig:
    family = given.optional("family", located, None, "package.module:NAME or /path/file.py:NAME")
    return HFConfig.load(given.path("model"), family)


def _options(given: Given) -> dict[str, Any]:
    options = {}
    if dtype := given.optional("dtype", _dtype, None, "float32, float16 or bfloat16"):
        options["dtype"] = dtype
    if limit := given.optional("max_shard_bytes", _positive, None, "a number of bytes above 0, such as 2e9"):
        options["max_shard_bytes"] = limit
    return options


def _dtype(name: str) -> "torch.dtype":
    import torch  # seconds

    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def _positive(text: str) -> int:
    number = int(float(text))
    if number < 1:
        raise ValueError(text)
    return number


@dataclass
class Bar:
    """Bytes done: a bar on a terminal, elsewhere a line every `every_s` seconds and one at the end."""

    title: str
    every_s: float = 10.0

    def __enter__(self) -> "Bar":
        from rich import progress  # not needed by `mrl --help`
        from rich.console import Console

        self.console = Console(file=sys.stdout)
        columns = [progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn()]
        columns += [progress.TransferSpeedColumn(), progress.TimeRemainingColumn()]
        self._bar = progress.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task(self.title, total=None)
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, total_bytes: int, done_bytes: int) -> None:
        """`done_bytes` are from an earlier, interrupted conversion."""
        self.total, self.done, self._printed_s = total_bytes, done_bytes, time.monotonic()
        self._bar.update(self._task, total=total_bytes, completed=done_bytes)
        if done_bytes:
            self.console.print(f"{decimal(done_bytes)} are there from before", highlight=False)

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more are written."""
        self.done += num_bytes
        self._bar.advance(self._task, num_bytes)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._printed_s > self.every_s or self.done == self.total):
            self._printed_s = now
            line = f"{self.title}: {decimal(self.done)} of {decimal(self.total)}"
            self.console.print(line, highlight=False)


def _show(findings: "Sequence[Finding]", title: str) -> None:
    from rich.console import Console  # not needed by `mrl --help`
    from rich.table import Table

    table = Table("what", "found", "", title=title)
    for finding in findings:
        table.add_row(finding.what, finding.detail, "equal" if finding.good else "[bold red]DIFFERS")
    Console(width=None if sys.stdout.isatty() else 130).print(table)


KINDS = {"to-megatron": to_megatron, "to-hf": to_hf, "check": check}


def main(argv: list[str]) -> int:
    """Entry point of `mrl convert`."""
    if not argv or any(argument in ("-h", "--help") for argument in argv):
        sys.stdout.write(HELP)
        return 0 if argv else 2
    if argv[0] not in KINDS:
        near = difflib.get_close_matches(argv[0], KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(KINDS)}."
        sys.stderr.write(f"mrl: unknown kind of conversion {argv[0]!r}; {hint}\n")
        return 2
    try:
        return KINDS[argv[0]](argv[1:])
    except (ValueError, OSError) as error:  # a mistake, or a disk that is full or not ours to write
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    except BrokenProcessPool:
        sys.stderr.write(
            "mrl: the process that computes logits was killed, as when memory is short; use logits=false\n"
        )
        return 2
    except KeyboardInterrupt:  # finished files are kept
        sys.stderr.write("mrl: interrupted; the same command takes it up again\n")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
