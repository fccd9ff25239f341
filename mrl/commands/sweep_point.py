"""One point of a sweep, in a process of its own: `python -m mrl.commands.sweep_point FOLDER INDEX [OVERRIDE ...]`.

It is `mrl train` with the point's overrides. What it says goes to terminal.log in the point's folder; its exit status to
status.json, unless it asks to be started again.
"""

import json
import os
import sys
import time
from pathlib import Path

from mrl.commands import train
from mrl.core.preemption import REQUEUE
from mrl.sweep.outcome import STATUS, write_status
from mrl.sweep.plan import load


def main(argv: list[str]) -> int:
    """Run the point; returns its exit status. One that has ended well already is left alone."""
    sweep, index = load(Path(argv[0])), int(argv[1])
    folder, begun = sweep.of(index), time.monotonic()
    folder.mkdir(exist_ok=True)
    ended = folder / STATUS
    if ended.exists() and json.loads(ended.read_text())["status"] == 0:
        return 0
    ended.unlink(missing_ok=True)
    with (folder / "terminal.log").open("a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    status = train.main([*sweep.overrides(index), *argv[2:]])
    if status != REQUEUE:
        write_status(folder, status, time.monotonic() - begun)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
