"""Entry point of an SGLang server process: `python -m mrl.rollout.engines.launch_sglang ARGUMENTS.json`.

The process runs SGLang's own HTTP server with SGLang's own arguments. This file replaces or extends functions of SGLang only
through SGLang's hook registry.

The main change is for machines without CUDA: child processes start by fork. By default, SGLang spawns a scheduler and a
detokenizer. Each of them imports torch, transformers and sglang again, and these imports take 8 CPU-seconds. Here, the server
process imports these packages, and then forks the scheduler and the detokenizer. The fork is safe, because the server process
has no CUDA context, and only one thread at that time.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mrl.config.secrets import redacted
from mrl.core.code_locations import quick_imports
from mrl.core.run_warnings import forward_warnings
from mrl.hang_report.process_registry import REGISTRY_FOLDER_ENV, REGISTRY_NAME_ENV, register_process
from mrl.rollout.engines.batch_spans import register_hooks
from mrl.rollout.engines.server import SHARED_MEMORY_LIST

# Modules and classes of SGLang in which hooks replace or extend functions
ENGINE = "sglang.srt.entrypoints.engine"
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
SAMPLER = "sglang.srt.layers.sampler"
SERVER_ARGS = "sglang.srt.server_args"
# SGLang's class for the MTP layers of a model has the name of the model's class and one of these suffixes
DRAFT_SUFFIXES = ("NextN", "MTP")
LISTEN_TIMEOUT_S = 30.0  # how long `wait_until_listening` waits for the HTTP server
# Entry point of mrl's CPU platform for SGLang; setup.py registers it
PLATFORM_PLUGIN = "mrl.rollout.cpu.sglang_platform:activate"


def hide_megatron() -> None:
    """Make each import of Megatron fail in this process.

    SGLang imports Megatron if it is installed, for a debugging tool that mrl does not use. The import takes seconds. It also
    sets the mode "torch" of the package torch_memory_saver. In this mode, SGLang cannot capture CUDA graphs whose memory an
    offloaded engine releases, so each colocated engine would fail when it starts.
    """
    sys.modules["megatron"] = None  # type: ignore[assignment]  # an import then raises ModuleNotFoundError


def main() -> None:
    """Serve until the process is killed. The command-line argument is the path of a JSON file with fields of ServerArgs."""
    arguments = Path(sys.argv[1])
    fields: dict[str, Any] = json.loads(arguments.read_text())
    arguments.unlink()  # the file contains the API key
    register_server()
    limit_model_imports(Path(fields["model_path"]), drafts=bool(fields.get("speculative_algorithm")))
    if fields.get("dtype") == "float32":
        forbid_tf32()
    if fields.get("device") == "cpu":
        check_plugin_installed()
    serve(fields)


def register_server() -> None:
    """Register this process for hang reports. Registration opens a file for stack traces.

    Forked children write their stack traces to the same file.
    """
    if REGISTRY_FOLDER_ENV in os.environ:
        name = os.environ[REGISTRY_NAME_ENV]
        forward_warnings(name.replace("_", " "))
        register_process(os.environ[REGISTRY_FOLDER_ENV], name, f"{name.replace('_', ' ')} server", "engine")


def check_plugin_installed() -> None:
    """Raise RuntimeError if SGLang cannot find mrl's CPU platform. Without this check, SGLang would fail much later."""
    plugins = entry_points(group="sglang.srt.platforms", name="mrl_cpu")
    if PLATFORM_PLUGIN not in [plugin.value for plugin in plugins]:
        raise RuntimeError(
            f"SGLang cannot find mrl's CPU platform {PLATFORM_PLUGIN}, which SGLang needs on a CPU. Run "
            "`pip install --no-deps -e .` in the checkout, even if mrl is already installed: an older installation does not "
            "register the CPU platform."
        )


def forbid_tf32() -> None:
    """Let a GPU multiply float32 matrices in float32, as the trainer ranks do. A variable that the user has set is kept.

    By default, Triton's kernels would multiply them in the format TF32, whose products have only three correct digits.
    """
    for name, value in (("NVIDIA_TF32_OVERRIDE", "0"), ("TRITON_F32_DEFAULT", "ieee")):
        os.environ.setdefault(name, value)


def limit_model_imports(model_path: Path, drafts: bool = False) -> None:
    """Let SGLang import only the files that define the architecture of this model, instead of about 250 model files.

    With `drafts`, SGLang also imports the files of the draft models that consist of MTP layers of this model.

    Does nothing if no file defines the architecture, because SGLang then uses the model code of Transformers. Also does nothing
    if the user has set the environment variable SGLANG_DISABLED_MODEL_ARCHS.
    """
    config, package = model_path / "config.json", find_spec("sglang")
    if "SGLANG_DISABLED_MODEL_ARCHS" in os.environ or not config.exists():
        return
    assert package and package.submodule_search_locations, "sglang is not installed"
    architectures = json.loads(config.read_text()).get("architectures") or ["(none)"]
    architectures = [name + end for name in architectures for end in ("", *(DRAFT_SUFFIXES if drafts else ()))]
    files = {f.stem: f for f in Path(package.submodule_search_locations[0], "srt", "models").glob("*.py")}
    definition = re.compile(rf"^class (?:{'|'.join(map(re.escape, architectures))})\(", re.MULTILINE)
    needed = {name for name, file in files.items() if definition.search(file.read_text())}
    if needed:
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(files.keys() - needed))


