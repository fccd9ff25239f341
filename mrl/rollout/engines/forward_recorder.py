"""Records the tensors that an SGLang engine computes in one forward pass, and converts them to the form of a trainer's trace.

SGLang calls `record_forward` in each of its scheduler processes (server argument `forward_hooks`), and registers the returned
hook on the modules of the model. The hook does nothing until a request file lies in the folder of the recording. Then it writes
the outputs of all modules of the next forward pass, and the model weights that the request names.

`engine_trace` renames the recorded tensors: it maps SGLang's modules to the trace points that mrl.workers.forward_trace records
in a trainer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from mrl.weight_sync.engine_layout import HF_EMBEDDING_WEIGHT, HF_OUTPUT_WEIGHT, EngineLayout

Arrays = dict[str, NDArray]  # name -> tensor. Names: MODULE/out0, MODULE/in0, weight/PARAMETER, or trace points

REQUEST = "request.json"
"""File that makes the engine record its next forward pass: {"name": name of the output file, "weights": prefixes}."""
_MODULES_WITH_INPUTS = ("RowParallelLinear", "RadixAttention")  # classes of SGLang whose inputs are recorded, too
# at these trace points, each tensor-parallel rank has a slice of the last axis
_CONCATENATED = ("query", "key", "value", "normed_query", "normed_key", "rotated_query", "rotated_key", "attention")
_CONCATENATED += ("gate", "up", "activation")
# with several ranks, each rank has only a part of the sum, so these trace points are not compared
_PARTIAL_SUMS = ("attention_output", "mlp_output", "routed_experts", "shared_experts")


def recording_args(folder: str | Path) -> dict[str, Any]:
    """Return the server arguments with which an engine can record forward passes into `folder`."""
    hook = dict(
        name="mrl_forward_recorder",
        target_modules=["model", "model.embed_tokens", "model.layers.*", "model.norm", "logits_processor"],
        hook_factory=f"{__name__}:record_forward",
        config=dict(folder=str(folder)),
    )
    # With a CUDA graph, the hooks would not run. With the prefix cache, the engine would not compute the cached tokens.
    return dict(forward_hooks=[hook], disable_radix_cache=True, cuda_graph_backend_prefill="disabled")


def record_forward(config: Mapping[str, Any]) -> ForwardRecorder:
    """Return the hook of one scheduler process. SGLang calls this function with the `config` of `recording_args`."""
    return ForwardRecorder(Path(config["folder"]))


class ForwardRecorder:
    """Forward hook of all modules of an engine's model. It writes one file for each request and rank.

    While the request file exists, each further forward pass overwrites the output file of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self.request = folder / REQUEST
        self._model: Any = None  # the decoder without the output layer
        self._records: dict[int, list[Arrays]] = {}  # id of a module -> outputs and inputs of each of its calls

    def __call__(self, module: Any, inputs: tuple, output: Any) -> None:
        """Store what the module computed. After the last module, which computes the logits, write the file."""
        if not self.request.exists():
            return
        if hasattr(output, "next_token_logits"):
            self._write(inputs, output)
        elif hasattr(module, "embed_tokens"):
            self._model = module
        else:
            record = {f"out{index}": _array(tensor) for index, tensor in enumerate(_tensors(output))}
            if type(module).__name__ in _MODULES_WITH_INPUTS:
                record |= {f"in{index}": _array(tensor) for index, tensor in enumerate(_tensors(inputs))}
            self._records.setdefault(id(module), []).append(record)

    def _write(self, inputs: tuple, output: Any) -> None:
        from safetensors.numpy import save_file  # imported here, because the driver does not need it

        request = json.loads(self.request.read_text())
        calls = {key: iter(records) for key, records in self._records.items()}
        # Several layers may share a module, such as the rotary embedding. The calls of this module are in the order of the
        # layers, so each layer gets the next call.
        arrays = {
            f"model.{name}/{part}": array
            for name, module in self._model.named_modules(remove_duplicate=False)
            for part, array in next(calls.get(id(module), iter(())), {}).items()
        }
        arrays["logits_processor/out0"] = _array(output.next_token_logits)
        arrays |= {f"weight/{name}": _array(tensor) for name, tensor in self._weights(inputs, request["weights"])}
        self._records = {}
        target = self.request.with_name(f"{request['name']}.{_tp_rank()}.safetensors")
        partial = target.with_suffix(".partial")
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial)
        os.replace(partial, target)

    def _weights(self, inputs: tuple, prefixes: Sequence[str]) -> list[tuple[str, Any]]:
        head = next((value for value in inputs if hasattr(value, "weight")), None)  # the module lm_head
        named = [(f"model.{name}", tensor) for name, tensor in self._model.named_parameters()]
        named += [(HF_OUTPUT_WEIGHT, head.weight)] if head is not None else []
        return [(name, tensor) for name, tensor in named if name.startswith(tuple(prefixes))]


