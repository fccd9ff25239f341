"""mrl as a library: `mrl.train`, `mrl.generate`, `mrl.evaluate`, `mrl.convert` and `mrl.load_config`.

Each function except `load_config` runs the `mrl` command of the same name in a child process, and waits until the command ends.
So a run behaves as on the command line, and `import mrl` is fast. The functions print what the command prints. `train` runs in
the Ray cluster that `cluster.address` names. If this key is not set, it runs in the cluster that the calling process has
joined, if there is one.

The argument `settings` contains the overrides of the command line, in one of three forms:

- a list: `["experiment=quickstart"]`;
- a dict, whose keys may be nested or dotted: `{"rollout": {"prompts_per_step": 8}, "optim.lr": 1e-6}`;
- a `Config` from `load_config`.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from mrl.config.hydra_entry import add_default_experiment, check_overrides, compose_config, format_override
from mrl.config.schema import Config
from mrl.config.search_path import with_absolute_search_path
from mrl.config.validate import is_known, known_keys
from mrl.core.code_locations import CONF, add_working_directory

type Settings = Config | Mapping[str, Any] | Sequence[str]

# After Ctrl-C, the command has this time to end before it gets SIGTERM. This is also the longest wait for the last error output
# of a command that has ended.
END_TIMEOUT_S = 30
SHOWN_LINES = 15  # number of lines of the error output in the message of CommandError
REWARD_STEPS = 5  # `TrainResult.reward` is the mean reward of this number of steps at the end of the run


class CommandError(RuntimeError):
    """A command failed. The message contains the last lines of its error output; `status` is the exit status."""

    def __init__(self, command: str, status: int, lines: Sequence[str]) -> None:
        super().__init__("\n".join([f"mrl {command} ended with status {status}", *lines]))
        self.status = status


@dataclass(frozen=True)
class TrainResult:
    """Files and metrics of a run that has ended."""

    run_dir: Path

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of each training step, by name, from metrics.jsonl."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def reward(self) -> float:
        """Mean reward of the last 5 steps, or NaN if no step was trained."""
        rewards = [line["reward/mean"] for line in self.metrics if "reward/mean" in line][-REWARD_STEPS:]
        return sum(rewards) / len(rewards) if rewards else float("nan")

    @property
    def model(self) -> Path:
        """Hugging Face folder of the trained model. It exists if trainer.save is true."""
        return self.run_dir / "hf"


@dataclass(frozen=True)
class EvaluationResult:
    """Result of `mrl evaluate`: the content of evaluation.json, and the folder that contains it."""

    folder: Path
    report: dict[str, Any]

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """For each data source: pass@k, maj@k and mean score, with confidence intervals.

        If there are several data sources, a summary of all prompts follows. With evaluate.harness, the list is empty.
        """
        return self.report["summaries"]


def load_config(settings: Settings = ()) -> Config:
    """Compose and check a config without starting a process. A `Config` is returned as it is.

    If the settings name neither an experiment nor a model, the config is that of the quickstart. Raises ValueError for a mistake
    in the settings. The message names the key.
    """
    if isinstance(settings, Config):
        return settings
    add_working_directory()
    arguments = with_absolute_search_path(add_default_experiment(_overrides(settings)))
    return compose_config(check_overrides(arguments))


def train(settings: Settings = ()) -> TrainResult:
    """Train a model with reinforcement learning, and wait until the run ends.

    With resume=auto (the default), an unfinished run in run.dir continues.

    Raises ValueError for a mistake in the settings, before anything starts. Raises CommandError if the run fails or is preempted.
    """
    config = load_config(settings)
    _refuse_slurm_job("train", config)
    address = _ray_address()
    if address and not config.cluster.address:
        config = replace(config, cluster=replace(config.cluster, address=address))
    _run("train", config)
    return TrainResult(Path(config.run.dir).resolve())


def generate(settings: Settings) -> Path:
    """Sample responses to held-out prompts. Returns the folder of parquet files, which pandas and datasets can read.

    Raises ValueError for a mistake in the settings, and CommandError if the command fails.
    """
    config = load_config(settings)
    _refuse_slurm_job("generate", config)
    output = config.generate.output or str(Path(config.run.dir) / "generated")
    _run("generate", replace(config, generate=replace(config.generate, output=output)))
    return Path(output).resolve()


def evaluate(settings: Settings) -> EvaluationResult:
    """Measure pass@k, maj@k and mean score of a model, or of the responses in `evaluate.input`.

    Raises ValueError for a mistake in the settings, and CommandError if the command fails.
    """
    config = load_config(settings)
    if not config.evaluate.input:  # with evaluate.input, the command starts no engines and submits no job
        _refuse_slurm_job("evaluate", config)
    _run("evaluate", config)
    folder = Path(config.evaluate.output or config.run.dir).resolve()
    return EvaluationResult(folder, json.loads((folder / "evaluation.json").read_text()))


def convert(
    direction: str,
    *,
    model_path: str | Path,
    checkpoint: str | Path | None = None,
    output: str | Path | None = None,
    dtype: str | None = None,
    family: str | None = None,
) -> Path | None:
    """Convert weights, and return the folder of the result. `direction` is "to-megatron", "to-hf" or "check".

    "check" converts every tensor in both directions, compares bytes and logits, and returns None. For GGUF files, use the command
    `mrl convert from-gguf`.

    Args:
        direction: Subcommand of `mrl convert`.
        model_path: Hugging Face folder, or an id on the Hub. "to-hf" reads only config and tokenizer.
        checkpoint: Megatron checkpoint, for "to-hf" and "check".
        output: Folder for the result, which must not exist yet.
        dtype: float32, float16 or bfloat16. Default: the dtype of the input.
        family: Your own model family, as package.module:NAME or /path/file.py:NAME.

    Raises CommandError if an argument is wrong, if the conversion fails, or if "check" finds a difference.
    """
    given = {
        "model.path": model_path,
        "checkpoint": checkpoint,
        "output": output,
        "dtype": dtype,
        "model.family": family,
    }
    _run_child("convert", [direction, *(f"{key}={value}" for key, value in given.items() if value is not None)])
    return Path(output).resolve() if output is not None else None


def _refuse_slurm_job(command: str, config: Config) -> None:
    if config.cluster.scheduler and not config.cluster.address:
        raise ValueError(
            f"cluster.scheduler={config.cluster.scheduler}: mrl.{command} runs only on this machine or in a Ray cluster; "
            f"to submit a Slurm job, use the command `mrl {command}`."
        )


def _ray_address() -> str | None:
    """Return the address of the Ray cluster that this process has joined, or None."""
    ray = sys.modules.get("ray")  # not `import ray`: this process has joined a cluster only if the user imported Ray
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None


def _overrides(settings: Mapping[str, Any] | Sequence[str]) -> list[str]:
    if isinstance(settings, str):
        raise ValueError(f"{settings!r}: expected a list of overrides, such as [{settings!r}].")
    if isinstance(settings, Mapping):
        return [format_override(key, value) for key, value in _flatten(settings, "")]
    return list(settings)


def _flatten(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        section = key not in known_keys() or any(known.startswith(f"{key}.") for known in known_keys())
        if isinstance(value, Mapping) and section and is_known(key) and "_target_" not in value:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, _callables_as_targets(value, key)


def _callables_as_targets(value: Any, key: str) -> Any:
    """Replace functions and classes by `{_target_: dotted name}`, also inside dicts and lists."""
    if isinstance(value, Mapping):
        return {name: _callables_as_targets(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_callables_as_targets(inner, key) for inner in value]
    if not callable(value):
        return value
    module, name = getattr(value, "__module__", "__main__"), getattr(value, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"{key}={value}: other processes import plug-ins by name; give a function or class at the top level of an importable "
            "module."
        )
    return {"_target_": f"{module}.{name}"}


def _run(command: str, config: Config) -> None:
    """Run a command with a complete config, which the child reads from a YAML file."""
    with ExitStack() as files:
        folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="mrl-config-")))
        tree = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
        assert isinstance(tree, dict)
        hydra = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml").hydra, resolve=False)
        OmegaConf.save({"defaults": ["base_config", "_self_"], **tree, "hydra": hydra}, folder / "library.yaml")
        # The YAML file has these values, too. But without an override of model.path, the command would add experiment=quickstart.
        overrides = [format_override("model.path", config.model.path), format_override("run.dir", config.run.dir)]
        _run_child(command, [f"--config-path={folder}", "--config-name=library", *overrides])


def _run_child(command: str, arguments: Sequence[str]) -> None:
    """Run `mrl COMMAND` in a child process. Ctrl-C also ends the child. Raises CommandError if the exit status is not 0."""
    child = subprocess.Popen(_command_line(command, arguments), stderr=subprocess.PIPE, text=True, errors="replace")
    assert child.stderr is not None
    last: deque[str] = deque(maxlen=SHOWN_LINES)
    reader = threading.Thread(target=_echo, args=(child.stderr, last), daemon=True)
    reader.start()
    try:
        status = child.wait()
    except BaseException as error:  # the wait after SIGTERM needs no timeout: the command has deadlines of its own
        if isinstance(error, KeyboardInterrupt):  # the terminal has also sent Ctrl-C to the child
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_TIMEOUT_S)
        child.terminate()
        child.wait()
        raise
    reader.join(END_TIMEOUT_S)
    if status:
        raise CommandError(command, status, list(last))


def _command_line(command: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "mrl.cli", command, *arguments]


def _echo(stream: IO[str], last: deque[str]) -> None:
    """Copy a stream to stderr line by line, and append each line to `last`, which keeps only the newest lines."""
    for line in stream:
        last.append(line.rstrip("\n"))
        with suppress(Exception):  # if stderr is closed, go on reading, so that the child does not block on a full pipe
            sys.stderr.write(line)
