"""Hydra around the commands that take a config: groups, overrides, `--cfg job`, `--multirun`."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from mrl.config import Config, from_hydra, is_known, known_keys, unknown_key_message

CONF = Path(__file__).resolve().parent.parent.parent / "conf"


def run(argv: list[str], job: Callable[[Config], None]) -> int:
    """Compose the config from `argv` and run `job` on it (once per point of a sweep); returns the exit status."""
    if not CONF.is_dir():
        raise SystemExit(f"mrl: the config folder {CONF} is missing; install with `pip install -e .` from a checkout.")
    argv = with_default_experiment(argv)
    try:
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
        except ValueError as error:
            refuse(error)
        job(config)

    sys.argv = [sys.argv[0], *argv]
    app()
    return 0


def register_schema() -> None:
    """Let the yaml files build on every key of mrl.config with its default."""
    schema = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
    ConfigStore.instance().store(name="base_config", node=schema)


def refuse(error: ValueError) -> NoReturn:
    """End with the message of a mistake in the user's input, no traceback."""
    sys.stderr.write(f"mrl: {error}\n")
    raise SystemExit(2)


def _end(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)  # unwinds the stack, so that every process is ended


def with_default_experiment(argv: list[str]) -> list[str]:
    """Add `experiment=quickstart` where no experiment is named and there is no GPU to do more."""
    named = any(a.lstrip("+").startswith("experiment=") for a in argv)
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    return argv if named or has_gpu else [*argv, "experiment=quickstart"]


def checked(argv: list[str]) -> list[str]:
    """`argv` with every override's key checked; raises ValueError at one that nothing reads, with the nearest that exists.

    Keys inside free-form sections (sglang, megatron, arguments of plug-ins) get Hydra's `++`: they are set, written or not.
    """
    parser = OverridesParser.create()
    return [_checked(a, parser) if "=" in a and not a.startswith("-") else a for a in argv]


def _checked(argument: str, parser: OverridesParser) -> str:
    key = parser.parse_override(argument).key_or_group
    if (CONF / key).is_dir() or key.split(".")[0] == "hydra" or key.startswith("hydra/"):
        return argument
    if not is_known(key):
        raise ValueError(unknown_key_message(key))
    free = key not in known_keys() and not argument.startswith(("+", "~"))
    return f"++{argument}" if free else argument