def _tensors(value: Any) -> list[Any]:
    """Return the tensors of a module's output or arguments. Does not import torch, because the driver imports this file.

    An MoE layer may return an object that holds the parts of its output, because the next norm adds these parts. For such an
    object, the result is [].
    """
    if hasattr(value, "get_merged"):
        return []
    values = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in values if hasattr(each, "detach")]


def _array(tensor: Any) -> NDArray:
    """Return a tensor as an array, floats as float32. The array is a copy, because SGLang overwrites some tensors in place."""
    values = tensor.detach()
    return (values.float() if values.is_floating_point() else values).cpu().numpy().copy()


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel  # can be imported only inside SGLang

    return get_parallel().tp_rank


def write_request(folder: str | Path, name: str, weights: Sequence[str] = ()) -> Path:
    """Write the request that makes the engine record its next forward pass. Returns the request's file; the caller removes it.

    The engine also records the weights whose names begin with one of the prefixes in `weights`.
    """
    path = Path(folder) / REQUEST
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dict(name=name, weights=list(weights))))
    partial.replace(path)
    return path


def read_forward_recording(folder: str | Path, name: str, num_ranks: int) -> list[Arrays]:
    """Return the arrays of one recorded forward pass, for each tensor-parallel rank. Raises ValueError if a file is missing."""
    from safetensors.numpy import load_file

    files = [Path(folder) / f"{name}.{rank}.safetensors" for rank in range(num_ranks)]
    if missing := [str(file) for file in files if not file.exists()]:
        raise ValueError(
            f"{missing[0]} is missing: the engine recorded no forward pass. The folder must be visible to all ranks of the "
            "engine, and SGLang must run the modules of the model one by one (no CUDA graph for prompts)."
        )
    return [load_file(file) for file in files]


def engine_weights(ranks: Sequence[Arrays], layout: EngineLayout) -> Arrays:
    """Return Hugging Face name of a tensor -> recorded weights. `ranks`: see `read_forward_recording`."""
    shapes = {name: shape for row in layout.rows for name, shape in row.hf_shapes(layout.sizes).items()}
    weights: Arrays = {}
    for rank, arrays in enumerate(ranks):
        for shard in layout.shards(rank):
            # A shard is a box of a Hugging Face tensor, and the position of this box in a parameter of the rank.
            param = arrays.get(f"weight/{shard.param}")
            if param is None:
                continue
            whole = weights.setdefault(shard.name, np.zeros(shapes[shard.name], np.float32))
            part = param[shard.box_in_param(shard.box).slices]
            whole[shard.box.slices] = part.reshape(whole[shard.box.slices].shape)
    # config.json ties the output layer to the embedding
    if HF_OUTPUT_WEIGHT not in shapes and f"weight/{HF_OUTPUT_WEIGHT}" in ranks[0]:
        rows = np.concatenate([arrays[f"weight/{HF_OUTPUT_WEIGHT}"] for arrays in ranks])
        weights[HF_OUTPUT_WEIGHT] = rows[: shapes[HF_EMBEDDING_WEIGHT][0]]
    return weights


