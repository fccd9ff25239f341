"""`mrl plan sync`: who sends how much to whom when weights go to the engines, without starting anything."""

import sys
from math import inf

from rich.console import Console
from rich.table import Table

from mrl import plan as planning
from mrl.commands import hydra_app, plan_rollout
from mrl.config import Config
from mrl.weight_sync.explain import Explanation, Speeds, Traffic, explain

USAGE = """usage: mrl plan sync [KEY=VALUE ...]
       mrl plan rollout ...   (mrl plan rollout --help)

Explains the weight sync of a configuration, as `mrl train` would run it: bytes, messages and predicted seconds of every
rank, and the bytes that arrive over the least possible (what the engines hold). Starts nothing; needs the model's
folder only for its config.json and the headers of its files.

  mrl plan sync model.path=Qwen3-0.6B parallel.tp=2 parallel.dp=4 rollout.num_engines=4 rollout.engine_tp=2
  mrl plan sync experiment=quickstart plan.send_gb_per_s=45 plan.receive_gb_per_s=45

The same keys as `mrl train`; besides them
  plan.send_gb_per_s, plan.receive_gb_per_s   bandwidth of one rank, GB/s
  plan.message_us                             cost of a message besides its bytes, microseconds
"""

_NO_OUTPUT = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra.job_logging.handlers.file.filename=/dev/null"]


def job(config: Config) -> None:
    """Print the explanation."""
    try:
        base, found = planning.plan_sync(config)
    except ValueError as error:
        hydra_app.refuse(error)
    shared = config.weight_sync.transport in ("shared_memory", "cuda_ipc")
    speeds = Speeds(**vars(config.plan))
    show(explain(found, base.dims.world_size, speeds, shared), f"{base.model_path} over {base.dims}", shared)


def show(found: Explanation, title: str, shared: bool) -> None:
    """A table of ranks and a line of totals."""
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
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


def _slowest(part: list[Traffic]) -> Traffic:
    """The line below a side's ranks."""
    slowest = max(part, key=lambda traffic: traffic.seconds if traffic.seconds < inf else 0)
    return Traffic(f"  slowest: {slowest.rank}", slowest.bytes, slowest.messages, slowest.seconds)


def main(argv: list[str]) -> int:
    """Entry point of `mrl plan`."""
    if argv and argv[0] == "rollout":
        return plan_rollout.main(argv[1:])  # keys of its own: it asks for no config
    if not argv or argv[0] in ("-h", "--help") or argv[0] != "sync":
        wrong = bool(argv) and argv[0] not in ("-h", "--help")
        stream = sys.stderr if wrong or not argv else sys.stdout
        stream.write(f"mrl plan: unknown kind {argv[0]!r}; expected sync or rollout\n" if wrong else USAGE)
        return 2 if wrong or not argv else 0
    return hydra_app.run([*argv[1:], *_NO_OUTPUT], job, USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
