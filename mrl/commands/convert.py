"""`mrl convert`: converts weights between Hugging Face folders and Megatron checkpoints, and checks the conversion."""

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

from models.families import resolve_family_path
from models.hf_config import HFConfig
from mrl.config.input_names import resolve_model

if TYPE_CHECKING:
    import torch

    from models.conversion.convert_checkpoint import ConversionCheck

HELP = """\
usage: mrl convert to-megatron|to-hf|from-gguf|check KEY=VALUE ...

Converts weights between Hugging Face folders and Megatron checkpoints. This needs no GPU. Whatever the size of the model, a
conversion needs memory for a few copies of its largest tensor. To resume an interrupted conversion, run the same command again.

  to-megatron  converts a Hugging Face folder to a Megatron checkpoint (weights only). Any parallel layout can load it.
  to-hf        converts a Megatron checkpoint of any parallel layout to a Hugging Face folder.
  from-gguf    converts a GGUF file to a Hugging Face folder with model, tokenizer and chat template.
  check        checks the conversion. It converts every tensor to Megatron and back, and compares the logits with those of
               transformers. The exit status is 1 if something differs.

Keys of to-megatron and to-hf:
  model.path=DIR       Hugging Face folder, or an id on the Hub. to-hf reads only the config and the tokenizer from it.
  checkpoint=DIR       Megatron checkpoint, such as outputs/quickstart/TIME/checkpoints/step_000060/actor. Only for to-hf.
  model.family=FAMILY  model family, if mrl does not include it, such as my_model.py:NAME
  output=DIR           folder for the result, which must not exist yet. It appears when the conversion is complete.
  dtype=TYPE           float32, float16 or bfloat16. Default: the dtype of the input.
  max_shard_bytes=N    size of the largest file. Default: 2e9. A tensor that is larger gets its own file.

Keys of from-gguf:
  gguf=FILE            GGUF file of llama.cpp. Quantized weights are dequantized.
  output=DIR           Hugging Face folder for the result, which must not exist yet. It appears when the conversion is complete.
  dtype=TYPE           float32, float16 or bfloat16. Default: bfloat16.

Keys of check:
  model.path=DIR       Hugging Face folder, or an id on the Hub
  checkpoint=DIR       Megatron checkpoint that is also compared with the folder, byte for byte
  model.family=FAMILY  model family, if mrl does not include it
  logits=false         skips the comparison of logits, which needs both models in memory in float32. A reward model needs this
                       key, because it has no logits.

Examples:
  mrl convert to-megatron model.path=Qwen3-1.7B output=Qwen3-1.7B-megatron
  mrl convert to-hf checkpoint=RUN/checkpoints/step_000060/actor model.path=Qwen3-1.7B output=trained dtype=bfloat16
  mrl convert check model.path=Qwen3-1.7B checkpoint=Qwen3-1.7B-megatron logits=false
"""


class ConvertArguments:
    """The KEY=VALUE arguments of one subcommand, such as to-hf."""

    def __init__(self, kind: str, arguments: Sequence[str], known: Sequence[str]) -> None:
        """Read the arguments of the subcommand `kind`. `known`: keys that the subcommand accepts.

        Raises ValueError if an argument is not of the form KEY=VALUE, a key is not in `known`, or a key is repeated.
        """
        self.kind, self._values = kind, dict[str, str]()
        for argument in arguments:
            key, equals, value = argument.partition("=")
            if not equals or not value:
                raise ValueError(f"{argument!r}: expected KEY=VALUE; `mrl convert --help` lists the keys.")
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"its keys are {', '.join(known)}."
                raise ValueError(f"unknown key {key!r} of mrl convert {kind}; {hint}")
            if key in self._values:
                raise ValueError(f"{key}= is given twice: {self._values[key]} and {value}.")
            self._values[key] = value

    def required(self, key: str) -> str:
        """Return the value of a required key. Raises ValueError if the key is missing."""
        if key not in self._values:
            raise ValueError(f"mrl convert {self.kind} needs {key}=DIR; `mrl convert --help` has examples.")
        return self._values[key]

    def path(self, key: str) -> Path:
        """Return the value of a required key as a path. Raises ValueError if the key is missing."""
        return Path(self.required(key))

    def optional(self, key: str, read: Callable[[str], Any], default: Any, expected: str) -> Any:
        """Return `read(value)`, or `default` if the key is missing. Raises ValueError if `read` raises an error."""
        if key not in self._values:
            return default
        try:
            return read(self._values[key])
        except (ValueError, KeyError, OverflowError):
            raise ValueError(f"{key}={self._values[key]}: expected {expected}.") from None


def to_megatron(arguments: Sequence[str]) -> int:
    """Run `mrl convert to-megatron`."""
    parsed = ConvertArguments(
        "to-megatron", arguments, ("model.path", "model.family", "output", "dtype", "max_shard_bytes")
    )
    output, options = parsed.path("output"), _options(parsed)
    from models.conversion import convert_checkpoint  # it imports torch, which takes seconds

    with ConvertProgressBar("to Megatron") as bar:
        convert_checkpoint.to_megatron(_config(parsed), output, bar, **options)
    sys.stdout.write(f"{output}: a Megatron checkpoint (weights only) that any layout can load\n")
    return 0


def to_hf(arguments: Sequence[str]) -> int:
    """Run `mrl convert to-hf`."""
    parsed = ConvertArguments(
        "to-hf", arguments, ("checkpoint", "model.path", "model.family", "output", "dtype", "max_shard_bytes")
    )
    checkpoint, output, options = parsed.path("checkpoint"), parsed.path("output"), _options(parsed)
    from models.conversion import convert_checkpoint  # it imports torch, which takes seconds

    with ConvertProgressBar("to Hugging Face") as bar:
        convert_checkpoint.to_hf(checkpoint, _config(parsed), output, bar, **options)
    sys.stdout.write(f"{output}: a Hugging Face folder for transformers or SGLang\n")
    return 0