def engine_trace(ranks: Sequence[Arrays], arch: Architecture) -> Arrays:
    """Return trace point -> recorded tensor, as in mrl.workers.forward_trace. `ranks`: see `read_forward_recording`."""
    traces = [_rank_trace(arrays, arch, len(ranks)) for arrays in ranks]
    if len(traces) == 1:
        return traces[0]
    merged = {}
    copies = max(1, len(ranks) // arch.transformer["num_query_groups"])  # number of ranks with the same key/value heads
    for point, array in traces[0].items():
        name = point.rpartition(".")[2]
        if name in _CONCATENATED:
            step = copies if name in ("key", "value", "normed_key", "rotated_key") else 1
            array = np.concatenate([trace[point] for trace in traces[::step]], axis=-1)
        if name not in _PARTIAL_SUMS:
            merged[point] = array
    return merged


def _rank_trace(arrays: Arrays, arch: Architecture, num_ranks: int) -> Arrays:
    trace = {"embedding": arrays["model.embed_tokens/out0"], "final_norm": arrays["model.norm/out0"]}
    if "model.norm/out1" in arrays:
        trace["final_norm_input"] = arrays["model.norm/out1"]
    trace["last_logits"] = arrays["logits_processor/out0"][-1:, : arch.vocab_size]
    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}."
        module = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
        # In some models with post-norms, the modules with the names in `_norms` are norms at other places of the layer.
        points = {} if "post_norms" in arch.parts else _norms(module)
        if layer == 0:
            points.setdefault("input", trace["embedding"])
        points |= _latent_attention(module, arch) if arch.has_latent_attention else _attention(module, arch, num_ranks)
        points |= _mixture_of_experts(module, arch) if arch.is_moe(layer) else _dense_mlp(module)
        trace |= {f"layers.{layer}.{point}": array for point, array in points.items()}
    return trace


def _pick(module: Arrays, **names: str) -> Arrays:
    """Return trace point -> array for the modules of a layer that the engine ran. `names`: trace point -> name of the array."""
    return {point: module[name] for point, name in names.items() if name in module}


def _norms(module: Arrays) -> Arrays:
    """Return trace point -> array for the two norms of a layer. The second output of an SGLang norm is its input."""
    norm, second = "input_layernorm", "post_attention_layernorm"
    return _pick(
        module,
        input=f"{norm}/out1",
        attention_norm=f"{norm}/out0",
        mlp_input=f"{second}/out1",
        mlp_norm=f"{second}/out0",
    )


