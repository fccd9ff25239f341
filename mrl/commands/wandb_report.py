"""`mrl wandb-report`: saves a wandb workspace with the sections of docs/reference/metrics.md, in the same order."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from mrl.checkpoint.run_dir import read_run_record
from mrl.core import metrics
from parallel.durable_files import write_file

LAST_LINES = 100  # metric names are read from this number of lines at the end of metrics.jsonl and of eval.jsonl


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mrl wandb-report`."""
    top = argparse.ArgumentParser(
        prog="mrl wandb-report",
        description="Save a workspace in the wandb project of a run. The workspace has a section for each area of the run's "
        "metrics, in the order of docs/reference/metrics.md, with one plot for each metric.",
        epilog="Example: mrl wandb-report outputs/quickstart/TIME --json workspace.json",
    )
    top.add_argument("run", metavar="RUN", help="run directory, as PATH or as run.dir=PATH")
    top.add_argument("--entity", help="user or team in wandb (default: tracking.entity of the run)")
    top.add_argument(
        "--json", type=Path, metavar="FILE", help="write the specification to a file; save nothing in wandb"
    )
    return top


def metric_names(run_dir: Path) -> list[str]:
    """Return the names of the metrics in the last LAST_LINES lines of metrics.jsonl and of eval.jsonl.

    Raises ValueError if there are none.
    """
    names: dict[str, None] = {}
    for path in (run_dir / "metrics.jsonl", run_dir / "eval.jsonl"):
        for line in (path.read_bytes().splitlines() if path.exists() else [])[-LAST_LINES:]:
            try:
                names |= dict.fromkeys(orjson.loads(line))
            except orjson.JSONDecodeError:  # the run may be writing the last line
                continue
    names.pop("step", None)
    if not names:
        raise ValueError(f"{run_dir} has no metrics: expected the run directory of `mrl train`, after its first step.")
    return list(names)


def workspace(names: list[str], *, entity: str, project: str) -> Any:
    """Return a workspace of wandb_workspaces with one section for each area of the metrics `names`."""
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    sections = [
        workspaces.Section(
            name=title,
            panels=[
                panels.LinePlot(title=f"{name} ({metrics.find(name).meaning})", x="Step", y=[name]) for name in members
            ],
            is_open=number < 2,
        )
        for number, (title, members) in enumerate(metrics.in_sections(names).items())
    ]
    return workspaces.Workspace(entity=entity, project=project, name=f"mrl: {project}", sections=sections)


def main(argv: list[str]) -> int:
    """Entry point of `mrl wandb-report`. Returns the exit status."""
    args = parser().parse_args(argv)
    try:
        message = _report(Path(args.run.removeprefix("run.dir=")), args)
    except ValueError as error:
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    sys.stdout.write(message)
    return 0


def _report(run_dir: Path, args: argparse.Namespace) -> str:
    """Save the workspace, and return a message. Raises ValueError for a mistake of the user."""
    if find_spec("wandb_workspaces") is None:
        raise ValueError(
            "the package wandb-workspaces is not installed; install it with `pip install wandb-workspaces`."
        )
    names = metric_names(run_dir)
    tracking = ((read_run_record(run_dir) or {}).get("config") or {}).get("tracking") or {}
    entity, project = args.entity or tracking.get("entity"), tracking.get("project", "mrl")
    if args.json:
        view = workspace(names, entity=entity or "entity", project=project)._to_model()
        write_file(args.json, view.model_dump_json(by_alias=True, exclude_none=True, indent=1))
        return f"specification of the workspace: {args.json}\n"
    if not entity:
        raise ValueError("the run has no tracking.entity; use --entity to name the user or team that owns the project.")
    try:
        saved = workspace(names, entity=entity, project=project).save()
    except Exception as error:  # wandb raises errors of many types
        raise ValueError(
            f"wandb did not save the workspace of {entity}/{project}: {type(error).__name__}: {error}. Check `wandb login` and "
            "--entity, or use --json FILE."
        ) from error
    return f"workspace: {saved.url}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