def gguf(arguments: Sequence[str]) -> int:
    """Run `mrl convert from-gguf`."""
    parsed = ConvertArguments("from-gguf", arguments, ("gguf", "output", "dtype"))
    source, output = parsed.path("gguf"), parsed.path("output")
    dtype = parsed.optional("dtype", _dtype, None, "float32, float16 or bfloat16")
    from models.conversion.convert_checkpoint import from_gguf  # it imports torch, which takes seconds

    from_gguf(source, output, dtype or _dtype("bfloat16"))
    sys.stdout.write(f"{output}: a Hugging Face folder for model.path\n")
    return 0


def check(arguments: Sequence[str]) -> int:
    """Run `mrl convert check`. Return the exit status, which is 1 if something differs."""
    parsed = ConvertArguments("check", arguments, ("model.path", "model.family", "checkpoint", "logits"))
    checkpoint = parsed.optional("checkpoint", Path, None, "a folder")
    logits = parsed.optional("logits", {"true": True, "false": False}.__getitem__, True, "true or false")
    config = _config(parsed)
    if logits and config.is_reward_model:
        raise ValueError(
            f"{config.path}: {config.architecture} has a score head in place of an output layer, so there are no logits to "
            "compare; logits=false skips this check."
        )
    from models.conversion import convert_checkpoint  # it imports torch, which takes seconds

    results = [convert_checkpoint.check_round_trip(config)]
    if checkpoint:
        results.append(convert_checkpoint.check_against_checkpoint(config, checkpoint))
    if logits:  # in a new process, because Megatron's state is global
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _silence_megatron) as pool:
            results.append(pool.submit(convert_checkpoint.check_logits, config).result())
    _print_checks(results, str(config.path.parent))
    return 0 if all(result.passed for result in results) else 1


def _silence_megatron() -> None:
    """Turn warnings off, because Megatron warns about every optional library that is not installed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _config(parsed: ConvertArguments) -> HFConfig:
    family = parsed.optional("model.family", resolve_family_path, None, "package.module:NAME or /path/file.py:NAME")
    return HFConfig.load(resolve_model(parsed.required("model.path")), family)


def _options(parsed: ConvertArguments) -> dict[str, Any]:
    options = {}
    if dtype := parsed.optional("dtype", _dtype, None, "float32, float16 or bfloat16"):
        options["dtype"] = dtype
    if limit := parsed.optional("max_shard_bytes", _positive, None, "a number of bytes above 0, such as 2e9"):
        options["max_shard_bytes"] = limit
    return options


def _dtype(name: str) -> "torch.dtype":
    import torch  # takes seconds

    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def _positive(text: str) -> int:
    number = int(float(text))
    if number < 1:
        raise ValueError(text)
    return number


@dataclass
class ConvertProgressBar:
    """Shows how many bytes are converted.

    A terminal shows a progress bar. Other output gets a line every `interval_s` seconds and at the end.
    """

    title: str
    interval_s: float = 10.0

    def __enter__(self) -> "ConvertProgressBar":
        from rich import progress  # imported here, because `mrl --help` does not need rich
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
        """Start the display. An earlier, interrupted conversion has already written `done_bytes` of the `total_bytes`."""
        self.total, self.done, self._printed_s = total_bytes, done_bytes, time.monotonic()
        self._bar.update(self._task, total=total_bytes, completed=done_bytes)
        if done_bytes:
            self.console.print(f"continuing: {decimal(done_bytes)} are already written", highlight=False)

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes` to the converted bytes."""
        self.done += num_bytes
        self._bar.advance(self._task, num_bytes)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._printed_s > self.interval_s or self.done == self.total):
            self._printed_s = now
            line = f"{self.title}: {decimal(self.done)} of {decimal(self.total)}"
            self.console.print(line, highlight=False)


def _print_checks(results: "Sequence[ConversionCheck]", title: str) -> None:
    from rich.console import Console  # imported here, because `mrl --help` does not need rich
    from rich.table import Table

    table = Table("check", "result", "", title=title)
    for result in results:
        table.add_row(result.name, result.detail, "equal" if result.passed else "[bold red]DIFFERS")
    Console(width=None if sys.stdout.isatty() else 130).print(table)


# subcommand -> its function
KINDS = {"to-megatron": to_megatron, "to-hf": to_hf, "from-gguf": gguf, "check": check}


def main(argv: list[str]) -> int:
    """Entry point of `mrl convert`. Returns the exit status."""
    if not argv or any(argument in ("-h", "--help") for argument in argv):
        sys.stdout.write(HELP)
        return 0 if argv else 2
    if argv[0] not in KINDS:
        near = difflib.get_close_matches(argv[0], KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(KINDS)}."
        sys.stderr.write(f"mrl convert: unknown subcommand {argv[0]!r}; {hint}\n")
        return 2
    try:
        return KINDS[argv[0]](argv[1:])
    except (ValueError, OSError) as error:  # a mistake of the user, or a disk that is full or not writable
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    except BrokenProcessPool:
        sys.stderr.write(
            "mrl: the process that computes logits was killed, possibly because memory was full; logits=false skips this check\n"
        )
        return 2
    except KeyboardInterrupt:  # complete files stay on disk
        sys.stderr.write("mrl: interrupted; the same command resumes the conversion\n")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
