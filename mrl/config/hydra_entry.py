"""The entry point that all commands share: Hydra with the groups in conf/, overrides, `--cfg job` and `--multirun`."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrl.config.schema import Config
from mrl.config.secrets import PlainSecretError, engine_key, refuse_plain_secrets
from mrl.config.validate import (
    from_hydra,
    is_known,
    known_keys,
    structured_schema,
    type_error_message,
    unknown_key_message,
)
from mrl.core.run_errors import StartError, set_wait_check

CONF = Path(__file__).resolve().parents[2] / "conf"

NO_OUTPUT = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra.job_logging.handlers.file.filename=/dev/null"]
"""Overrides for commands that only print."""
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_./:-]+")


def run(argv: list[str], job: Callable[[Config], Any], usage: str = "") -> int:
    """Compose the config from `argv` and run `job` on it; returns the exit status.

    With `--multirun` Hydra's launcher runs `job` once for each point of the sweep.

    Args:
        argv: overrides and Hydra's own options.
        job: takes the checked config; its return value is the objective of a sweep.
        usage: text of --help, instead of Hydra's own.
    """
    if usage and any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(usage)
        return 0
    with exit_on_user_error():
        arguments = prepare_arguments(argv)
    signal.signal(signal.SIGTERM, _raise_system_exit)
    configs: list[Config] = []

    def task(composed: DictConfig) -> Any:
        config = _checked_config(composed)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return job(config)
        configs.append(config)

    try:
        with exit_on_user_error():
            _run_hydra(arguments, task)
        for config in configs:  # outside of Hydra's stack frames
            job(config)
    except StartError as error:  # raised after all processes have ended
        exit_with_error(error)
    except KeyboardInterrupt:  # all processes have ended while the stack was unwound
        sys.stderr.write("mrl: interrupted\n")
        return 128 + signal.SIGINT
    return 0


def prepare_arguments(argv: Sequence[str]) -> list[str]:
    """Check the arguments of a command, and complete them for Hydra. Also makes a user's modules importable.

    Raises ValueError for a wrong argument, or for an engine key that an HTTP header cannot carry.
    """
    if not CONF.is_dir():
        raise ValueError(f"the config folder {CONF} is missing; install with `pip install -e .` from a checkout.")
    engine_key()
    arguments = check_overrides(add_default_experiment(list(argv)))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for a user's rewards and losses; last, so that they never shadow mrl
    return arguments


def _run_hydra(arguments: Sequence[str], task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra compose the config and call `task` with it. Raises ValueError if the config cannot be composed."""
    register_schema()
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    try:
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_composition_message(error)) from None
    finally:
        del os.environ["HYDRA_FULL_ERROR"]


def _checked_config(composed: DictConfig) -> Config:
    """Convert and check the config that Hydra composed. Ends the process with status 2 if the config is wrong."""
    try:
        config = from_hydra(composed)
    except PlainSecretError as error:
        shutil.rmtree(Path(HydraConfig.get().runtime.output_dir, "hydra"))  # where Hydra has already written the secret
        exit_with_error(error)
    except ValueError as error:
        exit_with_error(error)
    run_dir = HydraConfig.get().runtime.output_dir  # each point of a sweep has its own
    return replace(config, run=replace(config.run, dir=run_dir))


def register_schema() -> None:
    """Register the typed schema in Hydra's ConfigStore; conf/config.yaml starts from it."""
    ConfigStore.instance().store(name="base_config", node=structured_schema())


def compose_config(overrides: Sequence[str]) -> Config:
    """Compose the config without running anything. Raises ValueError for a mistake in it."""
    return from_hydra(_compose(overrides))


def compose_sweeper_params(overrides: Sequence[str]) -> DictConfig:
    """Compose `hydra.sweeper.params`, the swept keys in a file such as conf/sweep/lr_kl.yaml. Raises ValueError."""
    return _compose(overrides, return_hydra_config=True).hydra.sweeper.get("params") or OmegaConf.create({})


