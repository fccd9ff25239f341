"""The arguments of an SGLang server: their names, the arguments that a user cannot set, and mrl's defaults."""

import ast
import ctypes
import difflib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models.conversion.fp8_blocks import QUANTIZATION_CONFIG
from mrl.rollout.cpu import ATTENTION_BACKEND
from mrl.weight_sync.engine_control import WEIGHT_LOADER

DETERMINISTIC = "enable_deterministic_inference"
"""Argument that makes a server use the seeds of requests, and use kernels whose rounding does not depend on other requests."""

NO_TOKENIZER = "skip_tokenizer_init"
"""Argument of a server that has no tokenizer. Such a server costs less CPU, but cannot find stop texts in its responses."""

RESERVED_ARGS: dict[str, str] = {
    "model_path": "use model.path",
    "tp_size": "use rollout.engine_tp",
    "host": "remove it, because mrl chooses an address that the rollout worker can reach",
    "port": "remove it, because mrl chooses a free port",
    "nccl_port": "remove it, because mrl chooses a free port",
    "nnodes": "use rollout.engine_tp: an engine spans the nodes of its GPUs",
    "node_rank": "remove it, because mrl derives it from the nodes of the engine's GPUs",
    "dist_init_addr": "remove it, because mrl chooses a free port",
    "api_key": "use the environment variable MRL_ENGINE_KEY; without this variable, mrl chooses a random key",
    "admin_api_key": "use the environment variable MRL_ENGINE_KEY; without this variable, mrl chooses a random key",
}
"""Argument that mrl sets -> what a user must do instead."""


BLOCK_FP8 = "fp8"
"""Value of the argument `quantization` of an engine to which trainers send weights in FP8 with block scales."""

UNSYNCED_ARGS: dict[str, str] = {
    "quantization": "trainers can quantize weights only to fp8, so engines cannot take other quantized weights from the trainers",
    "speculative_draft_model_path": "a draft model of its own gets no new weights from the trainers",
    "speculative_draft_model_quantization": "a quantized draft model gets no new weights from the trainers",
    "enable_multi_layer_eagle": "several draft models get no new weights from the trainers",
}
"""Argument that an engine of a training run cannot have -> the reason. But `quantization` may be BLOCK_FP8."""


REWARD_MODELS = (
    *("LlamaForSequenceClassification", "Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification"),
    *("Gemma2ForSequenceClassification", "InternLM2ForRewardModel", "Qwen2ForRewardModel", "Qwen3ForRewardModel"),
)
"""Architectures of the reward models that a run can serve. Tests compare the scores of the first three with Transformers."""


@cache
def server_arg_names() -> frozenset[str]:
    """Return the names of all fields of SGLang's ServerArgs.

    The names are read from SGLang's source files, because importing SGLang takes 8 CPU-seconds.
    """
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
    if "model_path" not in names:  # in this version of SGLang, other files define the fields
        from sglang.srt.server_args import ServerArgs

        names.update(ServerArgs.__struct_fields__)
    return frozenset(name for name in names if not name.startswith("_"))


def check_server_args(overrides: Mapping[str, Any], section: str = "sglang") -> None:
    """Raise ValueError if a config section has an argument that does not exist or that mrl sets itself."""
    for name in overrides:
        if name in RESERVED_ARGS:
            raise ValueError(f"{section}.{name}={overrides[name]!r} is set by mrl; {RESERVED_ARGS[name]}.")
        if name not in server_arg_names():
            close = difflib.get_close_matches(name, server_arg_names(), n=1)
            hint = f"did you mean {section}.{close[0]}?" if close else "see `python -m sglang.launch_server --help`."
            raise ValueError(f"{section}.{name} is not an argument of this SGLang; {hint}")


