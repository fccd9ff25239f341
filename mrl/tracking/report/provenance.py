"""Provenance of a run: its changed config keys, starts, hosts and packages, and commands that the user may run next."""

import json
import re
import shlex
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from mrl.config.secrets import redacted
from mrl.config.validate import key_fields, structured_schema
from mrl.tracking.report.recorded_run import RecordedRun

MAIN_PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "numpy", "mrl")  # shown first
PLACE = re.compile(r"\((\S+):(\d+), in (\w+)\)")  # file, line and function of an error in the user's code
MISSING = object()  # value of a key that a config does not have


@cache
def _defaults() -> dict[str, Any]:
    """Return the default of every key of the schema."""
    container = OmegaConf.to_container(structured_schema(), resolve=False, enum_to_str=True)
    return {key: _at(container, key) for key, _ in key_fields()}


def _at(node: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return MISSING
        node = node[part]
    return node


def changed_keys(run: RecordedRun) -> list[dict[str, Any]]:
    """Return {key, value, default, given, meaning} of each key whose value is not the schema's default.

    `given`: whether the command line sets the key. Other changed keys come from the files of config groups.
    """
    given = {word.lstrip("+").partition("=")[0] for word in run.overrides}
    meanings = {key: field.metadata.get("description", "") for key, field in key_fields()}
    found = []
    for key, default in _defaults().items():
        value = _at(run.config, key)
        if value is MISSING or _text(value) == _text(default):
            continue
        is_given = any(word == key or word.startswith(f"{key}.") for word in given)
        found.append(dict(key=key, value=_text(value), default=_text(default), given=is_given, meaning=meanings[key]))
    return sorted(found, key=lambda each: (not each["given"], each["key"]))


def _text(value: Any) -> str:
    if value is MISSING or value == "???":
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def settings(run: RecordedRun) -> dict[str, str]:
    """Return all keys of the run's config with their values as text."""
    values = {key: _at(run.config, key) for key in _defaults()}
    return {key: _text(value) for key, value in redacted(values).items() if value is not MISSING}


def provenance(run: RecordedRun) -> dict[str, Any]:
    """Return everything about the origin of the run, as JSON values."""
    start, packages = run.start, run.packages
    chosen = {name: packages[name] for name in MAIN_PACKAGES if name in packages}
    return {
        "folder": str(run.folder.resolve()),
        "command": command(run),
        "commit": start and start.commit,
        "changed_files": start and start.changed_files,
        "hosts": list(start.hosts) if start else [],
        "packages": chosen | {name: version for name, version in sorted(packages.items()) if name not in chosen},
        "events": [
            {name: getattr(event, name) for name in ("event", "time", "step", "outcome", "error", "commit")}
            for event in run.events
        ],
        "outcome": run.outcome,
        "error": run.error,
        "changed": changed_keys(run),
        "next": next_commands(run),
        "trace": "timeline.json" if (run.folder / "timeline.json").exists() else None,
    }


def command(run: RecordedRun) -> str:
    """Return the command that started the run; "" if it was not recorded."""
    if run.start and run.start.command:
        return run.start.command
    return shlex.join(["mrl", "train", *(word.lstrip("+") for word in run.overrides)]) if run.overrides else ""


def go_on_text(run: RecordedRun) -> str:
    """Return the command that continues the run, or the error that must be corrected first."""
    if run.outcome != "failed" and not run.error:
        return next_commands(run)[0]["command"]
    if place := PLACE.search(run.error):
        file, line, function = place.groups()
        return f"Correct the function {function} in {file}, line {line}. Then start the run again."
    return "Correct the error that the top of this page shows. Then start the run again."


def next_commands(run: RecordedRun) -> list[dict[str, str]]:
    """Return {title, command} of each command that the user may run next. The first command depends on the run's outcome."""
    folder, steps = str(run.folder), run.setting("trainer.max_steps", 0)
    own = [word.lstrip("+") for word in run.overrides]
    replaced = {"run.dir", "trainer.max_steps"} | ({"scoring.rehearse"} if run.error else set())
    replaced |= {"trainer.stop_reward"} if run.reached_goal else set()
    title = "Start the run again, after the error is corrected" if run.error else "Continue the run"
    is_longer = run.outcome == "finished" and not run.reached_goal
    more = [f"trainer.max_steps={2 * steps if is_longer else steps}"] if steps else []
    if run.used_epochs:
        replaced, more = replaced | {"trainer.epochs"}, [*more, f"trainer.epochs={2 * run.setting('trainer.epochs'):g}"]
    own = [word for word in own if word.partition("=")[0] not in replaced]
    more += ["trainer.stop_reward=null"] if run.reached_goal else []
    commands = {
        title: ["train", *own, f"run.dir={folder}", *more],
    }
    if run.samples:
        commands["Read the worst samples"] = ["samples", folder, "--worst"]
    if run.is_running:
        commands["Refresh this page while the run goes on"] = ["report", folder, "--watch"]
    if run.timeline:
        commands["Merge the timeline"] = ["timeline", folder]
    if (run.folder / "hf").is_dir():
        commands["Measure the trained model"] = [
            "evaluate",
            *[word for word in own if word.startswith(("experiment=", "data.", "reward"))],
            f"model.path={folder}/hf",
        ]
    return [{"title": title, "command": shlex.join(["mrl", *words])} for title, words in commands.items()]
