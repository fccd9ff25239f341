"""Runs `mrl train` many times. A run is a fork of a process that has already imported the command, so it takes little time.

`python forked_commands.py` reads one JSON object per line from stdin, with the keys argv, cwd, output (a file), env and limit_s.
It answers each object with one line: the exit status of the fork, which is negative if a signal ended the fork.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl_runs import TAG


def serve() -> None:
    """Answer the requests on stdin until stdin is closed."""
    from mrl.commands import train_process  # the process that the supervisor of `mrl train` starts
    from mrl.core.code_locations import quick_package_metadata

    for module in ("transformers", "torch", "sglang.srt.server_args", "mrl.rollout.agents.tools", "pyarrow.parquet"):
        with contextlib.suppress(ImportError), quick_package_metadata():
            __import__(module)
    for line in sys.stdin:
        request = json.loads(line)
        if (child := os.fork()) == 0:
            _run(train_process.main, request)
        sys.stdout.write(f"{json.dumps(_wait(child, request['limit_s']))}\n")
        sys.stdout.flush()


def _run(main: Any, request: dict[str, Any]) -> None:
    """Run the command in this fork, and end the fork with the exit status that a separate process of the command would have."""
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    with open(request["output"], "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    status: Any = 1
    try:
        status = main(request["argv"])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def _wait(child: int, limit_s: float) -> int:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class ForkedCommands:
    """Client of `serve`: starts a process that runs `serve`, and sends commands to it."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, argv: list[str], folder: Path, tag: str, limit_s: float = 180.0) -> tuple[int, str]:
        """Run `mrl train ARGV` in `folder`, and return its exit status and output. Its processes inherit the variable TAG."""
        output = folder / "terminal.log"
        request = dict(argv=argv, cwd=str(folder), output=str(output), env={TAG: tag}, limit_s=limit_s)
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(f"{json.dumps(request)}\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline()), output.read_text()

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait(60)


@contextlib.contextmanager
def forked_commands() -> Iterator[ForkedCommands]:
    """Return a context with a ForkedCommands, which is closed at the end of the context."""
    commands = ForkedCommands()
    try:
        yield commands
    finally:
        commands.close()


if __name__ == "__main__":
    serve()