def check_synced_args(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError if the config section `sglang` has an argument with which engines cannot take new weights.

    Also raise ValueError if the section has an argument about LoRA adapters.
    """
    for name, reason in UNSYNCED_ARGS.items():
        value = overrides.get(name)
        if value and (name, value) != ("quantization", BLOCK_FP8):
            raise ValueError(f"sglang.{name}={value}: {reason}; remove this argument.")
    for name in ADAPTER_ARGS:
        if name in overrides:
            raise ValueError(
                f"sglang.{name}={overrides[name]}: mrl sets the arguments about LoRA adapters; use lora.rank and "
                "weight_sync.lora=adapter."
            )


def block_fp8_args() -> dict[str, Any]:
    """Return the arguments of an engine that gets weights in FP8 with block scales from trainers.

    SGLang (0.5.23) uses block scales only if the model's config.json asks for them, so an argument overrides config.json. The
    files of the model are not in FP8, so the engine starts with random weights. Trainers push weights before the first request.
    """
    return dict(
        quantization=BLOCK_FP8,
        load_format="dummy",
        json_model_override_args=json.dumps({"quantization_config": QUANTIZATION_CONFIG}),
        moe_runner_backend="triton",  # on some GPUs, SGLang would choose kernels that reorder weights
    )


ADAPTER_ARGS = (
    "enable_lora",
    "lora_paths",
    "max_lora_rank",
    "lora_target_modules",
    "max_loras_per_batch",
    "max_loaded_loras",
)
"""Arguments about LoRA adapters that the config section `sglang` of a training run cannot have, because mrl sets them."""

NCCL_VARIABLES = {
    "NCCL_CUMEM_ENABLE": ("enable_symm_mem",),
    "NCCL_NVLS_ENABLE": ("enable_symm_mem", "enable_nccl_nvls"),
}
"""Variable of NCCL that SGLang sets -> server arguments. If one of these arguments is set, SGLang sets the variable to 1."""

DUMP_VARIABLE = "TORCH_NCCL_DUMP_ON_TIMEOUT"
"""Variable of torch. If it is 1 (default) and an NCCL group has an error, torch logs the collectives and ends the process.

If it is 0, trainer ranks keep running when an engine dies, and engines keep running when a trainer rank dies.
"""


def nccl_environment(server_args: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of NCCL for trainer ranks and engines that join common NCCL groups.

    The variables in NCCL_VARIABLES must have the same values in trainer ranks and engines. SGLang (0.5.23, _set_envs_and_config)
    sets such a variable if it is not in the environment. A value that the user has set in `environment` applies to trainer ranks
    and engines, unless a server argument in NCCL_VARIABLES sets the variable to 1. `server_args`: the config section `sglang`.
    """
    return {DUMP_VARIABLE: environment.get(DUMP_VARIABLE, "0")} | {
        name: "1" if any(server_args.get(argument) for argument in arguments) else environment.get(name, "0")
        for name, arguments in NCCL_VARIABLES.items()
    }


def has_cuda() -> bool:
    """Return whether the CUDA driver sees a device that CUDA_VISIBLE_DEVICES does not hide. Does not import torch."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first GPU, such as (9, 0); None: there is no GPU. Does not import torch."""
    if not has_cuda():
        return None
    driver, found, values = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        if driver.cuDeviceGetAttribute(ctypes.byref(found), attribute, 0):
            return None
        values.append(found.value)
    return values[0], values[1]


def speculates(server_args: Mapping[str, Any]) -> bool:
    """Return whether engines with these arguments use speculative decoding."""
    return bool(server_args.get("speculative_algorithm"))


def memory_saver_args(device: str | None = None) -> dict[str, Any]:
    """Return the ServerArgs fields that allow an engine to be offloaded. Returns an empty dict for a CPU.

    `device`: "cuda" or "cpu"; None: "cuda" if there is a GPU, and "cpu" otherwise. The fields turn off CUDA graphs for the
    prefill, but a user may turn these graphs on again (see `releases_cuda_graphs`).
    """
    if (device or default_device()) != "cuda":
        return {}
    return dict(enable_memory_saver=True, cuda_graph_backend_prefill="disabled")


def adapter_slots(staleness: int) -> int:
    """Return how many weight versions of LoRA adapters an engine must be able to apply at the same time.

    A request uses the adapters that are the newest when it begins. A step takes only responses that are at most `staleness`
    weight versions old. So before a push loads new adapters, it can unload all but the newest staleness + 1 adapters. With the
    new adapters, the engine then has staleness + 2.
    """
    return staleness + 2


def adapter_args(rank: int, matrices: Iterable[str], max_adapters: int, device: str | None = None) -> dict[str, Any]:
    """Return the ServerArgs fields of an engine that applies LoRA adapters to its weights.

    `matrices`: Hugging Face names of the adapted matrices, such as q_proj. `max_adapters`: how many weight versions of the
    adapters the engine can apply at the same time. `device`: see `memory_saver_args`.
    """
    cpu = (device or default_device()) != "cuda"
    return dict(
        enable_lora=True,
        max_lora_rank=rank,
        lora_target_modules=sorted(matrices),
        max_loras_per_batch=max_adapters,
        # The other backends of SGLang (0.5.23) need Triton. mrl.rollout.cpu.torch_ops lets this backend run on a CPU.
        **(dict(lora_backend="torch_native") if cpu else {}),
    )


def releases_cuda_graphs(server_args: Mapping[str, Any]) -> bool:
    """Return whether an offloaded engine can also release the memory of its CUDA graphs.

    SGLang (0.5.23) cannot release the memory of "breakable" graphs, which are its default for the prefill. If there are such
    graphs and the variable SGLANG_MEMORY_SAVER_CUDA_GRAPH is set, the server fails when it starts.
    """
    explicit = server_args.get("cuda_graph_config") or {}
    for phase, default in (("prefill", "breakable"), ("decode", "full")):
        is_off = server_args.get("disable_cuda_graph") or server_args.get(f"disable_{phase}_cuda_graph")
        chosen = explicit.get(phase, {}).get("backend") or server_args.get(f"cuda_graph_backend_{phase}")
        if (chosen or ("disabled" if is_off else default)) == "breakable":
            return False
    return bool(server_args.get("enable_memory_saver"))


def default_device() -> str:
    """Return the device that engines on this machine use if `sglang.device` is not set."""
    return "cuda" if has_cuda() else "cpu"


def default_server_args(
    dtype: str,
    context_length: int,
    *,
    device: str | None = None,
    mem_fraction_static: float = 0.8,
    max_total_tokens: int = 65536,
) -> dict[str, Any]:
    """Return the ServerArgs fields that mrl sets by default. `device`: see `memory_saver_args`.

    `dtype`: number format of weights and activations. `context_length`: largest number of tokens of a prompt with its response.
    `mem_fraction_static`: fraction of a GPU's memory for model weights and KV cache. `max_total_tokens`: size of the KV cache on
    a CPU, in tokens.
    """
    device = device or default_device()
    common = dict(
        device=device,
        dtype=dtype,
        context_length=context_length,
        skip_tokenizer_init=True,  # requests and responses are token ids, and stop conditions are usually token ids, too
        # On a GPU, the first request compiles kernels for minutes. SGLang's warm-up sends this request before the engine is
        # ready. Without the warm-up, the compilation would count as a stall (fault_tolerance.engine_stall_timeout_s).
        skip_server_warmup=device != "cuda",
        sleep_on_idle=True,  # otherwise SGLang's scheduler keeps a CPU core busy while the trainer works
        weight_version="0",
        load_snapshot_publish_interval=5,  # forward passes between two changes of the value that EngineClient.heartbeat reads
        disable_shared_experts_fusion=True,  # the trainer keeps shared experts separate from routed experts, too
        custom_weight_loader=[WEIGHT_LOADER],  # function that receives new model weights in the scheduler processes
        log_level="warning",
    )
    if device == "cuda":
        # FlashAttention and FlashInfer, SGLang's defaults, have no float32 kernels.
        attention = dict(attention_backend="triton") if dtype == "float32" else {}
        return common | dict(mem_fraction_static=mem_fraction_static) | attention
    return common | dict(
        attention_backend=ATTENTION_BACKEND,
        sampling_backend="pytorch",
        grammar_backend="none",
        max_total_tokens=max_total_tokens,
        page_size=1,
        disable_overlap_schedule=True,
        disable_radix_cache=True,  # on a CPU, the radix cache costs more than the short prefills that it saves
        cuda_graph_backend_decode="disabled",
        cuda_graph_backend_prefill="disabled",
    )
