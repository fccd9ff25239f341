"""Entry point of all commands that take config keys: Hydra composes the config from conf/ and from the command line.

If Hydra cannot compose the config, the command prints the mistake in one line. If a file of a config group is wrong, this line
begins with the file and the line number.
"""

import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrl.config.input_names import resolve_inputs
from mrl.config.schema import Config
from mrl.config.search_path import (
    config_folders,
    group_files,
    group_names,
    own_group_override,
    quote,
    with_absolute_search_path,
)
from mrl.config.secrets import PlainSecretError, authorization, refuse_plain_secrets
from mrl.config.validate import (
    from_hydra,
    is_known,
    known_keys,
    structured_schema,
    type_error_message,
    unknown_key_message,
)
from mrl.core.code_locations import CONF, add_working_directory, environment_variables
from mrl.core.run_errors import StartError, report_error, set_callback_during_waits
from mrl.core.run_warnings import collect_warnings

logger = logging.getLogger(__name__)

NO_OUTPUT_FILES = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra.job_logging.handlers.file.filename=/dev/null"]
"""Overrides for commands that only print, so that Hydra writes no files."""
_COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
OPTIONS = (
    "--help",
    "--hydra-help",
    "--version",
    "--cfg",
    "--resolve",
    "--package",
    "--run",
    "--multirun",
    "--shell-completion",
    "--config-path",
    "--config-name",
    "--config-dir",
    "--experimental-rerun",
    "--info",
    "--dry-run",
)
"""Options of Hydra, and the option --dry-run of mrl."""
_hydra_main_is_running = False  # if true, `_compose` in a sweep uses the Hydra instance of hydra.main


def run(argv: list[str], job: Callable[[Config], Any], usage: str = "", weights: bool = True) -> int:
    """Compose the config from `argv`, call `job` with it, and return the exit status.

    With `--multirun`, Hydra's launcher calls `job` for each run of the sweep.

    Args:
        argv: Overrides of config keys (KEY=VALUE), and options of Hydra.
        job: Function that takes the checked config. In a sweep, `job` returns the metric by which runs are compared.
        usage: Text that --help prints. If `usage` is empty, Hydra prints its own help.
        weights: Whether the job needs the weights of models. If false, only configs and tokenizers are fetched from the Hub.
    """
    if usage and any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(usage)
        return 0
    with exit_on_user_error():
        arguments = prepare_arguments(argv)
    signal.signal(signal.SIGTERM, _raise_system_exit)
    configs: list[Config] = []

    def task(composed: DictConfig) -> Any:
        config = _checked_config(composed, weights)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return job(config)
        configs.append(config)

    try:
        with exit_on_user_error():
            _run_hydra(arguments, task)
        for config in configs:  # called here and not in `task`, so that a traceback has no frames of Hydra
            _run_job(job, config)
    except KeyboardInterrupt:  # the context managers on the stack have already ended all processes
        sys.stderr.write("mrl: interrupted\n")
        return 128 + signal.SIGINT
    return 0


def _run_job(job: Callable[[Config], Any], config: Config) -> None:
    """Call `job`. If it raises an exception, report the error, and end the process with status 1, or 2 for a StartError."""
    logging.raiseExceptions = False  # otherwise a full disk would fill the terminal with tracebacks of logging
    run_dir = Path(config.run.dir)
    try:
        with collect_warnings(run_dir):
            job(config)
    except Exception as error:  # all processes of the run have ended
        sys.stderr.write(f"mrl: {report_error(error, run_dir)}\n")
        raise SystemExit(2 if isinstance(error, StartError) else 1) from None


def prepare_arguments(argv: Sequence[str]) -> list[str]:
    """Check the arguments of a command and complete them for Hydra. Also add the working directory to sys.path.

    Raises ValueError for a wrong argument, or if an engine key (ENGINE_KEY and ENGINE_KEYS in mrl.config.secrets) has
    characters that an HTTP header cannot contain.
    """
    authorization()  # checks the engine keys
    _check_options(argv)
    arguments = check_overrides(add_default_experiment(with_absolute_search_path(argv)))
    add_working_directory()  # so that imports find a user's own rewards, losses and agents
    return arguments


def _check_options(argv: Sequence[str]) -> None:
    """Raise ValueError if `argv` has an option that neither Hydra nor mrl has, such as --trainer.max_steps=3."""
    for word in argv:
        name, has_value, value = word.partition("=")
        if word.startswith("--") and not any(option.startswith(name) for option in OPTIONS):
            key = name.lstrip("-")
            hint = f"write {key}={value if has_value else 'VALUE'}" if is_known(key) else unknown_key_message(key)
            raise ValueError(
                f"{name}: there is no such option, and keys are written without dashes, as KEY=VALUE; {hint}"
            )


