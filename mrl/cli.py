"""`mrl <command>`: one file per command in mrl/commands."""

import importlib
import sys

COMMANDS = {
    "train": "train a model by reinforcement (the default experiment runs on any machine)",
    "sft": "supervised fine-tuning on prompt/response rows",
    "generate": "sample responses to a data set, to parquet",
    "evaluate": "pass@k, maj@k and mean score of a model, with confidence intervals",
    "certify": "check that a parallel layout computes exactly what one process does",
    "replay": "run a kept step again, and name the first layer that differs between layouts or is not finite",
    "plan": "explain what a configuration would do, without starting anything",
    "doctor": "whether this machine, or a job's hosts, are fit for a run; what is wrong, and the command that mends it",
    "convert": "weights between Hugging Face folders and Megatron checkpoints, and whether that is exact",
    "config": "describe the keys of the config: defaults, units, allowed values",
    "data": "make or convert input files",
}


def usage() -> str:
    """The text of `mrl --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: mrl COMMAND [ARGUMENTS]", "", *lines, "", "mrl COMMAND --help says more.", ""])


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        sys.stderr.write(f"mrl: unknown command {argv[0]!r}; expected one of {', '.join(COMMANDS)}\n")
        return 2
    command = importlib.import_module(f"mrl.commands.{argv[0]}")  # only the command that runs pays for its imports
    return command.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
