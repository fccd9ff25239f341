"""Entry point of one SGLang server process: `python -m mrl.rollout.serve ARGUMENTS.json`.

It starts the stock HTTP server with the stock arguments; only the start differs. SGLang launches its scheduler and
detokenizer with `spawn`, so each imports torch, transformers and sglang again (about 8 CPU-seconds a process). Without CUDA
nothing forbids `fork`: here everything is imported once, single-threaded, and the children are forked from that.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve until killed. The one argument names a JSON file of ServerArgs fields."""
    fields = json.loads(Path(sys.argv[1]).read_text())
    limit_model_imports(fields["model_path"])
    _serve(fields)


def limit_model_imports(model_path: str) -> None:
    """Have SGLang import only the model files that mention this checkpoint's architecture, not all of its 250.

    Does nothing when no file does (SGLang then falls back to Transformers) or the user already limits them.
    """
    config = Path(model_path) / "config.json"
    if "SGLANG_DISABLED_MODEL_ARCHS" in os.environ or not config.exists():
        return
    architectures = json.loads(config.read_text()).get("architectures") or []
    folder = Path(find_spec("sglang").submodule_search_locations[0]) / "srt" / "models"
    files = {file.stem: file for file in folder.glob("*.py")}
    classes = re.compile(rb"^class (%s)\(" % b"|".join(re.escape(a.encode()) for a in architectures), re.MULTILINE)
    wanted = {name for name, file in files.items() if architectures and classes.search(file.read_bytes())}
    if wanted:
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(files.keys() - wanted))


def _serve(fields: dict[str, Any]) -> None:
    # Heavy: seconds of CPU. Nothing above this line needs it.
    import torch
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    if not torch.cuda.is_available():
        fork_children()
    load_plugins()
    launch_server(ServerArgs(**fields))


def fork_children() -> None:
    """Make SGLang's launcher fork. Only valid while this process has one thread and no CUDA context."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    import mrl.rollout.cpu_attention  # noqa: F401  once, before the fork

    def use_fork(result: None, *_: object) -> None:
        multiprocessing.set_start_method("fork", force=True)
        gc.freeze()  # keep the collector from copying the shared pages

    engine = "sglang.srt.entrypoints.engine"
    HookRegistry.register(f"{engine}._set_envs_and_config", use_fork, HookType.AFTER)
    for child in ("run_scheduler_process", "run_detokenizer_process"):
        HookRegistry.register(f"sglang.srt.entrypoints.http_server.{child}", _in_fork, HookType.BEFORE)


def _in_fork(*_: object) -> None:
    """First thing in a forked child: drop the parent's signal handlers, which would end the parent's tree."""
    for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
