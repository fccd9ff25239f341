"""Entry point of `mrl COMMAND`. Each command is a module in mrl/commands."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from mrl.core.command_names import COMMANDS

TRAIN_PACKAGES = {
    "train": ("ray", "sglang"),
    "sft": ("ray",),
    "certify": ("ray",),
    "replay": ("ray",),
    "generate": ("sglang",),
    "evaluate": ("sglang",),
}
"""Command -> packages of `pip install mrl[train]` without which the command does not start. Other commands need none of them.

`mrl certify engine` also needs sglang.
"""
ENGINE_FREE = ("evaluate.input=", "rollout.engine_urls=")
"""`mrl generate` and `mrl evaluate` start no engine if one of their arguments begins with one of these texts."""


def missing_packages(command: str, arguments: Sequence[str]) -> list[str]:
    """Return the packages that a command needs and that are not installed."""
    if any(word in ("-h", "--help") for word in arguments):
        return []
    if command in ("generate", "evaluate") and any(word.startswith(ENGINE_FREE) for word in arguments):
        return []
    names = ("ray", "sglang") if command == "certify" and "engine" in arguments else TRAIN_PACKAGES.get(command, ())
    return [name for name in names if find_spec(name) is None]


MODULES = {"import": "import_config", "wandb-report": "wandb_report"}
"""Command -> name of its module, where the two differ: a Python module cannot be named `import` or `wandb-report`."""


def usage() -> str:
    """Return the text of `mrl --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    end = ["mrl COMMAND --help describes a command. mrl --version shows the version.", ""]
    return "\n".join(["usage: mrl COMMAND [ARGUMENTS]", "", *lines, "", *end])


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        sys.stdout.write(f"mrl {version('mrl')}\n")
        return 0
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(COMMANDS)}."
        sys.stderr.write(f"mrl: unknown command {argv[0]!r}; {hint}\n")
        return 2
    if missing := missing_packages(argv[0], argv[1:]):
        sys.stderr.write(f"mrl {argv[0]}: not installed: {', '.join(missing)}; run pip install 'mrl[train]'\n")
        return 2
    module = MODULES.get(argv[0], argv[0])
    command = importlib.import_module(f"mrl.commands.{module}")  # imports only what this command needs
    return command.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
