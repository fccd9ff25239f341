"""`mrl plan KIND`: what a configuration would do, explained without starting anything."""

import sys
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mrl.commands import hydra_app, plan_memory, plan_rollout, plan_search
from mrl.config.schema import Config
from mrl.controller import plan_tools as planning
from mrl.placement import device_map_picture
from mrl.placement.device_map import Layout, imagined
from mrl.placement.resource_pools import slots_per_node
from mrl.weight_sync.transfer_plan import TransferCost, LinkSpeeds, RankTraffic, estimate_transfer_cost

USAGE = """usage: mrl plan [memory|sync|placement] [KEY=VALUE ...] [--json]
       mrl plan rollout ...   (mrl plan rollout --help)
       mrl plan search ...    (mrl plan search --help)

Explains a configuration as `mrl train` would run it. Starts nothing, needs no GPU. The same keys as `mrl train`, and those of
the section `plan`. Of the model's folder it needs config.json; sync and placement also the headers of its files.

Without a kind: the rules of the layout, memory, what a push brings, and on which GPUs everything is. Ends with status 1 where
it does not fit.
  mrl plan model.path=Qwen3-30B-A3B cluster=h100 parallel.tp=4 parallel.ep=8 parallel.etp=1 parallel.world_size=16

memory: bytes of each GPU in each phase, the KV cache, machines and disk; where they do not fit, what would (docs/plan.md)
  mrl plan memory model.path=Qwen3-8B cluster=h100 parallel.tp=4 parallel.dp=2 rollout.num_engines=8 placement=colocated
  mrl plan memory experiment=gsm8k model.path=Qwen3-8B cluster=a100 cluster.nodes=2 --json

  cluster=a100|h100|h200|b200                 what a GPU and a node have; cluster.hardware.* for others
  plan.reserve_gb                             GiB of a GPU that each process keeps besides
  plan.prompt_tokens                          a typical prompt; default: data.max_prompt_tokens, or as long as a response
  plan.expert_imbalance                       tokens that the busiest rank's experts get, over the mean

placement: which process is on which GPU, who shares it by turns, and which GPUs idle meanwhile (docs/placement.md)
  mrl plan placement model.path=Qwen3-0.6B parallel.tp=4 parallel.dp=2 rollout.num_engines=8
  mrl plan placement model.path=Qwen3-0.6B parallel.dp=8 rollout.num_engines=8 placement=colocated plan.picture=gpus.png

  cluster.gpus_per_node                       8 unless set
  plan.picture                                also draw into this PNG

sync: bytes, messages and predicted seconds of every rank when weights go to the engines, and the bytes that arrive over the
least possible (what the engines hold)
  mrl plan sync model.path=Qwen3-0.6B parallel.tp=2 parallel.dp=4 rollout.num_engines=4 rollout.engine_tp=2
  mrl plan sync experiment=quickstart plan.send_gb_per_s=45 plan.receive_gb_per_s=45

  plan.send_gb_per_s, plan.receive_gb_per_s   bandwidth of one rank, GB/s
  plan.message_us                             cost of a message besides its bytes, microseconds
"""


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def sync(config: Config) -> None:
    """Print who sends how much to whom."""
    with hydra_app.as_user_error():
        base, found = planning.plan_sync(config)
    shared = config.weight_sync.transport in ("shared_memory", "cuda_ipc")
    settings = config.plan
    speeds = LinkSpeeds(settings.send_gb_per_s, settings.receive_gb_per_s, settings.message_us)
    show(estimate_transfer_cost(found, base.dims.world_size, speeds, shared), f"{base.model_path} over {base.dims}", shared)


def _imagined(config: Config, weights: bool = True) -> Layout:
    pools = planning.plan_placement(config, weights)
    return imagined(pools, slots_per_node(config.cluster, pools))


def placement(config: Config) -> None:
    """Print, and perhaps draw, which process is on which GPU."""
    with hydra_app.as_user_error():
        layout = _imagined(config)
    _console().print(device_map_picture.rendered(layout))
    if config.plan.picture:
        path = Path(config.plan.picture)
        device_map_picture.draw(path, layout, title=f"{config.run.name}: {device_map_picture.summary(layout)}")
        sys.stdout.write(f"drawn in {path}\n")


def everything(config: Config, as_json: bool = False) -> None:
    """Print the layout and placement, then the memory; ends with status 1 where it does not fit."""
    if not as_json:
        with hydra_app.as_user_error():
            layout = _imagined(config, weights=False)
        _console().print(device_map_picture.rendered(layout))
    plan_memory.memory(config, as_json)


KINDS: dict[str, Callable[[Config], None]] = {"memory": plan_memory.memory, "placement": placement, "sync": sync}


def show(found: TransferCost, title: str, shared: bool) -> None:
    """A table of ranks and a line of totals."""
    console = _console()
    table = Table("rank", title=title, title_justify="left")
    for column in ("bytes", "messages", "seconds"):
        table.add_column(column, justify="right")
    for part in (found.senders, found.receivers):
        for traffic in [*part, _slowest(part)]:
            table.add_row(traffic.rank, f"{traffic.bytes:,}", f"{traffic.messages:,}", f"{traffic.seconds:.4f}")
        table.add_section()
    console.print(table)
    way = "written once, read by every engine on the machine" if shared else "sent to each engine rank"
    console.print(
        f"{found.sent_bytes:,} bytes arrive, {way}; the engines hold {found.least_bytes:,}: ratio {found.ratio:.4f}\n"
        f"predicted {found.seconds:.4f} s; the busiest sender has {found.imbalance:.3f} of the mean"
    )


def _slowest(part: list[RankTraffic]) -> RankTraffic:
    """The line below a side's ranks."""
    slowest = max(part, key=lambda traffic: traffic.seconds if traffic.seconds < inf else 0)
    return RankTraffic(f"  slowest: {slowest.rank}", slowest.bytes, slowest.messages, slowest.seconds)


def main(argv: list[str]) -> int:
    """Entry point of `mrl plan`."""
    if argv and argv[0] == "rollout":
        return plan_rollout.main(argv[1:])  # keys of its own: it asks for no config
    if argv and argv[0] == "search":
        return plan_search.main(argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    bare = bool(argv) and ("=" in argv[0] or argv[0] == "--json")
    kind, overrides = ("", argv) if bare else (argv[0] if argv else None, argv[1:])
    if as_json := "--json" in overrides:
        if kind not in ("", "memory"):
            sys.stderr.write(f"mrl plan {kind}: --json is of `mrl plan` and `mrl plan memory`\n")
            return 2
        overrides = [word for word in overrides if word != "--json"]
    jobs = KINDS | {"": partial(everything, as_json=as_json), "memory": partial(plan_memory.memory, as_json=as_json)}
    if kind in jobs:
        return hydra_app.run([*overrides, *hydra_app.NO_OUTPUT], jobs[kind], USAGE)
    expected = " or ".join((*KINDS, "rollout", "search"))
    sys.stderr.write(f"mrl plan: unknown kind {argv[0]!r}; expected {expected}\n" if argv else USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
