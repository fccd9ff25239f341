"""The key cluster.ray: settings of Ray's nodes and of the driver, named like the arguments of ray.init.

A run on this machine passes all settings to ray.init. A Slurm job passes the settings of the nodes to `ray start` on every node,
and the settings of the driver to ray.init. Names and types are read from Ray's source, because importing Ray takes a second.
"""

import ast
import difflib
import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MIN_STORE_BYTES = 75 * 1024**2  # smallest object store that Ray accepts

DRIVER_SETTINGS = ("configure_logging", "logging_level", "logging_format", "log_to_driver", "namespace")
"""Settings of the driver. All other settings are settings of the nodes."""
_DASHBOARD = "mrl starts no dashboard of Ray; `mrl top` shows the processes of a run"
RESERVED: dict[str, str] = {
    "address": "use cluster.address",
    "num_cpus": "mrl gives Ray one CPU for each process of the run; remove it",
    "num_gpus": "Ray uses the GPUs that CUDA_VISIBLE_DEVICES names, and a Slurm job those of cluster.gpus_per_node; remove it",
    "local_mode": "mrl never runs trainer ranks and workers inside the driver's process; remove it",
    "ignore_reinit_error": "a run calls ray.init only once; remove it",
    "include_dashboard": _DASHBOARD,
    "dashboard_host": _DASHBOARD,
    "dashboard_port": _DASHBOARD,
    "proxy_server_url": _DASHBOARD,
    "job_config": "mrl sets it, so that the processes import mrl from the driver's checkout; remove it",
    "runtime_env": "mrl sets it; the processes of a run inherit the environment of the driver, or of `ray start`",
    "temp_dir": "use the environment variable RAY_TMPDIR (docs/troubleshooting.md)",
    "node_ip_address": "a run on this machine uses the loopback interface, and a Slurm job that of MRL_INTERFACE; remove it",
    "node_name": "mrl sets the name of the Slurm node; remove it",
    "metrics_export_port": "mrl chooses a free port; remove it",
    "system_config": "set the environment variable RAY_NAME for the setting NAME",
    "enable_object_reconstruction": "Ray cannot compute mrl's objects again; mrl repeats the step instead; remove it",
    "driver_object_store_memory": "Ray ignores it; use object_store_memory",
    "redis_username": "mrl's clusters have no Redis; remove it",
    "redis_password": "mrl's clusters have no Redis; remove it",
    "skip_env_hook": "it is an internal setting of Ray; remove it",
}
"""Argument of ray.init that a user cannot set -> the reason, or what a user must do instead."""
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "Dict[str, float]": (dict,), "Dict[str, str]": (dict,)
}  # fmt: skip


def _function(file: str, name: str) -> ast.FunctionDef:
    """Return the syntax tree of a function of Ray. `file`: path of its file in Ray's folder."""
    spec = find_spec("ray")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("ray is not installed here; install the locked requirements (README).")
    tree = ast.parse(Path(spec.submodule_search_locations[0], file).read_text())
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


@cache
def init_parameters() -> dict[str, str]:
    """Return a dict: name of an argument of ray.init, without a leading underscore -> type annotation of the argument.

    The dict includes the arguments that ray.init reads from **kwargs.
    """
    init = _function("_private/worker.py", "init")
    found = {
        arg.arg: ast.unparse(arg.annotation or ast.Constant("")) for arg in (*init.args.args, *init.args.kwonlyargs)
    }
    for node in init.body:
        if isinstance(node, ast.AnnAssign) and (
            name := re.match(r"kwargs\.pop\('(\w+)'", ast.unparse(node.value or node))
        ):
            found[name[1].removeprefix("_")] = ast.unparse(node.annotation)
    return found


@cache
def _underscored() -> frozenset[str]:
    """Return the arguments of ray.init whose names begin with an underscore, without the underscore."""
    return frozenset(re.findall(r"kwargs\.pop\(\s*'_(\w+)'", ast.unparse(_function("_private/worker.py", "init"))))


