"""`mrl plan`: predicts memory, placement and weight transfer of a run. It starts no process and needs no GPU."""

import json
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mrl.commands import plan_rollout, plan_search
from mrl.config import hydra_entry
from mrl.config.process_schema import Transport
from mrl.config.schema import Config
from mrl.controller.memory_check import MemoryAdvice, MemoryEstimator, advise
from mrl.controller.plan_adapters import AdapterPush
from mrl.controller.plan_models import check_planned_transport
from mrl.controller.plan_tools import plan_placement, plan_sync
from mrl.placement.device_map import DeviceMap, draw_device_map, planned_device_map, render_device_map, summarize
from mrl.placement.resource_pools import pluralize, slots_per_node
from mrl.planner.run_memory import GIB, GpuPhase, RunMemory
from mrl.weight_sync.transfer_plan import (
    LinkSpeeds,
    RankTraffic,
    TransferCost,
    estimate_transfer_cost,
    forwarded_bytes,
    sent_bytes,
)

USAGE = """usage: mrl plan [memory|sync|placement] [KEY=VALUE ...] [--json]
       mrl plan rollout ...   (mrl plan rollout --help)
       mrl plan search ...    (mrl plan search --help)

Predicts what a run of `mrl train` with the same keys needs. Starts no process and needs no GPU. Takes the keys of `mrl train` and
the keys of the section `plan`. It reads config.json of the model; sync and placement also read the headers of the weight files.

`mrl plan` without a subcommand checks the parallel layout, and then prints the placement and the memory. The exit status is 1 if
the run does not fit in memory.
  mrl plan model.path=Qwen3-30B-A3B cluster=h100 parallel.tp=4 parallel.ep=8 parallel.etp=1 parallel.world_size=16

memory: prints the memory of each GPU in each phase, the KV cache, host memory and disk. If the run does not fit, it also prints
changes that make it fit (docs/how_to/out_of_memory.md).
  mrl plan memory model.path=Qwen3-8B cluster=h100 parallel.tp=4 parallel.dp=2 rollout.num_engines=8 placement=colocated
  mrl plan memory experiment=gsm8k model.path=Qwen3-8B cluster=a100 cluster.nodes=2 --json

  cluster=a100|h100|h200|b200                 hardware of the cluster; cluster.hardware.* describes other hardware
  plan.reserve_gb                             GPU memory (GiB) that each process needs for CUDA, NCCL and fragmentation
  plan.prompt_tokens                          length of a typical prompt. Default: data.max_prompt_tokens if set, otherwise
                                              rollout.max_response_tokens
  plan.expert_imbalance                       tokens on the busiest expert-parallel rank, divided by the mean over all ranks

placement: prints for each GPU its processes, the roles that share it, and when it is idle (docs/concepts/placement.md).
  mrl plan placement model.path=Qwen3-0.6B parallel.tp=4 parallel.dp=2 rollout.num_engines=8
  mrl plan placement model.path=Qwen3-0.6B parallel.dp=8 rollout.num_engines=8 placement=colocated plan.picture=gpus.png

  cluster.gpus_per_node                       GPUs of one node. Default: 8.
  plan.picture                                PNG file into which the placement is drawn

sync: prints how many bytes and messages each rank sends or receives in a weight sync, and the predicted seconds. Also prints the
ratio of all received bytes to the bytes of the engines' weights, and the bytes that travel inside and between nodes.
  mrl plan sync model.path=Qwen3-0.6B parallel.tp=2 parallel.dp=4 rollout.num_engines=4 rollout.engine_tp=2
  mrl plan sync experiment=quickstart plan.weight_sync_gb_per_s=45

  plan.weight_sync_gb_per_s                   bandwidth of one rank (GB/s)
  plan.message_us                             latency of one message (microseconds)
"""

COLUMNS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "saved",
    "working": "work",
    "kv cache": "kv",
    "engine's weights": "engine",
    "buckets": "buckets",
    "reserve": "other",
}
"""Part of the GPU memory -> heading of its column in the table."""
BAR_WIDTH = 10  # characters of the bar that shows how full a GPU is


def _console(width: int = 100) -> Console:
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def _device_map(config: Config, weights: bool = True) -> DeviceMap:
    """Return the planned processes of each GPU. If `weights` is False, only config.json is read from each model's folder."""
    pools = plan_placement(config, weights)
    check_planned_transport(config, pools)
    return planned_device_map(pools, slots_per_node(config.cluster, pools), config.cluster.nodes or 0)


def explain_everything(config: Config, as_json: bool = False) -> None:
    """Print the placement and the memory of a run. Exit with status 1 if the run does not fit in memory.

    With `as_json`, print only the memory.
    """
    if not as_json:
        with hydra_entry.exit_on_user_error():
            devices = _device_map(config, weights=False)
        _console().print(render_device_map(devices))
    explain_memory(config, as_json)


