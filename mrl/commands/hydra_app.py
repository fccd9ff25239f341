"""Hydra around the commands that take a config: groups, overrides, `--cfg job`, `--multirun`."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from mrl.config.schema import Config
from mrl.config.secrets import WrittenSecretError, engine_key, refuse_literals
from mrl.config.validate import from_hydra, is_known, known_keys, unknown_key_message
from mrl.core.errors import on_wait
from mrl.workers.group import StartError

CONF = Path(__file__).resolve().parent.parent.parent / "conf"

NO_OUTPUT = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra.job_logging.handlers.file.filename=/dev/null"]
"""Overrides for commands that only print."""


def run(argv: list[str], job: Callable[[Config], None], usage: str = "") -> int:
    """Compose the config from `argv` and run `job` on it (once per point of a sweep); returns the exit status.

    `usage`: what --help shows in place of Hydra's own text.
    """
    if usage and any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(usage)
        return 0
    if not CONF.is_dir():
        raise SystemExit(f"mrl: the config folder {CONF} is missing; install with `pip install -e .` from a checkout.")
    argv = with_default_experiment(argv)
    try:
        engine_key()  # one that cannot be sent is a mistake of the user's
        argv = checked(argv)
    except ValueError as error:
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    register_schema()
    sys.path.append(os.getcwd())  # a user's own rewards and losses; last, so that ours are never shadowed
    signal.signal(signal.SIGTERM, _end)

    @hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
    def app(composed: DictConfig) -> None:
        try:
            config = from_hydra(composed)
        except WrittenSecretError as error:
            shutil.rmtree(Path(HydraConfig.get().runtime.output_dir, "hydra"))  # Hydra has written it there
            refuse(error)
        except ValueError as error:
            refuse(error)
        config = replace(
            config, run=replace(config.run, dir=HydraConfig.get().runtime.output_dir)
        )  # a sweep's point: its own
        try:
            job(config)
        except StartError as error:  # what only the trainer processes can find, after all were ended
            refuse(error)

    sys.argv = [sys.argv[0], *argv]
    try:
        app()
    except KeyboardInterrupt:  # every process has been ended on the way here
        sys.stderr.write("mrl: interrupted\n")
        return 128 + signal.SIGINT
    return 0


def register_schema() -> None:
    """Let the yaml files build on every key of mrl.config.schema with its default."""
    schema = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
    ConfigStore.instance().store(name="base_config", node=schema)


@contextmanager
def as_user_error() -> Iterator[None]:
    """End with the message where a ValueError is raised inside: a mistake in the user's input."""
    try:
        yield
    except ValueError as error:
        refuse(error)


def refuse(error: Exception) -> NoReturn:
    """End with the message of a mistake in the user's input, or of what a user can look into, no traceback."""
    sys.stderr.write(f"mrl: {error}\n")
    raise SystemExit(2)


def _end(signum: int, frame: object) -> None:
    """Unwind the stack, so that every process is ended. Where Ray waits, what a handler raises is lost: it is raised again."""

    def leave() -> NoReturn:
        raise SystemExit(128 + signum)

    on_wait(leave)
    leave()


def composed(overrides: Sequence[str]) -> Config:
    """The config that a command would read from these overrides; raises ValueError."""
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return from_hydra(compose("config", list(overrides)))
        except HydraException as error:
            raise ValueError(str(error)) from None


def with_default_experiment(argv: list[str]) -> list[str]:
    """Add `experiment=quickstart` where neither an experiment nor a model is named: it runs on any machine."""
    named = any(a.lstrip("+").startswith(("experiment=", "model.path=")) for a in argv)
    return argv if named else ["experiment=quickstart", *argv]  # first: flags may follow


def checked(argv: list[str]) -> list[str]:
    """`argv` with every override's key checked; raises ValueError at one that nothing reads, with the nearest that exists.

    Keys inside free-form sections (sglang, megatron, arguments of plug-ins), and such sections as a whole, get Hydra's `++`:
    they are set, written or not.
    """
    parser = OverridesParser.create()
    return [_checked(a, parser) if "=" in a and not a.startswith("-") else a for a in argv]


def _checked(argument: str, parser: OverridesParser) -> str:
    try:
        override = parser.parse_override(argument)
        key, value = override.key_or_group, override.value()
    except HydraException as error:
        raise ValueError(f"{argument!r} cannot be read: {str(error).splitlines()[0]}") from None
    if (CONF / key).is_dir() or key.split(".")[0] == "hydra" or key.startswith("hydra/"):
        return argument
    if not is_known(key):
        raise ValueError(unknown_key_message(key))
    refuse_literals({key: value})  # before Hydra writes the overrides to a file
    free = (key not in known_keys() or isinstance(value, dict)) and not argument.startswith(("+", "~"))
    return f"++{argument}" if free else argument