def serve(fields: dict[str, Any]) -> None:
    """Import SGLang and run its HTTP server."""
    with quick_imports():  # imported here, because these imports take seconds, and `main` runs its checks first
        import torch
        from sglang.srt.entrypoints.http_server import launch_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import ServerArgs

    HookRegistry.register(f"{SERVER_ARGS}.PortArgs.init_new", list_shared_memory_file, HookType.AFTER)
    HookRegistry.register(f"{SERVER_ARGS}.ServerArgs.resolved_dict", hide_secrets, HookType.AFTER)
    HookRegistry.register(f"{HTTP_SERVER}._freeze_gc_after_server_warmup", wait_until_listening, HookType.BEFORE)
    if not torch.cuda.is_available():
        import mrl.rollout.cpu.sdpa_attention  # noqa: F401  imported before the fork, so that children need not import it
        from mrl.rollout.cpu.sglang_platform import (
            KV_SCALES,
            LOAD_MODEL,
            PAUSED_LOOP,
            discard_random_kv_scales,
            murmur_hash32,
            round_embedding_scale,
            sleep_while_paused,
        )

        HookRegistry.register(f"{ENGINE}._set_envs_and_config", use_fork, HookType.AFTER)
        HookRegistry.register(PAUSED_LOOP, sleep_while_paused, HookType.AFTER)
        HookRegistry.register(KV_SCALES, discard_random_kv_scales, HookType.BEFORE)
        HookRegistry.register(LOAD_MODEL, round_embedding_scale, HookType.AFTER)
        HookRegistry.register(
            f"{MODEL_RUNNER}.maybe_enable_batch_invariant_mode", skip_batch_invariant_kernels, HookType.REPLACE
        )
        HookRegistry.register("torch.get_device_module", get_cpu_module, HookType.REPLACE)
        # On a CPU, SGLang hashes the seeds with the package sgl_kernel, which is not installed there.
        HookRegistry.register(f"{SAMPLER}.murmur_hash32", murmur_hash32, HookType.REPLACE)
        for child in ("run_scheduler_process", "run_detokenizer_process"):
            HookRegistry.register(f"{HTTP_SERVER}.{child}", reset_signals, HookType.BEFORE)
    register_hooks()
    load_plugins()  # applies the hooks
    launch_server(ServerArgs(**fields))


def hide_secrets(fields: dict[str, Any], *_: object) -> dict[str, Any]:
    """Remove the API key and other secrets from the arguments that SGLang writes to a log or returns from /server_info.

    Hook that runs after SGLang has collected these arguments.
    """
    return redacted(fields)


def use_fork(result: None, *_: object) -> None:
    """Start child processes by fork. Hook that runs after SGLang has chosen `spawn`.

    This is safe only while this process has a single thread and no CUDA context.
    """
    multiprocessing.set_start_method("fork", force=True)
    gc.freeze()  # otherwise a garbage collection in a child would copy the memory pages that the child shares with this process


def reset_signals(*_: object) -> None:
    """Remove the parent's signal handlers, which would end all processes of the server. Hook that a forked child runs first."""
    for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def skip_batch_invariant_kernels(*_: object) -> None:
    """Do nothing. Hook that replaces the method with which SGLang turns on batch-invariant kernels, because these need Triton.

    Therefore the argument enable_deterministic_inference has only one effect on a CPU: SGLang samples with seeds.
    """


def get_cpu_module(*_: object) -> Any:
    """Return torch.cpu. Replaces torch.get_device_module, which returns torch.cuda even without a GPU.

    A scheduler that releases its memory calls `synchronize()` of the returned module. Without a GPU, torch.cuda.synchronize()
    raises an error.
    """
    import torch

    return torch.cpu


def wait_until_listening(server_args: Any) -> None:
    """Wait until the server's socket listens. Hook that runs before SGLang sends a request to its own HTTP server.

    Normally SGLang's warm-up waits for the socket, but on a CPU, mrl turns the warm-up off.
    """
    deadline = time.monotonic() + LISTEN_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((server_args.host, server_args.port), timeout=1):
            return
        time.sleep(0.05)


def list_shared_memory_file(ports: Any, *_: object, **__: object) -> None:
    """Tell the supervisor which file in /dev/shm it must remove if the scheduler is killed.

    Hook that runs after SGLang has made its PortArgs, whose `instance_id` gives the name of the file.
    """
    from sglang.srt.managers.load_snapshot import shm_path_for

    scratch = os.environ.get("MRL_ENGINE_SCRATCH")  # temporary folder of this server, which EngineServer sets
    if scratch:
        with open(Path(scratch) / SHARED_MEMORY_LIST, "a") as file:  # the supervisor reads this list
            file.write(shm_path_for(ports.instance_id) + "\n")


if __name__ in ("__main__", "__mp_main__"):  # the server, and a child that it has spawned
    hide_megatron()
if __name__ == "__main__":
    main()