def _compose(overrides: Sequence[str], return_hydra_config: bool = False) -> DictConfig:
    register_schema()
    in_sweep = GlobalHydra.instance().is_initialized()
    with nullcontext() if in_sweep else initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return compose("config", list(overrides), return_hydra_config)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_composition_message(error)) from None


def _composition_message(error: BaseException) -> str:
    """Return Hydra's error in one line. Errors of types and keys name the key and the expected value."""
    if isinstance(error.__cause__, OmegaConfBaseException) and error.__cause__.full_key:
        return type_error_message(error.__cause__)
    if isinstance(error, OmegaConfBaseException):
        return type_error_message(error)
    return " ".join(str(error).split()).partition(" Config search path:")[0]


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """If the code inside raises ValueError, print its message and end the process with status 2."""
    try:
        yield
    except ValueError as error:
        exit_with_error(error)


def exit_with_error(error: Exception) -> NoReturn:
    """End the process with status 2 and the error's message, without a traceback."""
    sys.stderr.write(f"mrl: {error}\n")
    raise SystemExit(2)


def _raise_system_exit(signum: int, frame: object) -> None:
    """Handle SIGTERM: unwind the stack so that all processes end.

    Ray discards an exception that a signal handler raises during a wait, so the next wait check raises it again.
    """

    def leave() -> NoReturn:
        raise SystemExit(128 + signum)

    set_wait_check(leave)
    leave()


def names_model(argv: Sequence[str]) -> bool:
    """Return whether the arguments name an experiment or a model."""
    return any(word.lstrip("+").startswith(("experiment=", "model.path=")) for word in argv)


def add_default_experiment(argv: list[str]) -> list[str]:
    """Prepend `experiment=quickstart`, which runs on any machine, unless an experiment or a model is named."""
    return argv if names_model(argv) else ["experiment=quickstart", *argv]


def is_known_override(argument: str) -> bool:
    """Return whether an override sets a key or a group that exists."""
    try:
        check_overrides([argument])
    except ValueError:
        return False
    return True


def check_overrides(argv: Sequence[str]) -> list[str]:
    """Check the key of each override, and return the arguments as Hydra takes them.

    Keys inside free-form sections (sglang, megatron, arguments of plug-ins), and such sections as a whole, get Hydra's `++`
    (add or override). Raises ValueError for an unknown key, with the nearest known key.
    """
    parser = OverridesParser.create()
    return [_check_override(word, parser) if "=" in word and not word.startswith("-") else word for word in argv]


def _check_override(argument: str, parser: OverridesParser) -> str:
    try:
        parsed = parser.parse_override(argument)
        key, value = parsed.key_or_group, parsed.value()
    except HydraException as error:
        raise ValueError(f"{argument!r} cannot be parsed: {str(error).splitlines()[0]}") from None
    if (CONF / key).is_dir() or key.split(".")[0] == "hydra" or key.startswith("hydra/"):
        return argument
    if not is_known(key):
        raise ValueError(unknown_key_message(key))
    refuse_plain_secrets({key: value})  # before Hydra writes the overrides to a file
    is_free_form = (key not in known_keys() or isinstance(value, dict)) and not argument.startswith(("+", "~"))
    return f"++{argument}" if is_free_form else argument


def override_key(line: str) -> str:
    """Return the key of an override: a.b for `++a.b=1`."""
    return line.lstrip("+").split("=")[0]


def is_override_to(line: str, key: str, value: str) -> bool:
    """Return whether an override sets `key` to `value`; quotes are ignored."""
    return override_key(line) == key and line.partition("=")[2].strip("'\"") == value


def format_override(key: str, value: object) -> str:
    """Return `key=value` in Hydra's grammar; the value is quoted if it has special characters."""
    text = str(value)
    return f"{key}={text if _PLAIN_VALUE.fullmatch(text) else QuotedString(text, Quote.double).with_quotes()}"