def _attention(module: Arrays, arch: Architecture, num_ranks: int) -> Arrays:
    """Return trace point -> array for attention. The inputs of RadixAttention are the normed, rotated queries and keys."""
    fused = module["self_attn.qkv_proj/out0"]
    kv = max(arch.sizes["kv"] // num_ranks, arch.sizes["head_dim"])  # width of the keys, or of the values, of one rank
    query, key, value = np.split(fused, [fused.shape[1] - 2 * kv, fused.shape[1] - kv], axis=1)
    points = dict(query=query, key=key, value=value) | _pick(
        module,
        normed_query="self_attn.q_norm/out0",
        normed_key="self_attn.k_norm/out0",
        rotated_query="self_attn.attn/in0",
        rotated_key="self_attn.attn/in1",
        attention="self_attn.o_proj/in0",
        attention_output="self_attn.o_proj/out0",
    )
    return {name: array.reshape(len(fused), -1) for name, array in points.items()}


def _latent_attention(module: Arrays, arch: Architecture) -> Arrays:
    """Return trace point -> array for multi-head latent attention.

    A query has `width` components, and RoPE rotates the last `rope` of them. RoPE also rotates one key that all heads share.
    The trace point `normed_query` has only these `rope` components of each query.
    """
    t = arch.transformer
    rope, width = t["qk_pos_emb_head_dim"], t["qk_head_dim"] + t["qk_pos_emb_head_dim"]
    names = dict(attention="self_attn.o_proj/in0", attention_output="self_attn.o_proj/out0")
    points = _pick(
        module, query_latent="self_attn.q_a_layernorm/out0", key_latent="self_attn.kv_a_layernorm/out0", **names
    )
    query = module.get("self_attn.q_b_proj/out0", module.get("self_attn.q_proj/out0"))
    if query is not None:
        tokens = len(query)
        points["query"] = query.reshape(tokens, -1)
        points["normed_query"] = halves(query.reshape(tokens, -1, width)[..., -rope:]).reshape(tokens, -1)
    down = module.get("self_attn.fused_qkv_a_proj_with_mqa/out0", module.get("self_attn.kv_a_proj_with_mqa/out0"))
    if down is not None:
        points["normed_key"] = halves(down[:, -rope:])
    for point, index in (("rotated_query", 0), ("rotated_key", 1)):
        if (rotated := module.get(f"self_attn.rotary_emb/out{index}")) is not None:
            pairs = rotated.reshape(len(rotated), -1, rope)
            points[point] = halves(pairs).reshape(len(rotated), -1)
    return points


def halves(pairs: NDArray) -> NDArray:
    """Reorder components [..., d] from pairs to Megatron's order: first the even components (0, 2, ...), then the odd ones."""
    return np.concatenate([pairs[..., 0::2], pairs[..., 1::2]], axis=-1)


def _dense_mlp(module: Arrays) -> Arrays:
    points = _pick(module, activation="mlp.down_proj/in0", mlp_output="mlp.down_proj/out0")
    if (fused := module.get("mlp.gate_up_proj/out0")) is not None:
        points["gate"], points["up"] = np.split(fused, 2, axis=-1)
    return points


def _mixture_of_experts(module: Arrays, arch: Architecture) -> Arrays:
    """Return trace point -> array for an MoE layer. `routing` has, for each token, the weights of its experts, otherwise 0."""
    block = "mlp" if "mlp.topk/out0" in module else "block_sparse_moe"
    points = _pick(
        module,
        router_logits=f"{block}.gate/out0",
        shared_experts=f"{block}.shared_experts.down_proj/out0",
        mlp_output=f"{block}/out0",
    )
    if f"{block}.topk/out0" in module:
        weights, ids = module[f"{block}.topk/out0"], module[f"{block}.topk/out1"].astype(np.int64)
        routing = np.zeros((len(ids), arch.num_experts), np.float32)
        chosen = (ids >= 0) & (ids < arch.num_experts)
        np.put_along_axis(routing, np.where(chosen, ids, 0), 0, axis=1)
        for slot in range(ids.shape[1]):
            rows = np.flatnonzero(chosen[:, slot])
            routing[rows, ids[rows, slot]] = weights[rows, slot]
        points["routing"] = routing
    if "mlp_output" in points:
        points["routed_experts"] = points["mlp_output"] - points.get("shared_experts", 0)
        experts = module.get(f"{block}.experts/out0")
        if experts is not None and "routing" in points:
            points["routing"] = points["routing"] * _factor(experts, points["routed_experts"])
    return points


def _factor(experts: NDArray, routed: NDArray) -> np.float32:
    """Return the factor by which the layer multiplies the weighted sum of its experts' outputs; 1 if no single factor fits."""
    factor = float((experts * routed).sum()) / max(float(np.square(experts).sum()), np.finfo(np.float32).tiny)
    is_factor = np.abs(experts * factor - routed).max(initial=0.0) < 1e-3 * np.abs(routed).max(initial=1e-30)
    return np.float32(factor if is_factor else 1.0)
