"""Bytes of the activations that a trainer rank saves for the backward pass of one micro-batch, tensor by tensor.

The count follows Korthikanti et al. 2022 (arXiv:2205.05198), "Reducing Activation Recomputation in Large Transformer Models".
Equation 1 of the paper counts the saved inputs of one layer (34 s b h without attention scores). Equations 2 to 4 divide these
inputs over tensor-parallel ranks. Section 5 describes recomputation. This module counts the saved inputs of the layers that mrl
trains: gated MLPs, grouped and latent attention, experts, and packed sequences. The attention kernels save no scores. So the
paper's term 5 a s^2 b does not occur.

In FP8, Transformer Engine (2.20) saves the input of a matrix in FP8 if no other operation saves this input: outputs of norms,
activations of MLPs, and tokens of experts. Megatron (0.19) lets the projection of the attention output and the first matrix of
shared experts save the input itself, because the attention and the router save the same tensor.

Symbols: s is the number of tokens of a pack on one context-parallel rank. r is the number of tokens whose hidden states
one rank holds between the tensor-parallel matrices, for example in norms: r = s / tp with sequence parallelism, else r = s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mrl.planner.model_shape import LayerKind, ModelShape, ParameterShape, TowerShape
from parallel.dims import ParallelDims

INDEX_BYTES = 8  # bytes of one int64 index
STATISTIC_BYTES = 4  # bytes of one float32 statistic of a norm or a softmax
FLOAT32_BYTES = 4
SCALED_NUMBERS = (
    32  # FP8 numbers with one byte of scales: one byte for 32 numbers in mxfp8, four bytes for 128 in blockwise
)
RECURRENT_CHUNK = 64  # tokens of a chunk of a gated delta net, parallel.segment_recurrence.CHUNK

BytesByTensor = dict[str, int]
"""Name of a saved tensor -> its bytes."""


@dataclass(frozen=True)
class Kernels:
    """Properties of a machine's kernels. These properties determine which tensors are saved."""

    fused_norm: bool = True  # a norm saves only its input; torch on a CPU saves the normalized values too
    fused_mlp: bool = True  # one kernel computes the gated activation, and saves only its input
    grouped_attention: bool = True  # one kernel call handles all sequences, without copies of keys for each query head


GPU_KERNELS = Kernels()
CPU_KERNELS = Kernels(fused_norm=False, fused_mlp=False, grouped_attention=False)


@dataclass(frozen=True)
class Recompute:
    """Megatron's settings for activation recomputation.

    `num_layers` has two meanings. With `method` uniform, it is the number of layers that are recomputed from one saved input.
    With `method` block, only the first `num_layers` layers of each virtual stage are recomputed.
    """

    granularity: str | None = None  # "full" recomputes whole layers, "selective" some modules; None: no recomputation
    method: str | None = None  # if granularity is full: "uniform" (all layers) or "block" (some layers)
    num_layers: int = 1
    modules: frozenset[str] = frozenset()  # Megatron's names of the modules that "selective" recomputes
    distributed: bool = False  # whether the saved inputs of layers are sharded over tensor-parallel ranks

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> Recompute:
        """Read the config's section `megatron`."""
        return cls(
            granularity=megatron.get("recompute_granularity"),
            method=megatron.get("recompute_method"),
            num_layers=megatron.get("recompute_num_layers") or 1,
            modules=frozenset(megatron.get("recompute_modules") or ["core_attn"]),
            distributed=bool(megatron.get("distribute_saved_activations")),
        )

    def __str__(self) -> str:
        if self.granularity == "selective":
            return f"selective ({', '.join(sorted(self.modules))})"
        return "none" if self.granularity is None else f"full ({self.method}, {self.num_layers})"