def _run_hydra(arguments: Sequence[str], task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra compose the config and call `task` with it. Raises ValueError if the config cannot be composed."""
    register_schema()
    if "--hydra-help" in arguments:
        arguments = ["--hydra-help"]  # for this option, Hydra composes only its own config, without the keys of mrl
    # All options come first, because argparse does not accept an option between two groups of overrides.
    sys.argv = [sys.argv[0], *sorted(arguments, key=_is_override)]
    global _hydra_main_is_running
    _hydra_main_is_running = True
    try:
        with environment_variables({"HYDRA_FULL_ERROR": "1"}):  # Hydra raises its errors instead of printing them
            hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(task)()
    except _COMPOSITION_ERRORS as error:
        raise ValueError(composition_message(error, config_folders(arguments))) from None
    finally:
        _hydra_main_is_running = False


def _checked_config(composed: DictConfig, weights: bool) -> Config:
    """Convert and check the config that Hydra composed, and fetch the models and data that Hub ids and URLs name.

    Ends the process with status 2 if the config is wrong or something cannot be fetched.
    """
    try:
        config = resolve_inputs(from_hydra(composed), weights)
    except PlainSecretError as error:
        _delete_files_of_hydra()
        exit_with_error(error)
    except ValueError as error:
        exit_with_error(error)
    run_dir = HydraConfig.get().runtime.output_dir  # in a sweep, each run has its own folder
    return replace(config, run=replace(config.run, dir=run_dir))


def _delete_files_of_hydra() -> None:
    """Delete the files in which Hydra has saved the config with a secret. Leave all other files of the folder."""
    config = HydraConfig.get()
    if config.output_subdir is None:  # Hydra has written no file
        return
    folder = Path(config.runtime.output_dir, config.output_subdir)
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def register_schema() -> None:
    """Register the typed schema in Hydra's ConfigStore as `base_config`, the first default of conf/config.yaml."""
    ConfigStore.instance().store(name="base_config", node=structured_schema())


def compose_config(overrides: Sequence[str]) -> Config:
    """Compose and check the config without running anything. Raises ValueError for a mistake in the overrides."""
    return from_hydra(_compose(overrides))


def compose_sweeper_params(overrides: Sequence[str]) -> DictConfig:
    """Return the composed `hydra.sweeper.params`: the keys that a file such as conf/sweep/lr_kl.yaml sweeps.

    Raises ValueError if the config cannot be composed.
    """
    return _compose(overrides, return_hydra_config=True).hydra.sweeper.get("params") or OmegaConf.create({})


def _compose(overrides: Sequence[str], return_hydra_config: bool = False) -> DictConfig:
    register_schema()
    with nullcontext() if _hydra_main_is_running else _own_hydra():
        try:
            return compose("config", list(overrides), return_hydra_config)
        except _COMPOSITION_ERRORS as error:
            raise ValueError(composition_message(error, config_folders(overrides))) from None


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Initialize Hydra with mrl's config groups. At the end, restore the Hydra instance of the calling program."""
    other = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = other


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
    if logging.getLogger().handlers:  # the error also goes to mrl.log; is_shown: the terminal already shows it
        logger.error("%s", error, extra=dict(is_shown=True))
    raise SystemExit(2)


def _raise_system_exit(signum: int, frame: object) -> None:
    """Handle SIGTERM: raise SystemExit, so that the context managers on the stack end all processes.

    If the signal arrives while Ray waits, Ray discards the exception. Therefore `leave` also becomes the callback that the
    driver calls repeatedly while it waits (mrl.core.run_errors.set_callback_during_waits), and raises SystemExit again there.
    """

    def leave() -> NoReturn:
        raise SystemExit(128 + signum)

    set_callback_during_waits(leave)
    leave()


def names_model(argv: Sequence[str]) -> bool:
    """Return whether the arguments name an experiment or a model."""
    return any(word.lstrip("+").startswith(("experiment=", "model.path=")) for word in argv)


def add_default_experiment(argv: list[str]) -> list[str]:
    """Prepend `experiment=quickstart`, which runs on any machine, if neither an experiment nor a model is named."""
    return argv if names_model(argv) else ["experiment=quickstart", *argv]


def is_known_override(argument: str) -> bool:
    """Return whether an override sets a key or a group that exists."""
    try:
        check_overrides([argument])
    except ValueError:
        return False
    return True


def check_overrides(argv: Sequence[str]) -> list[str]:
    """Check the key of each override, and return the arguments in the form that Hydra needs.

    Keys in free-form sections (sglang, megatron, arguments of plug-ins) may be new, so their overrides get Hydra's prefix `++`
    (add or override). Overrides that set a whole free-form section get this prefix too. Overrides that select a file of a user's
    own config group get the prefix `+` if Hydra needs it. `hydra.searchpath` in `argv` lists the folders with a user's own
    groups.

    Raises ValueError for an unknown key. The message names the nearest known key.
    """
    parser, folders = OverridesParser.create(), config_folders(argv)
    return [
        _check_override(word, parser, folders) if "=" in word and not word.startswith("-") else word for word in argv
    ]


def _check_override(argument: str, parser: OverridesParser, folders: Sequence[Path]) -> str:
    try:
        parsed = parser.parse_override(argument)
        key, value = parsed.key_or_group, parsed.value()
    except HydraException as error:
        raise ValueError(f"{argument!r} cannot be parsed: {str(error).splitlines()[0]}") from None
    if value is None and any((folder / key).is_dir() for folder in folders):
        names = ", ".join(group_files(key, folders))
        raise ValueError(f"{argument}: a config group cannot be null; expected one of {names}.")
    if (CONF / key).is_dir() or key.split(".")[0] == "hydra" or key.startswith("hydra/"):
        return argument
    if of_own_group := own_group_override(argument, key, folders[1:]):
        return of_own_group
    if not is_known(key):
        raise ValueError(unknown_key_message(key, group_names(folders)))
    refuse_plain_secrets({key: value})  # before Hydra writes the overrides to a file
    is_free_form = (key not in known_keys() or isinstance(value, dict)) and not argument.startswith(("+", "~"))
    return f"++{argument}" if is_free_form else argument


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def override_key(override: str) -> str:
    """Return the key of an override, for example `a.b` for `++a.b=1`."""
    return override.lstrip("+").split("=")[0]


def is_override_to(override: str, key: str, value: str) -> bool:
    """Return whether an override sets `key` to `value`. Quotes around the value are ignored."""
    return override_key(override) == key and override.partition("=")[2].strip("'\"") == value


def format_override(key: str, value: object) -> str:
    """Return the override `key=value` for Hydra. A value with special characters is quoted."""
    return f"{key}={quote(value)}"


_LOCATION = re.compile(r"In '([^']+)':\s*")
_PACKAGE_LINE = re.compile(r"^\s*#\s*@package\s+\S", re.MULTILINE)
_WITHOUT_VALUE = re.compile(r"Error parsing override '(\S+)'\s+missing EQUAL")


def composition_message(error: Exception, folders: Sequence[Path]) -> str:
    """Return an error of Hydra, OmegaConf or yaml as one line.

    If a file of a config group is wrong, the message begins with this file and the line number. `folders`: folders with config
    groups.
    """
    if isinstance(error, yaml.YAMLError):
        return _yaml_message(error)
    if without_value := _WITHOUT_VALUE.search(str(error)):
        return f"{without_value[1]!r} has no value; write KEY=VALUE, as in optim.lr=1e-4."
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    file = _located_file(str(error), folders)
    if not (isinstance(cause, OmegaConfBaseException) and cause.full_key):
        return " ".join(str(error).split()).partition(" Config search path:")[0]
    if file is None:
        return type_error_message(cause)
    group = file.parent.name
    if cause.full_key.split(".")[0] == group and not _PACKAGE_LINE.search(file.read_text()):
        return (
            f"{file}, line 1: the line `# @package` is missing, so the keys of the file are read as {group}.KEY; write as its "
            "first line `# @package _global_` if it sets keys of several sections, or `# @package SECTION` for one section."
        )
    return f"{file}{_line_of(cause.full_key, file)}: {type_error_message(cause)}"


def _yaml_message(error: yaml.YAMLError) -> str:
    if not (isinstance(error, yaml.MarkedYAMLError) and error.problem_mark):
        return " ".join(str(error).split())
    mark, problem = error.problem_mark, f"{error.problem}"
    if "\\t" in problem:
        problem = "a tab; yaml indents with spaces"
    return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {problem}."


def _located_file(message: str, folders: Sequence[Path]) -> Path | None:
    """Return the file that Hydra's message names, such as experiment/mine for "In 'experiment/mine': ..."."""
    named = _LOCATION.match(message)
    files = [folder / f"{named[1]}.yaml" for folder in folders if named and "/" in named[1]]
    return next((file for file in files if file.is_file()), None)


def _line_of(key: str, file: Path) -> str:
    """Return ", line N" for the line of a file that sets the last part of a key, or "" if no line does."""
    name = re.compile(rf"\s*['\"]?{re.escape(key.split('.')[-1])}['\"]?\s*:")
    lines = file.read_text().splitlines()
    return next((f", line {number}" for number, line in enumerate(lines, 1) if name.match(line)), "")