def explain_placement(config: Config, as_json: bool = False) -> None:
    """Print which process runs on which GPU. If plan.picture is set, also draw the placement into a PNG file."""
    with hydra_entry.exit_on_user_error():
        devices = _device_map(config)
    _console().print(render_device_map(devices))
    if config.plan.picture:
        path = Path(config.plan.picture)
        draw_device_map(path, devices, title=f"{config.run.name}: {summarize(devices)}")
        sys.stdout.write(f"the placement is drawn in {path}\n")


def explain_sync(config: Config, as_json: bool = False) -> None:
    """Print how many bytes each trainer rank sends, and each engine rank receives, in a weight sync."""
    with hydra_entry.exit_on_user_error():
        sync = plan_sync(config)
    shared = config.weight_sync.transport == Transport.shared_memory
    gb_per_s = config.plan.weight_sync_gb_per_s
    speeds = LinkSpeeds(gb_per_s, gb_per_s, config.plan.message_us)
    model = sync.model
    if sync.adapters is not None:
        show_adapter_push(sync.adapters, sync.transfers.sent_bytes, gb_per_s)
        return
    cost = estimate_transfer_cost(sync.transfers, model.dims.world_size, speeds, shared, sync.steps)
    how = "written once and read by every engine on the machine" if shared else "sent to each engine rank"
    if sync.engine_hosts is not None:
        inside, between = sent_bytes(sync.transfers, sync.hosts, sync.engine_hosts)
        how = f"sent to each engine rank ({inside:,} bytes inside nodes, {between:,} bytes between nodes)"
    if sync.steps is not None:
        inside, between = forwarded_bytes(sync.steps, sync.hosts)
        how = (
            f"passed on by trainer ranks ({inside:,} bytes inside nodes, {between:,} bytes between nodes), and are then read by "
            "each engine rank from the trainer rank on its own GPU"
        )
    show_transfer_cost(cost, f"{model.model_path} over {model.dims}", how)


def show_adapter_push(push: AdapterPush, merged_bytes: int, gb_per_s: float) -> None:
    """Print how many bytes a push of LoRA adapters has. `merged_bytes`: bytes of a push of all weights, for comparison."""
    _console().print(
        f"{push.nbytes:,} bytes: trainer rank 0 writes {push.num_matrices:,} matrices of LoRA adapters to a folder in run.dir, "
        f"which each of {push.num_readers} engine ranks reads; weight_sync.lora=merged would send {merged_bytes:,} bytes\n"
        f"predicted {2 * push.nbytes / (gb_per_s * 1e9):.4f} s to write and to read them"
    )


def show_transfer_cost(cost: TransferCost, title: str, how: str) -> None:
    """Print a table of ranks, and the totals. `how`: the way in which the weights reach the engines."""
    table = Table("rank", title=title, title_justify="left")
    for column in ("bytes", "messages", "seconds"):
        table.add_column(column, justify="right")
    for side in (cost.senders, cost.receivers):
        for traffic in [*side, _slowest(side)]:
            table.add_row(traffic.rank, f"{traffic.bytes:,}", f"{traffic.messages:,}", f"{traffic.seconds:.4f}")
        table.add_section()
    console = _console()
    console.print(table)
    console.print(
        f"{cost.sent_bytes:,} bytes are {how}; the engines' weights have {cost.min_bytes:,} bytes; ratio {cost.ratio:.4f}\n"
        f"predicted {cost.seconds:.4f} s; the busiest sender sends {cost.imbalance:.3f} times the mean"
    )


def _slowest(side: list[RankTraffic]) -> RankTraffic:
    """Return a table row for the slowest rank of `side`, which is a list of all senders or of all receivers."""
    slowest = max(side, key=lambda traffic: traffic.seconds if traffic.seconds < inf else 0)
    return RankTraffic(f"  slowest: {slowest.rank}", slowest.bytes, slowest.messages, slowest.seconds)


def explain_memory(config: Config, as_json: bool = False) -> None:
    """Print the memory of a run. If the run does not fit, print changes that make it fit, and exit with status 1."""
    with hydra_entry.exit_on_user_error():
        estimator = MemoryEstimator.of(config)
        memory = estimator.estimate(config)
        changes = [] if memory.fits else advise(config, estimator.estimate)
    if as_json:
        alternatives = [dict(overrides=change.overrides, **change.memory.as_json()) for change in changes]
        sys.stdout.write(json.dumps(memory.as_json() | dict(alternatives=alternatives), indent=1) + "\n")
    else:
        console = _console(150)
        show_memory(memory, estimator, console)
        show_verdict(memory, changes, console)
    if not memory.fits:
        raise SystemExit(1)