@dataclass(frozen=True)
class MicroBatchShape:
    """Sizes of one micro-batch on one trainer rank."""

    tokens: int  # s: tokens on this context-parallel rank
    itemsize: int  # bytes of one element of an activation
    tp: int = 1
    etp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    keys_per_token: float = (
        1.0  # keys that attention reads, divided by tokens; above 1 if a prompt is copied for responses
    )
    imbalance: float = 1.0  # tokens that reach the rank's experts, divided by the mean of all ranks
    images: int = 0  # number of image tokens in the whole pack, because every context-parallel rank computes all images
    kernels: Kernels = GPU_KERNELS
    fp8: str = ""  # recipe with which inputs of matrices are saved in FP8; "": they are saved like other activations

    @classmethod
    def of(cls, dims: ParallelDims, tokens: int, itemsize: int, **fields: Any) -> MicroBatchShape:
        """Return the sizes of one rank's part of a pack. `tokens`: tokens of the whole pack, over all context-parallel ranks."""
        layout = dict(tp=dims.tp, etp=dims.expert_tp, cp=dims.cp, sequence_parallel=dims.sequence_parallel)
        return cls(-(-tokens // dims.cp), itemsize, **layout, **fields)

    @property
    def rows(self) -> int:
        """r: number of tokens whose hidden states this rank holds between the tensor-parallel matrices."""
        return -(-self.tokens // self.tp) if self.sequence_parallel else self.tokens

    @property
    def is_gathered(self) -> bool:
        """Whether attention reads copies of keys and values, because ranks gather them (cp > 1) or responses share a prompt."""
        return self.cp > 1 or self.keys_per_token > 1

    @property
    def key_rows(self) -> int:
        """Number of rows of keys that attention reads.

        Context parallelism cuts a sequence into 2 cp chunks. A rank has two of the chunks. The queries of both chunks
        together read 2 cp + 1 chunks of keys.
        """
        read_ratio = 1 + 1 / (2 * self.cp) if self.cp > 1 else 1  # chunks of keys that are read / (2 cp)
        return int(self.tokens * self.cp * self.keys_per_token * read_ratio)

    def input_bytes(self, numel: int) -> int:
        """Return the bytes of the saved input of a matrix. `numel`: number of elements of an input that only the matrix saves."""
        if not self.fp8:
            return numel * self.itemsize
        return numel + (0 if self.fp8 == "tensorwise" else -(-numel // SCALED_NUMBERS))

    def expert_rows(self, topk: int) -> int:
        """Return the number of rows that reach the rank's experts if the router chooses `topk` experts for each token."""
        return int(self.rows * topk * self.etp * self.imbalance)


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters on one trainer rank."""

    shape: ModelShape  # see ModelShape.of_adapters
    num_experts: int  # number of routed experts on this rank


@lru_cache(maxsize=65536)
def layer_bytes(
    shape: ModelShape,
    kind: LayerKind,
    batch: MicroBatchShape,
    recomputed: frozenset[str] = frozenset(),
    adapters: Adapters | None = None,
) -> int:
    """Return the bytes that one layer saves. `recomputed`: Megatron's names of the recomputed modules."""
    first_half = recurrent_bytes(shape, batch) if kind.recurrent else attention_bytes(shape, batch, recomputed)
    second_half = expert_bytes if kind.experts else mlp_bytes
    parts = first_half | second_half(shape, batch, recomputed)
    parts |= adapter_bytes(shape, kind, batch, recomputed, adapters) if adapters else {}
    return sum(parts.values())


def adapter_bytes(
    shape: ModelShape, kind: LayerKind, batch: MicroBatchShape, recomputed: frozenset[str], adapters: Adapters
) -> BytesByTensor:
    """Return the bytes that the LoRA adapters of a layer save (parallel.lora), without the inputs of their linear layers.

    The other functions count these inputs: a linear layer whose weight is frozen does not save its input, but its adapter does.
    The adapter also saves A and B, each combined from all adapted matrices of the linear layer, and the product A x.
    """
    e, of_model = batch.itemsize, {p.name: p for p in shape.parameters}
    saved: Counter[str] = Counter()
    for linear, of_a, of_b in _adapted_layers(adapters.shape, kind):
        if _is_recomputed(linear, kind, recomputed):
            continue
        is_expert = of_a[0].location == "expert"
        ranks = batch.etp if is_expert else batch.tp
        width = sum(p.shape[0] for p in of_a)  # rows of A, of all matrices together
        inputs = of_a[0].shape[1] // (ranks if of_a[0].is_sharded else 1)
        outputs = of_model[f"{linear}.weight"].shape[0] // (ranks if of_b[0].is_sharded else 1)
        rows = batch.tokens if of_b[0].is_sharded else batch.rows
        saved["A and B"] += (adapters.num_experts if is_expert else 1) * width * (inputs + outputs) * e
        saved["A x"] += (batch.expert_rows(shape.topk) if is_expert else rows) * width * e
        if f"{linear}.layer_norm_weight" in of_model:  # the adapter computes the norm of its linear layer again
            is_copied = shape.zero_centered_norms and e < FLOAT32_BYTES
            saved["norms of adapters"] += batch.rows * (STATISTIC_BYTES + inputs * FLOAT32_BYTES * is_copied)
    return dict(saved)


def _adapted_layers(
    adapters: ModelShape, kind: LayerKind
) -> list[tuple[str, list[ParameterShape], list[ParameterShape]]]:
    """Return, for each linear layer with an adapter in a layer of this kind: its name, its matrices A, and its matrices B."""
    found: dict[str, tuple[list[ParameterShape], list[ParameterShape]]] = {}
    for p in adapters.parameters:
        if p.present_in in kind.present:
            of_a, of_b = found.setdefault(p.name.partition(".lora.")[0], ([], []))
            (of_a if p.name.endswith("lora_a") else of_b).append(p)
    return [(linear, *matrices) for linear, matrices in found.items()]


def _is_recomputed(linear: str, kind: LayerKind, recomputed: frozenset[str]) -> bool:
    """Whether a linear layer belongs to a module that is recomputed."""
    if not linear.startswith("mlp."):
        return "mla_up_proj" in recomputed and linear.endswith("_up_proj")
    if "shared_experts" in recomputed and linear.startswith("mlp.shared_experts."):
        return True
    return ("moe" if kind.experts else "mlp") in recomputed


def attention_bytes(
    shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str] = frozenset()
) -> BytesByTensor:
    """Return the bytes that the attention of a layer saves. They include the norm before the attention."""
    e = batch.itemsize
    saved = _norms_bytes("attention", shape, batch)
    saved["attention's input"] = batch.input_bytes(batch.rows * shape.hidden)
    if shape.has_latent_attention and batch.fp8:  # two matrices have copies of it
        saved["attention's input"] *= 2
    if shape.has_latent_attention and "layernorm" in recomputed:
        del saved["attention's input"]
    saved |= (_latent_attention if shape.has_latent_attention else _grouped_attention)(shape, batch, recomputed)
    width = shape.num_heads * shape.value_dim // batch.tp
    saved["attention output"] = batch.tokens * width * e
    if shape.output_gate:
        saved["output gates"] = batch.tokens * width * max(e, FLOAT32_BYTES)
        saved["gated attention output"] = batch.tokens * width * e
    if "core_attn" not in recomputed:
        saved["softmax statistics"] = batch.tokens * shape.num_heads // batch.tp * STATISTIC_BYTES
    if shape.dropout:
        saved["dropout masks"] = 2 * batch.rows * shape.hidden
    return saved


def _grouped_attention(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str]) -> BytesByTensor:
    """Return the bytes that grouped-query attention saves for queries, keys and values.

    A saved view of the fused QKV projection keeps the whole projection in memory.
    """
    e, s, d = batch.itemsize, batch.tokens, shape.head_dim
    q, kv = shape.num_heads * d // batch.tp, shape.num_kv_heads * d // batch.tp
    keys = batch.key_rows
    saved: BytesByTensor = {}
    several_groups = shape.num_kv_heads // batch.tp > 1
    reads_views = not several_groups if shape.projection_norms else shape.qk_norm
    if reads_views or not batch.is_gathered:  # views of the projection are saved: inputs of the norms, or values
        saved["qkv projection"] = s * (q * (1 + shape.output_gate) + 2 * kv) * e
    if shape.projection_norms:
        saved["inputs of the projection norms"] = s * (q + kv) * e if several_groups else 0
        saved["statistics of the projection norms"] = 2 * s * STATISTIC_BYTES
    if shape.qk_norm:
        heads = (shape.num_heads + shape.num_kv_heads) // batch.tp
        is_copy = several_groups and shape.num_heads > shape.num_kv_heads
        # If the input is a view, the bytes of the projection include it.
        saved["query norm's input"] = s * q * e if is_copy else 0
        normalized = 0 if batch.kernels.fused_norm else s * (q + kv) * e
        saved["qk norm statistics"] = s * heads * STATISTIC_BYTES + normalized
    if shape.rotary_dim:
        saved["rotated queries"] = s * q * e
        saved["rotated keys"] = keys * kv * e
        saved["rotary tables"] = 4 * s * shape.rotary_dim * e
    if batch.is_gathered:
        saved["gathered values"] = keys * kv * e
        saved["attention output in token order"] = s * q * e
        saved["attention output per sequence"] = 0 if batch.kernels.grouped_attention else s * q * e
    if not batch.kernels.grouped_attention and shape.num_heads > shape.num_kv_heads:
        saved["rotated keys"] = saved["gathered values"] = keys * q * e
        if not reads_views:
            saved.pop("qkv projection", None)
    return saved


def recurrent_bytes(shape: ModelShape, batch: MicroBatchShape) -> BytesByTensor:
    """Return the bytes that a gated delta net saves. They include the norm before it.

    parallel.segment_recurrence computes all tokens of the pack, those of other context-parallel ranks included, in float32. The
    estimate assumes that every chunk is full. It does not count the tokens that the convolution reads before each segment.
    """
    sizes = shape.recurrence
    assert sizes is not None, "the model has no recurrent layers"
    e, wide = batch.itemsize, max(batch.itemsize, FLOAT32_BYTES)
    heads, tokens = sizes.value_heads // batch.tp, batch.tokens * batch.cp
    keys, values = tokens * heads * sizes.key_dim * wide, tokens * heads * sizes.value_dim * wide
    channels = (2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim) // batch.tp
    own_values = batch.tokens * heads * sizes.value_dim
    saved = _norms_bytes("attention", shape, batch)
    saved["attention's input"] = batch.rows * shape.hidden * e
    saved["convolution"] = 2 * tokens * channels * e  # its input and its output
    saved["queries and keys"] = 3 * keys  # queries, keys and normalized keys
    saved["values"] = values
    # norms of queries and keys, betas, decays before and after the softplus, cumulative decays
    saved["numbers of heads"] = 7 * tokens * heads * wide
    saved["chunks of queries and keys"] = 3 * keys
    saved["pairs of tokens in a chunk"] = 5 * tokens * RECURRENT_CHUNK * heads * wide
    saved["solved systems"] = keys + values
    saved["reads and writes"] = 2 * keys + values
    saved["states"] = -(-tokens // RECURRENT_CHUNK) * heads * sizes.key_dim * sizes.value_dim * wide
    saved |= norm_bytes("gated", sizes.value_dim, batch.tokens * heads, batch)
    saved["output gates"] = 2 * own_values * wide
    saved["gated output"] = 2 * own_values * e  # before and after the multiplication by the gate
    return saved


def _latent_attention(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str]) -> BytesByTensor:
    """Return the bytes that multi-head latent attention saves: compressed vectors and their up-projections."""
    e, s, r = batch.itemsize, batch.tokens, batch.rows
    heads = shape.num_heads // batch.tp
    # The recomputation needs the compressed vectors themselves.
    input_bytes = replace(batch, fp8="").input_bytes if "mla_up_proj" in recomputed else batch.input_bytes
    saved: BytesByTensor = {}
    if shape.q_lora:
        saved |= norm_bytes("compressed queries", shape.q_lora, r, batch)
        saved["normalized compressed queries"] = input_bytes(r * shape.q_lora)
    saved |= norm_bytes("compressed keys", shape.kv_lora, r, batch)
    saved["rotary keys of all heads"] = r * shape.rotary_dim * e
    saved["normalized compressed keys"] = input_bytes(r * shape.kv_lora)
    if "mla_up_proj" in recomputed:
        return saved
    keys = batch.key_rows
    saved["rotary tables"] = 4 * s * shape.rotary_dim * e
    saved["queries"] = s * heads * shape.head_dim * e
    saved["keys"] = keys * heads * shape.head_dim * e
    saved["values"] = keys * heads * shape.head_dim * e  # the kernel needs values that are padded to the width of keys
    saved["padded attention output"] = s * heads * shape.head_dim * e
    return saved


def mlp_bytes(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str] = frozenset()) -> BytesByTensor:
    """Return the bytes that the MLP of a dense layer saves. They include the norm before the MLP."""
    if "mlp" in recomputed:
        after = norm_bytes("post-mlp", shape.hidden, batch.rows, batch) if shape.post_norms else {}
        return {"mlp's input": batch.rows * shape.hidden * batch.itemsize} | after
    saved = _norms_bytes("mlp", shape, batch)
    saved["mlp matrix's input"] = batch.input_bytes(batch.rows * shape.hidden)
    return saved | _intermediate_bytes("mlp", shape, batch.tokens, shape.ffn // batch.tp, batch)


def _intermediate_bytes(
    name: str, shape: ModelShape, rows: int, width: int, batch: MicroBatchShape, scaled: bool = False
) -> BytesByTensor:
    """Return the bytes that an MLP saves between its two matrices.

    `width`: intermediate size of the MLP on this rank. `scaled`: each token's activation is multiplied by its router weight.
    """
    projected = {f"{name} projection": rows * width * batch.itemsize * (2 if shape.gated else 1)}
    # Without a fused kernel, these tensors are also saved: silu(gate), up, and the scaled product. With clamped gates, two more
    # tensors are saved: the clamped gate and its sigmoid.
    is_fused = batch.kernels.fused_mlp and shape.fused_activation
    unfused = 0 if is_fused or not shape.gated else 2 + scaled + 2 * shape.clamped_gates
    activation = batch.input_bytes(rows * width) + rows * width * batch.itemsize * unfused
    return projected | {f"{name} activation": activation}


def expert_bytes(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str] = frozenset()) -> BytesByTensor:
    """Return the bytes that the experts of a layer save. They include the norm before the experts, and the router.

    Each token is sent to the ranks of its experts. So the experts' tensors have one row for each token that the rank receives.
    """
    e, r = batch.itemsize, batch.rows
    saved = norm_bytes("mlp", shape.hidden, r, batch)
    saved["mlp norm's output"] = r * shape.hidden * e
    if "moe" in recomputed:
        return saved
    if "layernorm" in recomputed:
        del saved["mlp norm's output"]
    saved |= _routing_bytes(shape, batch)
    received = batch.expert_rows(shape.topk)
    saved["tokens of experts"] = batch.input_bytes(received * shape.hidden) + received * STATISTIC_BYTES
    saved |= _intermediate_bytes("experts", shape, received, shape.moe_ffn // batch.etp, batch, scaled=True)
    if "moe_act" in recomputed:
        del saved["experts activation"]
    if shape.shared_ffn and "shared_experts" not in recomputed:
        saved |= _intermediate_bytes("shared experts", shape, batch.tokens, shape.shared_ffn // batch.tp, batch)
        saved["shared experts gate"] = r * (shape.hidden + 1) * e if shape.shared_gate else 0
    return saved


def _routing_bytes(shape: ModelShape, batch: MicroBatchShape) -> BytesByTensor:
    """Return the bytes of the router: indices and weights of the chosen experts, and the order of the sent tokens.

    A sigmoid router also saves its scores, and a router with groups of experts saves the indices of the groups.
    """
    chosen = shape.topk * (2 * INDEX_BYTES + STATISTIC_BYTES)
    order = shape.num_experts * INDEX_BYTES
    scores = (shape.num_experts * (STATISTIC_BYTES + 1) + STATISTIC_BYTES) if shape.sigmoid_router else 0
    groups = (2 * shape.router_groups + shape.router_groups // 2) * INDEX_BYTES
    return {"routing": batch.rows * (chosen + order + scores + groups)}


def _norms_bytes(name: str, shape: ModelShape, batch: MicroBatchShape) -> BytesByTensor:
    """Return the bytes of the norms before and after a block, without the output of the norm before it."""
    kinds = [f"pre-{name}"] * shape.pre_norms + [f"post-{name}"] * shape.post_norms
    return {
        tensor: size for kind in kinds for tensor, size in norm_bytes(kind, shape.hidden, batch.rows, batch).items()
    }


def norm_bytes(name: str, width: int, rows: int, batch: MicroBatchShape) -> BytesByTensor:
    """Return the bytes of a norm's input and statistics. The module that reads the norm's output counts the output."""
    copies = 1 if batch.kernels.fused_norm else 2
    return {
        f"{name} norm's input": rows * width * batch.itemsize * copies,
        f"{name} norm's statistics": rows * STATISTIC_BYTES,
    }


def bytes_outside_layers(shape: ModelShape, batch: MicroBatchShape, is_first: bool, is_last: bool) -> int:
    """Return the bytes that a virtual stage saves outside of its layers.

    The first stage saves token ids and tensors of the vision tower, and the last stage saves the tensors of the final norm.
    """
    saved = batch.tokens * INDEX_BYTES + sum(tower_bytes(shape.tower, shape.hidden, batch).values()) if is_first else 0
    return saved + (sum(norm_bytes("final", shape.hidden, batch.rows, batch).values()) if is_last else 0)


def tower_bytes(tower: TowerShape | None, width: int, batch: MicroBatchShape) -> BytesByTensor:
    """Return the bytes that the vision tower saves for one pack. `width`: width of the decoder's hidden states.

    A frozen tower saves only its features, which the first decoder layers read.
    """
    if tower is None or not batch.images:
        return {}
    e, patches = batch.itemsize, batch.images * tower.patches
    saved = {"features of the tower": tower.features * batch.rows * width * e}
    if tower.trained:
        saved["pixels"] = patches * tower.values * e
        saved["blocks of the tower"] = tower.blocks * patches * tower_patch_bytes(tower, e)
        saved["mergers of the tower"] = (1 + tower.features) * patches * tower.hidden * (4 * e + FLOAT32_BYTES)
    return saved


def tower_patch_bytes(tower: TowerShape, itemsize: int) -> int:
    """Return the bytes that one block of the vision tower (a module of transformers) saves for one patch, without statistics."""
    # an RMSNorm saves its input in float32 and its normalized input, and a linear layer saves its output
    norm = FLOAT32_BYTES + 2 * itemsize if tower.gated else 2 * itemsize
    # fused queries, keys and values; rotated queries and keys; outputs of each image, and of all images together
    attention = (3 + 2 + 2) * itemsize
    mlp = (4 if tower.gated else 2) * itemsize
    return tower.hidden * (2 * norm + attention) + tower.ffn * mlp


def tower_working_bytes(tower: TowerShape | None, width: int, batch: MicroBatchShape) -> int:
    """Return the temporary bytes while the vision tower computes the images of a pack, in the forward or the backward pass.

    They are the pixel values, one block with float32 copies of queries and keys, and the embeddings and features of the pack.
    """
    if tower is None or not batch.images:
        return 0
    e = batch.itemsize
    block = tower_patch_bytes(tower, e) + 4 * tower.hidden * FLOAT32_BYTES
    return batch.images * tower.patches * (tower.values * e + block) + (1 + tower.features) * batch.tokens * width * e


def virtual_stage_bytes(
    shape: ModelShape,
    batch: MicroBatchShape,
    kinds: tuple[LayerKind, ...],
    recompute: Recompute,
    adapters: Adapters | None = None,
) -> int:
    """Return the bytes that one virtual stage saves for one micro-batch. `kinds`: kind of each layer of the stage."""
    if recompute.granularity != "full":
        modules = recompute.modules if recompute.granularity == "selective" else frozenset()
        return sum(count * layer_bytes(shape, kind, batch, modules, adapters) for kind, count in Counter(kinds).items())
    layer_input = batch.rows * shape.hidden * batch.itemsize
    if recompute.distributed and not batch.sequence_parallel:
        layer_input //= batch.tp
    if recompute.method == "block":
        recomputed = min(recompute.num_layers, len(kinds))
        kept = (layer_bytes(shape, kind, batch, adapters=adapters) for kind in kinds[recomputed:])
        return recomputed * layer_input + sum(kept)
    return -(-len(kinds) // recompute.num_layers) * layer_input
