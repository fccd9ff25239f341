"""Records tensors of one forward pass on a trainer rank: inputs and outputs of the parts of each layer.

`mrl certify engine` compares these tensors with the same tensors of an SGLang engine. A trace point is a point in the model at
which a tensor is recorded. Trainer and engine (mrl.rollout.engines.forward_recorder) use the same names of trace points, such as
`layers.3.rotated_query`. The trainer must run in the layout of a single process, so that no tensor is split. mrl.core.types
explains the letters of array dimensions, such as S and H.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from mrl.core.types import ReplicaBatch, TokenBlock
from mrl.weight_sync.engine_layout import HF_EMBEDDING_WEIGHT, HF_OUTPUT_WEIGHT
from mrl.workers.actor_critic import MegatronActor
from mrl.workers.micro_batch import MicroBatch
from mrl.workers.parity_trace import forward_outputs
from mrl.workers.trace_comparison import TensorFile
from parallel.megatron_layers import rms_norm

Arrays = dict[str, NDArray]


def trace_forward(
    model: MegatronActor,
    block: TokenBlock,
    batch: ReplicaBatch,
    temperature: float,
    engine_routing: Mapping[str, NDArray] | None = None,
) -> tuple[Arrays, dict[int, NDArray]]:
    """Return two dicts: trace point -> tensor [S, n], and row of the block -> log-probabilities of the row's sampled tokens.

    `batch` divides the rows of the block into micro-batches. A tensor has n numbers for each of the S tokens of the block. The
    trace point `last_logits` [B, V] has the logits at the last token of each row.

    `engine_routing` has the engine's routing weights [S, experts] at the trace points `layers.N.routing`. The experts then
    compute with these weights instead of the router's own weights. So the hidden states of later layers can be compared even if
    round-off makes the router choose other experts for a token. The recorded trace points `layers.N.routing` have the weights of
    the router itself.
    """
    assert model.spec.dims.world_size == 1, "the trace needs whole tensors, so the layout must be one process"
    trace = ForwardTrace(model, engine_routing or {})
    with trace.hooks():
        outputs = forward_outputs(model, block, batch, temperature)
    points = trace.points()
    points["last_logits"] = trace.logits(points["final_norm"][block.cu_seqlens[1:] - 1])
    return points, outputs


def trainer_weights(model: MegatronActor, prefixes: Sequence[str], suffix: str) -> Arrays:
    """Return the weights whose Hugging Face names begin with one of the prefixes or end with the suffix, in float32.

    If the embeddings are tied, the result also contains the output layer, provided that a prefix matches its name.
    """
    weights = {}
    for name, tensor in model.export():
        if (
            name == HF_EMBEDDING_WEIGHT
            and model.bridge.arch.tied_embeddings
            and HF_OUTPUT_WEIGHT.startswith(tuple(prefixes))
        ):
            weights[HF_OUTPUT_WEIGHT] = _host(tensor)
        if name.startswith(tuple(prefixes)) or name.endswith(suffix):
            weights[name] = _host(tensor)
    return weights


def store_arrays(arrays: Arrays, path: str | Path) -> TensorFile:
    """Write the arrays to a safetensors file. The returned TensorFile reads one array at a time, and can be sent to processes."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    return TensorFile(path, sorted(arrays))