def show_memory(memory: RunMemory, estimator: MemoryEstimator, console: Console) -> None:
    """Print the models, a table of GPU memory by phase, and lines for KV cache, experts, host memory and disk."""
    hardware = estimator.config.cluster.hardware
    for role, model in estimator.models.items():
        billions = estimator.shapes[role].num_parameters / 1e9
        console.print(f"{role}: {model.model_path}, {billions:.2f} billion parameters, over {model.dims}")
    gpus = f"{pluralize(memory.gpus, 'GPU')} on {pluralize(memory.nodes, 'node')}"
    unknown = f"{gpus}; the hardware is unknown, set cluster=h100 (or a100, h200, b200)"
    console.print(f"{gpus} of {hardware.name}" if hardware.name else unknown)
    console.print(_phase_table(memory))
    if memory.engine:
        responses = memory.engine.tokens // max(1, memory.longest_sequence)
        console.print(
            f"engines: {memory.engine.token_bytes:,} bytes of KV cache for each token; each engine has room for "
            f"{memory.engine.tokens:,} tokens, or {responses:,} responses of {memory.longest_sequence:,} tokens with the prompt"
        )
    if memory.worst_expert_bytes:
        console.print(
            f"experts: the busiest rank is assumed to have {estimator.config.plan.expert_imbalance:g} times the mean number of "
            f"tokens; if all tokens were on one rank, that rank would need {memory.worst_expert_bytes / GIB:.1f} GiB more"
        )
    parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in vars(memory.host).items() if value)
    limit = f" of {memory.host_limit / GIB:.0f}" if memory.host_limit else ""
    console.print(f"host memory of a node: {memory.host.total / GIB:.1f}{limit} GiB ({parts})")
    console.print(f"disk: {memory.disk_bytes / GIB:.1f} GiB at most for checkpoints")


def show_verdict(memory: RunMemory, changes: list[MemoryAdvice], console: Console) -> None:
    """Print whether the run fits. If it does not fit, print the problems and the changes that make it fit."""
    if memory.fits:
        known = any(phase.limit for phase in memory.phases)
        unknown = "GPU memory is unknown, so it was not checked; set cluster=h100 or cluster.hardware.gpu_memory_gb."
        console.print("It fits." if known else unknown)
        return
    console.print("[bold]It does not fit:[/bold]")
    for problem in memory.problems:
        console.print(f"  {problem}")
    if not changes:
        console.print(
            "No change of layout, recomputation, token budget or engines makes it fit; use more or larger GPUs."
        )
        return
    console.print("It would fit with:")
    for change in changes:
        peak = max(phase.total for phase in change.memory.phases) / GIB
        console.print(
            f"  {' '.join(change.overrides)}   -> {peak:.1f} GiB at most, on {pluralize(change.memory.gpus, 'GPU')}"
        )


def _phase_table(memory: RunMemory) -> Table:
    columns = {part: name for part, name in COLUMNS.items() if any(part in phase.parts for phase in memory.phases)}
    several_stages = len({phase.rank for phase in memory.phases}) > 1
    table = Table(title="GiB on one GPU, for the rank that needs most", title_justify="left")
    for name in ("pool", "role", "phase", *(["rank"] if several_stages else [])):
        table.add_column(name, no_wrap=True)
    for name in (*columns.values(), "total"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of the GPU", no_wrap=True)
    for phase in memory.phases:
        cells = [phase.pool, phase.role, phase.phase, *([phase.rank] if several_stages else [])]
        cells += [_gib(phase.parts.get(part)) for part in columns]
        table.add_row(*cells, _gib(phase.total), _bar(phase), style=None if phase.fits else "bold red")
    return table


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.1f}"


def _bar(phase: GpuPhase) -> str:
    if not phase.limit:
        return ""
    fraction = phase.total / phase.limit
    full = min(BAR_WIDTH, round(fraction * BAR_WIDTH))
    return f"{'█' * full}{'·' * (BAR_WIDTH - full)} {fraction:.0%}"


# Subcommand -> its function, which takes the config and whether to print JSON
KINDS: dict[str, Callable[[Config, bool], None]] = {
    "": explain_everything,
    "memory": explain_memory,
    "placement": explain_placement,
    "sync": explain_sync,
}
KINDS_WITH_JSON = ("", "memory")


def main(argv: list[str]) -> int:
    """Entry point of `mrl plan`."""
    if argv and argv[0] == "rollout":
        return plan_rollout.main(argv[1:])  # this subcommand has its own keys and reads no config
    if argv and argv[0] == "search":
        return plan_search.main(argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if not argv:
        sys.stderr.write(USAGE)
        return 2
    kind, words = ("", argv) if "=" in argv[0] or argv[0].startswith("-") else (argv[0], argv[1:])
    if kind not in KINDS:
        expected = " or ".join((*filter(None, KINDS), "rollout", "search"))
        sys.stderr.write(f"mrl plan: unknown subcommand {kind!r}; expected {expected}\n")
        return 2
    as_json = "--json" in words
    if as_json and kind not in KINDS_WITH_JSON:
        sys.stderr.write(f"mrl plan {kind}: only `mrl plan` and `mrl plan memory` support --json\n")
        return 2
    overrides = [word for word in words if word != "--json"]
    return hydra_entry.run(
        [*overrides, *hydra_entry.NO_OUTPUT_FILES],
        lambda config: KINDS[kind](config, as_json),
        USAGE,
        weights=kind in ("sync", "placement"),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
