"""SGLang's server arguments: which exist, which are ours, and good defaults for a device."""

import ast
import ctypes
import difflib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mrl.rollout.cpu import ATTENTION_BACKEND
from mrl.weight_sync.engine_control import WEIGHT_LOADER

DETERMINISTIC = "enable_deterministic_inference"
"""What makes a server heed seeds of requests, and use kernels whose rounding does not depend on the batch."""

OURS: dict[str, str] = {
    "model_path": "model.path",
    "tp_size": "rollout.engine_tp",
    "host": "nothing: engines listen where their worker can reach them",
    "port": "nothing: a free port is chosen",
    "nccl_port": "nothing: a free port is chosen",
    "nnodes": "rollout.engine_tp: an engine is on as many nodes as its GPUs are",
    "node_rank": "nothing: it follows from where its GPUs are",
    "dist_init_addr": "nothing: a free port is chosen",
    "api_key": "the environment variable MRL_ENGINE_KEY; without it a key is chosen",
    "admin_api_key": "the environment variable MRL_ENGINE_KEY; without it a key is chosen",
}
"""Arguments that mrl fills in, and what a user sets instead."""


@cache
def server_arg_names() -> frozenset[str]:
    """Every field of ServerArgs, read from the source: importing SGLang costs the driver 8 CPU-seconds."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed here; install the locked requirements (README).")
    names: set[str] = set()
    for file in Path(spec.submodule_search_locations[0], "srt", "arg_groups", "fields").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names.update(
                    s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
                )
    if "model_path" not in names:  # another layout of the package: ask it
        from sglang.srt.server_args import ServerArgs  # heavy; only for versions that moved the fields

        names.update(ServerArgs.__struct_fields__)
    return frozenset(name for name in names if not name.startswith("_"))


def check_server_args(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError when a user's `sglang:` section names an argument that does not exist or that mrl owns."""
    for name in overrides:
        if name in OURS:
            raise ValueError(f"sglang.{name}={overrides[name]!r} is set by mrl; use {OURS[name]}.")
        if name not in server_arg_names():
            close = difflib.get_close_matches(name, server_arg_names(), n=1)
            hint = f"did you mean sglang.{close[0]}?" if close else "see `python -m sglang.launch_server --help`."
            raise ValueError(f"sglang.{name} is not an argument of this SGLang; {hint}")


def has_cuda() -> bool:
    """Whether the CUDA driver sees a device (it heeds CUDA_VISIBLE_DEVICES); does not import torch."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def memory_saver_args(device: str | None = None) -> dict[str, Any]:
    """ServerArgs fields of an engine that gives its memory back by turns; a CPU's (None: this machine's) needs none."""
    return dict(enable_memory_saver=True) if (device or ("cuda" if has_cuda() else "cpu")) == "cuda" else {}


def default_server_args(
    dtype: str,
    context_length: int,
    *,
    device: str | None = None,
    mem_fraction_static: float = 0.8,
    max_total_tokens: int = 65536,
) -> dict[str, Any]:
    """ServerArgs fields for rollouts on this device (default: cuda where there is one, else cpu).

    `mem_fraction_static` bounds weights and KV cache on a GPU; `max_total_tokens` is the KV cache on a CPU.
    """
    device = device or ("cuda" if has_cuda() else "cpu")
    common = dict(
        device=device,
        dtype=dtype,
        context_length=context_length,
        skip_tokenizer_init=True,  # ids in, ids out: no tokenizer or detokenizer work; stop by token id, not by text
        skip_server_warmup=True,
        sleep_on_idle=True,  # SGLang's scheduler otherwise spins on a core while the trainer works
        weight_version="0",
        load_snapshot_publish_interval=5,  # passes between two signs of life, by which a hung engine is told from a slow one
        disable_shared_experts_fusion=True,  # they stay apart from the routed ones, as the trainer has them
        custom_weight_loader=[WEIGHT_LOADER],  # how live weight syncs reach the processes that hold the model
        log_level="warning",
    )
    if device == "cuda":
        return common | dict(mem_fraction_static=mem_fraction_static)
    return common | dict(
        attention_backend=ATTENTION_BACKEND,
        sampling_backend="pytorch",
        grammar_backend="none",
        max_total_tokens=max_total_tokens,
        page_size=1,
        disable_overlap_schedule=True,
        disable_radix_cache=True,  # its bookkeeping costs more than the short prefills it saves here
        cuda_graph_backend_decode="disabled",
        cuda_graph_backend_prefill="disabled",
    )