class ForwardTrace:
    """Forward hooks on the modules of a Megatron model, and the tensors that they record."""

    def __init__(self, model: MegatronActor, engine_routing: Mapping[str, NDArray]) -> None:
        """Prepare hooks for the model. `engine_routing`: see `trace_forward`."""
        self._engine_routing = engine_routing
        (self._chunk,) = model.chunks
        self._gpt: Any = self._chunk.module
        self._vocab_size = model.vocab_size
        # for each micro-batch, the index of each of its tokens in the block; -1: padding
        self._tokens: list[NDArray[np.int64]] = []
        self._parts: dict[str, list[NDArray]] = {}  # point -> tensors of all micro-batches

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Context in which forward passes of the model are recorded."""
        gpt, handles = self._gpt, []

        def after(module: torch.nn.Module | None, record: Callable[[Any, tuple, Any], Any]) -> None:
            if module is not None:
                # torch replaces the output of the module with the result of `record`, unless this result is None
                handles.append(
                    module.register_forward_hook(
                        lambda module, args, kwargs, output: record(module, (*args, *kwargs.values()), output),
                        with_kwargs=True,
                    )
                )

        handles.append(gpt.register_forward_pre_hook(self._begin, with_kwargs=True))
        after(gpt.embedding, self._output("embedding"))
        for layer in gpt.decoder.layers:
            self._hook_layer(layer, after)
        after(gpt.decoder.final_layernorm, self._both("final_norm_input", "final_norm"))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def points(self) -> Arrays:
        """Return the recorded tensors in the order of the block's tokens."""
        tokens = np.concatenate(self._tokens)
        order = np.argsort(tokens, kind="stable")[(tokens < 0).sum() :]
        points = {point: np.concatenate(parts)[order] for point, parts in self._parts.items()}
        for point in [name for name in points if name.endswith(".mlp_output")]:
            prefix = point.removesuffix("mlp_output")
            if f"{prefix}routing" in points:
                points[f"{prefix}routed_experts"] = points[point] - points.get(f"{prefix}shared_experts", 0)
        return points

    def logits(self, final_norm: NDArray) -> NDArray:
        """Return the logits [n, V] of final hidden states [n, H]."""
        tied = self._gpt.share_embeddings_and_output_weights
        weight = (self._gpt.embedding.word_embeddings if tied else self._gpt.output_layer).weight
        hidden = torch.from_numpy(final_norm).to(weight.device, weight.dtype)
        with torch.no_grad():
            return _host(F.linear(hidden, weight)[:, : self._vocab_size])

    def _hook_layer(self, layer: Any, after: Callable) -> None:
        """Register the hooks of one layer. `after(module, record)` lets torch call `record` after the module."""
        prefix = f"layers.{layer.layer_number - 1}."
        attention, mlp = layer.self_attention, layer.mlp
        if hasattr(attention, "linear_qkv"):
            after(attention.linear_qkv, self._qkv(prefix, attention))
            if attention.config.qk_layernorm:
                after(attention.q_layernorm, self._output(f"{prefix}normed_query"))
                after(attention.k_layernorm, self._output(f"{prefix}normed_key"))
            after(attention.core_attention, self._rotated(prefix, 0))
        elif hasattr(attention, "linear_kv_down_proj"):
            self._hook_latent_attention(layer, prefix, after)
        after(attention.linear_proj, self._both(f"{prefix}attention", f"{prefix}attention_output"))
        if hasattr(mlp, "router"):
            after(layer.pre_mlp_layernorm, self._both(f"{prefix}mlp_input", f"{prefix}mlp_norm"))
            after(mlp.router, self._routing(prefix))
            after(getattr(mlp, "shared_experts", None), self._output(f"{prefix}shared_experts"))
            after(mlp, self._output(f"{prefix}mlp_output"))
        else:
            after(mlp.linear_fc1, self._gate_and_up(prefix))
            after(mlp.linear_fc2, self._both(f"{prefix}activation", f"{prefix}mlp_output"))

    def _hook_latent_attention(self, layer: Any, prefix: str, after: Callable) -> None:
        # there, `normed_query` and `normed_key` are the components that RoPE rotates, before RoPE
        attention, rope = layer.self_attention, layer.self_attention.config.qk_pos_emb_head_dim
        after(layer.input_layernorm, self._both(f"{prefix}input", f"{prefix}attention_norm"))
        if attention.config.q_lora_rank is not None:
            after(attention.q_layernorm, self._output(f"{prefix}query_latent"))
        after(attention.kv_layernorm, self._output(f"{prefix}key_latent"))
        query = attention.linear_q_proj if attention.config.q_lora_rank is None else attention.linear_q_up_proj

        def record_query(module: Any, args: tuple, output: Any) -> None:
            whole = _first(output)
            self._record(f"{prefix}query", whole)
            self._record(f"{prefix}normed_query", _halves(whole.reshape(len(whole), -1, attention.q_head_dim), rope))

        def record_key(module: Any, args: tuple, output: Any) -> None:
            self._record(f"{prefix}normed_key", _halves(_first(output), rope))

        after(query, record_query)
        after(attention.linear_kv_down_proj, record_key)
        after(attention.core_attention, self._rotated(prefix, attention.config.qk_head_dim))

    def _begin(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        micro: MicroBatch = kwargs["output_processor_context"]
        self._tokens.append(micro.block_index)

    def _record(self, point: str, tensor: Tensor) -> None:
        """Store a tensor of one micro-batch as [L, n], in float32 on the host."""
        tokens = len(self._tokens[-1])
        self._parts.setdefault(point, []).append(_host(tensor.reshape(tokens, -1)))

    def _output(self, point: str) -> Callable[[Any, tuple, Any], None]:
        return lambda module, args, output: self._record(point, _with_bias(output))

    def _both(self, input_point: str, output_point: str) -> Callable[[Any, tuple, Any], None]:
        def record(module: Any, args: tuple, output: Any) -> None:
            self._record(input_point, _first(args))
            self._record(output_point, _with_bias(output))

        return record

    def _qkv(self, prefix: str, attention: Any) -> Callable[[Any, tuple, Any], None]:
        """Return a hook for the module that computes norm and QKV projection. Its outputs are ordered by key/value group."""
        groups, d = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head

        def record(module: Any, args: tuple, output: Any) -> None:
            self._record(f"{prefix}input", args[0])
            self._record(f"{prefix}attention_norm", _fused_norm(module, args[0]))
            fused = _with_bias(output)
            heads = fused.reshape(len(self._tokens[-1]), groups, -1, d)
            # gates follow queries
            queries = (heads.size(2) - 2) // (2 if attention.config.attention_output_gate else 1)
            for name, part in (("query", heads[:, :, :queries]), ("key", heads[:, :, -2]), ("value", heads[:, :, -1])):
                self._record(f"{prefix}{name}", part)

        return record

    def _rotated(self, prefix: str, first: int) -> Callable[[Any, tuple, Any], None]:
        """Return a hook that records queries and keys after RoPE, from component `first` of each head.

        In latent attention, all heads share the rotated components of the key.
        """

        def record(module: Any, args: tuple, output: Any) -> None:
            tokens = len(self._tokens[-1])
            query, key = (each.reshape(tokens, -1, each.shape[-1])[..., first:] for each in args[:2])
            self._record(f"{prefix}rotated_query", query)
            self._record(f"{prefix}rotated_key", key[:, :1] if first else key)

        return record

    def _gate_and_up(self, prefix: str) -> Callable[[Any, tuple, Any], None]:
        def record(module: Any, args: tuple, output: Any) -> None:
            self._record(f"{prefix}mlp_input", args[0])
            self._record(f"{prefix}mlp_norm", _fused_norm(module, args[0]))
            gate, up = _with_bias(output).chunk(2, dim=-1)
            self._record(f"{prefix}gate", gate)
            self._record(f"{prefix}up", up)

        return record

    def _routing(self, prefix: str) -> Callable[[Any, tuple, Any], tuple[Tensor, Tensor] | None]:
        point = f"{prefix}routing"

        def record(module: Any, args: tuple, output: Any) -> tuple[Tensor, Tensor] | None:
            self._record(f"{prefix}router_logits", module.gating(args[0]))
            weights, chosen = output
            self._record(point, weights * chosen)
            return self._replay(self._engine_routing[point], *output) if point in self._engine_routing else None

        return record

    def _replay(self, engine: NDArray, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the router's weights in a micro-batch by the engine's weights. Return (weights, chosen), both [L, experts].

        `engine` [S, experts] has the engine's weights. `weights` and `chosen` are the router's result. Padding keeps this
        result, and so do tokens for which the engine chose another number of experts than the router.
        """
        tokens = torch.from_numpy(self._tokens[-1])
        theirs = torch.from_numpy(engine)[tokens.clamp(min=0)].to(weights.device, weights.dtype)
        chosen_by_engine = theirs > 0
        replayed = chosen_by_engine.sum(1, keepdim=True) == chosen.sum(1, keepdim=True)
        replayed &= (tokens >= 0)[:, None].to(replayed.device)
        return torch.where(replayed, theirs, weights), torch.where(replayed, chosen_by_engine, chosen)


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, (tuple, list)) else value


def _with_bias(output: Any) -> Tensor:
    """Return the output of a Megatron module, plus the bias that Megatron would add later."""
    if not isinstance(output, tuple):
        return output
    tensor, bias = output[0], output[1] if len(output) > 1 else None
    return tensor + bias if isinstance(bias, Tensor) else tensor


def _fused_norm(module: Any, hidden: Tensor) -> Tensor:
    """Compute again the RMSNorm that a module applies before its projection, because the module does not return this output.

    Return the input if the module has no norm.
    """
    if not hasattr(module, "layer_norm_weight"):
        return hidden
    eps = getattr(module, "eps", None) or module.config.layernorm_epsilon
    return rms_norm(hidden, module.layer_norm_weight, eps, module.config.layernorm_zero_centered_gamma)


def _halves(heads: Tensor, width: int) -> Tensor:
    """Return the last `width` components of each head in Megatron's order: the even ones (0, 2, ...), then the odd ones."""
    pairs = heads[..., -width:]
    return torch.cat([pairs[..., 0::2], pairs[..., 1::2]], dim=-1)


def _host(tensor: Tensor) -> NDArray:
    """Return a copy on the host, in float32."""
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()
