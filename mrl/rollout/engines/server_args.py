"""SGLang's server arguments: their names, those that mrl sets itself, and defaults for a device."""

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
"""Argument that makes a server use the seeds of requests, and kernels whose rounding does not depend on the batch."""

RESERVED_ARGS: dict[str, str] = {
    "model_path": "model.path",
    "tp_size": "rollout.engine_tp",
    "host": "nothing: engines listen where the rollout worker can reach them",
    "port": "nothing: a free port is chosen",
    "nccl_port": "nothing: a free port is chosen",
    "nnodes": "rollout.engine_tp: an engine spans the nodes of its GPUs",
    "node_rank": "nothing: it follows from the nodes of its GPUs",
    "dist_init_addr": "nothing: a free port is chosen",
    "api_key": "the environment variable MRL_ENGINE_KEY; without it, a random key is chosen",
    "admin_api_key": "the environment variable MRL_ENGINE_KEY; without it, a random key is chosen",
}
"""Arguments that mrl sets -> what a user sets instead."""


@cache
def server_arg_names() -> frozenset[str]:
    """Return the names of all fields of ServerArgs, read from its source: importing SGLang takes 8 CPU-seconds."""
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
    if "model_path" not in names:  # this SGLang has another layout, so import it
        from sglang.srt.server_args import ServerArgs  # heavy; only for versions that moved the fields

        names.update(ServerArgs.__struct_fields__)
    return frozenset(name for name in names if not name.startswith("_"))


def check_server_args(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError if a user's `sglang:` section has an argument that does not exist or that mrl sets."""
    for name in overrides:
        if name in RESERVED_ARGS:
            raise ValueError(f"sglang.{name}={overrides[name]!r} is set by mrl; use {RESERVED_ARGS[name]}.")
        if name not in server_arg_names():
            close = difflib.get_close_matches(name, server_arg_names(), n=1)
            hint = f"did you mean sglang.{close[0]}?" if close else "see `python -m sglang.launch_server --help`."
            raise ValueError(f"sglang.{name} is not an argument of this SGLang; {hint}")


def has_cuda() -> bool:
    """Return whether the CUDA driver sees a device under CUDA_VISIBLE_DEVICES. Does not import torch."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def memory_saver_args(device: str | None = None) -> dict[str, Any]:
    """Return the ServerArgs fields that an engine needs to be offloaded; none on a CPU. `device`: None detects the device."""
    return dict(enable_memory_saver=True) if (device or ("cuda" if has_cuda() else "cpu")) == "cuda" else {}


def default_server_args(
    dtype: str,
    context_length: int,
    *,
    device: str | None = None,
    mem_fraction_static: float = 0.8,
    max_total_tokens: int = 65536,
) -> dict[str, Any]:
    """Return the ServerArgs fields for rollout. `device`: None stands for cuda if there is a GPU, else cpu.

    `mem_fraction_static` limits weights and KV cache on a GPU; `max_total_tokens` is the size of the KV cache on a CPU.
    """
    device = device or ("cuda" if has_cuda() else "cpu")
    common = dict(
        device=device,
        dtype=dtype,
        context_length=context_length,
        skip_tokenizer_init=True,  # requests and responses are token ids; responses stop at token ids, not at text
        skip_server_warmup=True,
        sleep_on_idle=True,  # otherwise SGLang's scheduler keeps a core busy while the trainer works
        weight_version="0",
        load_snapshot_publish_interval=5,  # forward passes between heartbeats, which distinguish a hung engine from a slow one
        disable_shared_experts_fusion=True,  # as in the trainer, shared experts are separate from routed ones
        custom_weight_loader=[WEIGHT_LOADER],  # the live weight sync reaches the scheduler processes through it
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
        disable_radix_cache=True,  # its bookkeeping costs more than the short prefills that it saves on a CPU
        cuda_graph_backend_decode="disabled",
        cuda_graph_backend_prefill="disabled",
    )