@cache
def start_options() -> frozenset[str]:
    """Return the options of `ray start`, with _ in place of -."""
    return frozenset(arg.arg for arg in _function("scripts/scripts.py", "start").args.args)


def check_ray_settings(settings: Mapping[str, Any], *, slurm: bool, address: str | None) -> None:
    """Raise ValueError if a setting in cluster.ray has a wrong value, is unknown to Ray, is set by mrl, or has no effect.

    `slurm`: whether the run is a Slurm job. `address`: the key cluster.address.
    """
    known = init_parameters() if settings else {}
    for name, value in settings.items():
        key = f"cluster.ray.{name}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            only_start = name in start_options()
            hint = "it is an option of `ray start` alone; use MRL_RAY_OPTIONS (docs/tutorials/slurm.md)."
            hint = (
                hint
                if only_start
                else f"did you mean cluster.ray.{near[0]}?"
                if near
                else "see the arguments of ray.init."
            )
            raise ValueError(f"{key} is not an argument of ray.init; {hint}")
        if name in RESERVED:
            raise ValueError(f"{key}={value!r} cannot be set: {RESERVED[name]}.")
        _check_value(key, value, known[name])
        if name in DRIVER_SETTINGS:
            continue
        if address and not slurm:
            raise ValueError(
                f"{key}={value!r}: applies only where Ray is started, but the cluster at cluster.address={address} runs already; "
                "give this setting to `ray start`."
            )
        if slurm and re.search(r"[\s*?\[]", _start_value(name, value)):
            raise ValueError(f"{key}={value!r}: in a Slurm job, expected a value without spaces and without * ? and [.")


def _check_value(key: str, value: Any, annotation: str) -> None:
    """Raise ValueError if a value does not have the type of Ray's argument, or is outside the bounds of the argument."""
    name, inner = key.rpartition(".")[2], annotation.removeprefix("Optional[")
    inner = inner.removesuffix("]") if inner != annotation else inner
    if inner not in _TYPES:
        raise ValueError(f"{key}={value!r} cannot be set: a config cannot express the type {annotation}; remove it.")
    if name == "logging_level" and isinstance(value, str):
        if value.upper() not in logging.getLevelNamesMapping():
            raise ValueError(f"{key}={value!r}: expected the name of a level, such as INFO or WARNING.")
    elif not isinstance(value, _TYPES[inner]) or (isinstance(value, bool) and inner != "bool"):
        raise ValueError(f"{key}={value!r}: expected {'a mapping' if 'Dict' in inner else inner}.")
    if name == "object_store_memory" and value < MIN_STORE_BYTES:
        raise ValueError(f"{key}={value}: expected bytes, at least {MIN_STORE_BYTES} (75 MiB).")
    if name in ("object_spilling_directory", "plasma_directory") and not value.startswith("/"):
        raise ValueError(f"{key}={value!r}: expected an absolute path, which is a folder of each node.")


def init_arguments(settings: Mapping[str, Any], *, connect: bool) -> dict[str, Any]:
    """Return arguments for ray.init. If `connect`, Ray is already started, and only the settings of the driver are returned."""
    chosen = {name: value for name, value in settings.items() if name in DRIVER_SETTINGS or not connect}
    return {f"_{name}" if name in _underscored() else name: value for name, value in chosen.items()}


def start_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Return the options of `ray start` for the settings of nodes."""
    options = []
    for name, value in settings.items():
        if name in DRIVER_SETTINGS or value is False:
            continue
        text = _start_value(name, value)
        options.append(f"--{name.replace('_', '-')}{f'={text}' if value is not True else ''}")
    return options


def _start_value(name: str, value: Any) -> str:
    """Return a value in the syntax of `ray start`."""
    if name == "labels":
        return ",".join(f"{label}={text}" for label, text in value.items())
    return json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)
