"""`mrl plan memory`: what every role of a run holds on its GPUs, machines and disk, and whether it fits."""

import json
import sys

from rich.console import Console
from rich.table import Table

from mrl.commands import hydra_app
from mrl.config.schema import Config
from mrl.controller.memory_check import Counted
from mrl.planner.memory_advice import Change, advice
from mrl.planner.run_memory import GIB, Moment, RunMemory

COLUMNS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "saved",
    "working": "work",
    "kv cache": "kv",
    "engine's weights": "engine",
    "buckets": "buckets",
    "context": "other",
}
"""Parts of a moment, and the words above them."""
BAR = 10  # characters


def memory(config: Config, as_json: bool = False) -> None:
    """Print the memory of the run, and what would fit where it does not; ends with status 1 then."""
    with hydra_app.as_user_error():
        counted = Counted.of(config)
        found = counted.memory(config)
        changes = [] if found.fits else advice(config, counted.memory)
    if as_json:
        instead = [dict(overrides=change.overrides, **change.memory.as_json()) for change in changes]
        sys.stdout.write(json.dumps(found.as_json() | dict(instead=instead), indent=1) + "\n")
    else:
        show(found, counted, changes, Console(width=None if sys.stdout.isatty() else 150, highlight=False))
    if not found.fits:
        raise SystemExit(1)


def show(found: RunMemory, counted: Counted, changes: list[Change], console: Console) -> None:
    """Tables of moments, machines and the disk, then the verdict."""
    hardware = counted.config.cluster.hardware
    for role, model in counted.models.items():
        billions = counted.shapes[role].num_parameters / 1e9
        console.print(f"{role}: {model.model_path}, {billions:.2f} billion parameters, over {model.dims}")
    named = f"{found.gpus} GPUs on {found.nodes} node{'s' * (found.nodes > 1)}"
    console.print(
        f"{named} of {hardware.name}" if hardware.name else f"{named}; cluster=h100 and the like say what one has"
    )
    console.print(_moments(found))
    if found.engine:
        holds = found.engine.tokens // max(1, found.sequence)
        console.print(
            f"engines: {found.engine.token:,} bytes of KV cache for each token; room for {found.engine.tokens:,} tokens, "
            f"{holds:,} responses of {found.sequence:,} tokens with their prompts"
        )
    if found.worst_experts:
        console.print(
            f"experts: counted with {counted.config.plan.expert_imbalance:g} times the mean on the busiest rank; were all tokens "
            f"sent to one rank, it would need {found.worst_experts / GIB:.1f} GiB more"
        )
    parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in vars(found.host).items() if value)
    limit = f" of {found.host_limit / GIB:.0f}" if found.host_limit else ""
    console.print(f"host memory of a node: {found.host.total / GIB:.1f}{limit} GiB ({parts})")
    console.print(f"disk: {found.disk / GIB:.1f} GiB of checkpoints at most")
    _verdict(found, changes, console)


def _verdict(found: RunMemory, changes: list[Change], console: Console) -> None:
    if found.fits:
        known = any(moment.limit for moment in found.moments)
        console.print(
            "It fits." if known else "Nothing says what a GPU has; add cluster=h100, or cluster.hardware.gpu_memory_gb."
        )
        return
    console.print("[bold]It does not fit:[/bold]")
    for problem in found.problems:
        console.print(f"  {problem}")
    if not changes:
        console.print(
            "No change to layout, recomputation, tokens or engines makes it fit; it needs more or larger GPUs."
        )
        return
    console.print("What would fit, by the same account:")
    for change in changes:
        peak = max(moment.total for moment in change.memory.moments) / GIB
        console.print(f"  {' '.join(change.overrides)}   -> {peak:.1f} GiB at most, on {change.memory.gpus} GPUs")


def _moments(found: RunMemory) -> Table:
    used = {part: word for part, word in COLUMNS.items() if any(part in moment.parts for moment in found.moments)}
    stages = len({moment.where for moment in found.moments}) > 1
    table = Table(title="GiB of one GPU, that of the rank that needs most", title_justify="left")
    for name in ("pool", "at work", "phase", *(["rank"] if stages else [])):
        table.add_column(name, no_wrap=True)
    for name in (*used.values(), "total"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of the GPU", no_wrap=True)
    for moment in found.moments:
        cells = [moment.pool, moment.role, moment.phase, *([moment.where] if stages else [])]
        cells += [_gib(moment.parts.get(part)) for part in used]
        table.add_row(*cells, _gib(moment.total), _bar(moment), style=None if moment.fits else "bold red")
    return table


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.1f}"


def _bar(moment: Moment) -> str:
    if not moment.limit:
        return ""
    share = moment.total / moment.limit
    full = min(BAR, round(share * BAR))
    return f"{'█' * full}{'·' * (BAR - full)} {share:.0%}"
