"""Bytes of the activations that a trainer rank saves for the backward pass of one micro-batch, tensor by tensor.

The count follows Korthikanti et al. 2022 (arXiv:2205.05198), "Reducing Activation Recomputation in Large Transformer Models".
Equation 1 of the paper counts the saved inputs of one layer: 34 s b h bytes without attention scores, for b sequences of s tokens
and hidden states of width h. Equations 2 to 4 divide these inputs over tensor-parallel ranks. Section 5 describes recomputation.
This module counts the saved inputs of the layers that mrl trains (MLPs, grouped and latent attention, recurrences, experts), for
packed sequences. The attention kernels save no scores. So the paper's term 5 a s^2 b (a: attention heads) does not occur.

With FP8, Transformer Engine (2.20) saves the input of a linear layer in FP8 if no other operation saves this input. Such inputs
are the outputs of norms, the activations of MLPs, and the tokens that experts receive. In Megatron (0.19), two linear layers
save their inputs without FP8: the projection of the attention output, whose input the attention also saves, and the first
linear layer of shared experts, whose input the router also saves.

Symbols of this module: s is the number of tokens of a pack on one context-parallel rank. r is the number of tokens whose hidden
states one rank holds between the tensor-parallel matrices, for example in norms: r = s / tp with sequence parallelism, else
r = s. e is the number of bytes of one element of an activation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from mrl.planner.micro_batch_shape import MicroBatchShape, Recompute
from mrl.planner.model_shape import LayerKind, ModelShape, RecurrentShape, TowerShape
from mrl.planner.parameter_shape import FLOAT32_BYTES, ParameterShape
from parallel.trainer_config import MAX_INDEX_PRODUCTS

INDEX_BYTES = 8  # bytes of one int64 index
STATISTIC_BYTES = 4  # bytes of one float32 statistic of a norm or a softmax
RECURRENT_CHUNK = 64  # tokens of a chunk of a recurrence, parallel.segment_recurrence.CHUNK

BytesByTensor = dict[str, int]
"""Name of a saved tensor -> its bytes."""


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
    of_block = dict(attention=attention_bytes, recurrent=recurrent_bytes, dense=mlp_bytes, moe=expert_bytes)
    parts: BytesByTensor = {}
    for block in kind.blocks:
        parts |= of_block[block](shape, batch, recomputed)
    if shape.dropout:
        parts["dropout masks"] = len(kind.blocks) * batch.residual_tokens * shape.hidden
    parts |= adapter_bytes(shape, kind, batch, recomputed, adapters) if adapters else {}
    return sum(parts.values())


def adapter_bytes(
    shape: ModelShape, kind: LayerKind, batch: MicroBatchShape, recomputed: frozenset[str], adapters: Adapters
) -> BytesByTensor:
    """Return the bytes that the LoRA adapters of a layer save (parallel.lora), without the inputs of the adapted linear layers.

    The other functions count these inputs: a linear layer whose weight is frozen does not save its input, but its adapter does.
    The adapter also saves the product A x, and the matrices A and B of the whole linear layer. It combines these two matrices
    from the A and B of each adapted Hugging Face matrix.
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
        rows = batch.tokens if of_b[0].is_sharded else batch.residual_tokens
        saved["A and B"] += (adapters.num_experts if is_expert else 1) * width * (inputs + outputs) * e
        saved["A x"] += (batch.expert_rows(shape.topk) if is_expert else rows) * width * e
        if f"{linear}.layer_norm_weight" in of_model:  # the adapter computes the norm of its linear layer again
            is_copied = shape.zero_centered_norms and e < FLOAT32_BYTES
            saved["norms of adapters"] += batch.residual_tokens * (STATISTIC_BYTES + inputs * FLOAT32_BYTES * is_copied)
    return dict(saved)


def _adapted_layers(
    adapters: ModelShape, kind: LayerKind
) -> list[tuple[str, list[ParameterShape], list[ParameterShape]]]:
    """Return (name, matrices A, matrices B) of each linear layer that has an adapter, for a layer of this kind."""
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
    """Return the bytes that the attention of a layer saves. They include the norms before and after the attention."""
    e = batch.itemsize
    saved = _norms_bytes("attention", shape, batch)
    saved["attention's input"] = batch.input_bytes(batch.residual_tokens * shape.hidden)
    if shape.has_latent_attention and batch.fp8:  # two matrices read the input, and each saves a copy in FP8
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
    saved |= _chosen_keys(shape, batch, recomputed)
    return saved


def _chosen_keys(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str]) -> BytesByTensor:
    """Return the bytes of the mask of the keys that an indexer has chosen. A kernel adds the mask to the logits, and saves it.

    There is no mask if no sequence has more keys than the indexer chooses.
    """
    if not shape.indexer or batch.longest_sequence <= shape.indexer.topk or "core_attn" in recomputed:
        return {}
    return {"mask of chosen keys": batch.pairs * batch.itemsize}


def indexer_working_bytes(shape: ModelShape, batch: MicroBatchShape) -> int:
    """Return the temporary bytes of an indexer while it chooses keys: products of all heads for a block of queries.

    If some layers have no indexer, the result also includes one boolean mask, which these layers read. A training step keeps a
    mask for each indexer whose keys a later layer reads, but the result includes only one mask. The result does not include the
    scores, which are sums over the heads.
    """
    if not shape.indexer or batch.longest_sequence <= shape.indexer.topk:
        return 0
    products = min(MAX_INDEX_PRODUCTS, batch.pairs * shape.indexer.heads) * FLOAT32_BYTES
    return products + (0 if all(shape.indexer.layers) else batch.pairs)


def _grouped_attention(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str]) -> BytesByTensor:
    """Return the bytes that grouped-query attention saves for queries, keys and values.

    A saved view of the fused QKV projection keeps the whole projection in memory.
    """
    e, s, d = batch.itemsize, batch.tokens, shape.head_dim
    # widths of queries, and of keys or values
    q, kv = shape.num_heads * d // batch.tp, shape.num_kv_heads * d // batch.tp
    keys = batch.key_rows
    saved: BytesByTensor = {}
    several_groups = shape.num_kv_heads // batch.tp > 1
    is_copy = several_groups and shape.num_heads > shape.num_kv_heads  # whether the queries are a copy, not a view
    reads_views = not several_groups if shape.qk_norm_over_all_heads else shape.qk_norm_per_head
    if reads_views or not batch.is_gathered:  # views of the projection are saved: inputs of the norms, or values
        saved["qkv projection"] = s * (q * (1 + shape.output_gate) + 2 * kv) * e
    if shape.qk_norm_over_all_heads:
        saved["inputs of the projection norms"] = s * (q + kv) * e if several_groups else 0
        saved["statistics of the projection norms"] = 2 * s * STATISTIC_BYTES
    if shape.qk_norm_per_head:
        heads = (shape.num_heads + shape.num_kv_heads) // batch.tp
        # If the input is a view, the bytes of the projection include this input.
        saved["query norm's input"] = s * q * e if is_copy else 0
        normalized = 0 if batch.kernels.fused_norm else s * (q + kv) * e
        saved["qk norm statistics"] = s * heads * STATISTIC_BYTES + normalized
    if shape.rotary_dim or is_copy:
        saved["rotated queries"] = s * q * e
    if shape.rotary_dim or batch.is_gathered:
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


def recurrent_bytes(
    shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str] = frozenset()
) -> BytesByTensor:
    """Return the bytes that a recurrent layer saves for its recurrence. They include the norms before and after the recurrence.

    parallel.segment_recurrence computes all tokens of the pack in float32, including those of other context-parallel ranks. The
    estimate assumes that every chunk is full. It does not count the tokens that the convolution reads before each segment.
    """
    sizes = shape.recurrence
    assert sizes is not None, "the model has no recurrent layers"
    e, recurrence_itemsize = batch.itemsize, max(batch.itemsize, FLOAT32_BYTES)
    heads, tokens = sizes.value_heads // batch.tp, batch.tokens * batch.cp
    own_values = batch.tokens * heads * sizes.value_dim  # elements of the values of this rank's tokens
    saved = _norms_bytes("attention", shape, batch)
    saved["attention's input"] = batch.residual_tokens * shape.hidden * e
    saved["convolution"] = 2 * tokens * sizes.channels // batch.tp * e  # its input and its output
    saved["states"] = -(-tokens // RECURRENT_CHUNK) * heads * sizes.key_dim * sizes.value_dim * recurrence_itemsize
    saved |= (_mamba_bytes if sizes.is_mamba else _delta_rule_bytes)(sizes, tokens, heads, batch, recurrence_itemsize)
    saved["output gates"] = 2 * own_values * recurrence_itemsize
    saved["gated output"] = 2 * own_values * e  # before and after the multiplication by the gate
    if not sizes.is_mamba:
        return saved | norm_bytes("gated", sizes.value_dim, batch.tokens * heads, batch)
    # Mamba-2 multiplies by the gate, normalizes the heads of a group together in float32, and multiplies by the norm's weight.
    saved["gated norm's input"] = own_values * recurrence_itemsize
    saved["gated norm's statistics"] = batch.tokens * sizes.key_heads // batch.tp * STATISTIC_BYTES
    saved["normalized output"] = own_values * e
    return saved


def _delta_rule_bytes(
    sizes: RecurrentShape, tokens: int, heads: int, batch: MicroBatchShape, recurrence_itemsize: int
) -> BytesByTensor:
    """Return the bytes of the gated delta rule. `tokens`: number of tokens of the pack. `heads`: value heads of this rank."""
    keys, values = (
        tokens * heads * sizes.key_dim * recurrence_itemsize,
        tokens * heads * sizes.value_dim * recurrence_itemsize,
    )
    return {
        "queries and keys": 3 * keys,  # queries, keys and normalized keys
        "values": values,
        # norms of queries and keys, betas, numbers before and after the softplus, decays from the start and to the end of a chunk
        "numbers of heads": 7 * tokens * heads * recurrence_itemsize,
        "chunks of queries and keys": 3 * keys,
        "pairs of tokens in a chunk": 5 * tokens * RECURRENT_CHUNK * heads * recurrence_itemsize,
        "solved systems": keys + values,
        "reads and writes": 2 * keys + values,
    }


def _mamba_bytes(
    sizes: RecurrentShape, tokens: int, heads: int, batch: MicroBatchShape, recurrence_itemsize: int
) -> BytesByTensor:
    """Return the bytes of the recurrence of Mamba-2. `tokens`: number of tokens of the pack. `heads`: heads of this rank."""
    groups = sizes.key_heads // batch.tp
    keys, values = (
        tokens * groups * sizes.key_dim * recurrence_itemsize,
        tokens * heads * sizes.value_dim * recurrence_itemsize,
    )
    return {
        "chunks of queries and keys": 2 * keys,
        # values; values in chunks; values times decays; outputs of the states; values by head, if groups have several heads
        "values": (4 + (heads > groups)) * values,
        # numbers before and after the softplus, decays to the end and from the start of a chunk
        "numbers of heads": 4 * tokens * heads * recurrence_itemsize,
        "pairs of tokens in a chunk": (2 * heads + groups) * tokens * RECURRENT_CHUNK * recurrence_itemsize,
    }


def _latent_attention(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str]) -> BytesByTensor:
    """Return the bytes that multi-head latent attention saves: compressed vectors and their up-projections."""
    e, s, r = batch.itemsize, batch.tokens, batch.residual_tokens
    heads = shape.num_heads // batch.tp
    # The recomputation needs the compressed vectors without FP8.
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
    """Return the bytes that the MLP of a dense layer saves. They include the norms before and after the MLP."""
    if "mlp" in recomputed:
        after = norm_bytes("post-mlp", shape.hidden, batch.residual_tokens, batch) if shape.post_norms else {}
        return {"mlp's input": batch.residual_tokens * shape.hidden * batch.itemsize} | after
    saved = _norms_bytes("mlp", shape, batch)
    saved["mlp matrix's input"] = batch.input_bytes(batch.residual_tokens * shape.hidden)
    return saved | _intermediate_bytes("mlp", shape, batch.tokens, shape.ffn // batch.tp, batch)


def _intermediate_bytes(
    name: str, shape: ModelShape, rows: int, width: int, batch: MicroBatchShape, scaled: bool = False
) -> BytesByTensor:
    """Return the bytes that an MLP saves between its two matrices.

    `width`: intermediate size of the MLP on this rank. `scaled`: whether activations are multiplied by router weights.
    """
    projected = {f"{name} projection": rows * width * batch.itemsize * (2 if shape.gated else 1)}
    # Without a fused kernel, these tensors are also saved: silu(gate), up, and the scaled product. With clamped gates, two more
    # tensors are saved: the clamped gate and its sigmoid. Without gates, the output of ReLU is saved in place of the projection.
    is_fused = batch.kernels.fused_mlp and shape.fused_activation
    unfused = 0 if is_fused else scaled + (2 + 2 * shape.clamped_gates) * shape.gated
    activation = batch.input_bytes(rows * width) + rows * width * batch.itemsize * unfused
    return projected | {f"{name} activation": activation}


def expert_bytes(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str] = frozenset()) -> BytesByTensor:
    """Return the bytes that the experts of a layer save. They include the norm before the experts, and the router.

    Each token is sent to the ranks of its experts. So the experts' tensors have one row for each token that the rank receives.
    """
    e, r = batch.itemsize, batch.residual_tokens
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

    A sigmoid router also saves its scores, and a router with groups of experts saves a mask and the indices of the groups.
    """
    chosen = shape.topk * (2 * INDEX_BYTES + STATISTIC_BYTES)
    order = shape.num_experts * INDEX_BYTES
    masked = shape.router_groups > 0  # the scores of experts outside the chosen groups are masked
    scores = (shape.num_experts * (STATISTIC_BYTES + masked) + STATISTIC_BYTES) if shape.sigmoid_router else 0
    groups = (2 * shape.router_groups + shape.router_groups // 2) * INDEX_BYTES
    return {"routing": batch.residual_tokens * (chosen + order + scores + groups)}


def _norms_bytes(name: str, shape: ModelShape, batch: MicroBatchShape) -> BytesByTensor:
    """Return the bytes of the norms before and after a block, without the output of the norm before the block."""
    kinds = [f"pre-{name}"] * shape.pre_norms + [f"post-{name}"] * shape.post_norms
    return {
        tensor: size
        for kind in kinds
        for tensor, size in norm_bytes(kind, shape.hidden, batch.residual_tokens, batch).items()
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
    return saved + (sum(norm_bytes("final", shape.hidden, batch.residual_tokens, batch).values()) if is_last else 0)


def mtp_bytes(shape: ModelShape, batch: MicroBatchShape, recompute: Recompute) -> int:
    """Return the bytes that the last stage saves for its MTP layers, inside and outside their decoder layers.

    Outside its decoder layer, an MTP layer saves the tensors of three norms (of the embeddings, of the hidden states, and after
    the decoder layer), and the concatenated outputs of the first two norms. Megatron concatenates the outputs of all MTP layers
    with the hidden states of the model. With full recomputation by `block`, Megatron does not recompute MTP layers.
    """
    if not shape.mtp_layers:
        return 0
    hidden = batch.residual_tokens * shape.hidden * batch.itemsize
    # Outputs of the MTP layers, and their concatenation with the hidden states of the model.
    outputs = (2 * shape.mtp_layers + 1) * hidden
    if recompute.granularity == "full" and recompute.method == "uniform":
        return 2 * shape.mtp_layers * hidden + outputs
    modules = recompute.modules if recompute.granularity == "selective" else frozenset()
    norms = 3 * sum(norm_bytes("mtp", shape.hidden, batch.residual_tokens, batch).values())
    return shape.mtp_layers * (layer_bytes(shape, shape.mtp_kind, batch, modules) + norms + 2 * hidden) + outputs


def tower_bytes(tower: TowerShape | None, width: int, batch: MicroBatchShape) -> BytesByTensor:
    """Return the bytes that the vision tower saves for one pack. `width`: width of the decoder's hidden states.

    A frozen tower saves only its features, which the first decoder layers read.
    """
    if tower is None or not batch.images:
        return {}
    e, patches = batch.itemsize, batch.images * tower.patches
    saved = {"features of the tower": tower.num_feature_layers * batch.residual_tokens * width * e}
    if tower.trained:
        saved["pixels"] = patches * tower.values * e
        saved["blocks of the tower"] = tower.blocks * patches * tower_patch_bytes(tower, e)
        saved["mergers of the tower"] = (
            (1 + tower.num_feature_layers) * patches * tower.hidden * (4 * e + FLOAT32_BYTES)
        )
    return saved


def tower_patch_bytes(tower: TowerShape, itemsize: int) -> int:
    """Return the bytes that one block of the vision tower (a module of transformers) saves for one patch, without statistics."""
    # an RMSNorm saves its input in float32 and its normalized input; the linear layer after a norm saves the norm's output
    norm = FLOAT32_BYTES + 2 * itemsize if tower.gated else 2 * itemsize
    # fused queries, keys and values; rotated queries and keys; outputs of each image, and of all images together
    attention = (3 + 2 + 2) * itemsize
    mlp = (4 if tower.gated else 2) * itemsize
    return tower.hidden * (2 * norm + attention) + tower.ffn * mlp


def tower_working_bytes(tower: TowerShape | None, width: int, batch: MicroBatchShape) -> int:
    """Return the temporary bytes while the vision tower computes the images of a pack, in the forward or the backward pass.

    The result includes the pixel values, one block with float32 copies of queries and keys, and the embeddings and features.
    """
    if tower is None or not batch.images:
        return 0
    e = batch.itemsize
    block = tower_patch_bytes(tower, e) + 4 * tower.hidden * FLOAT32_BYTES
    return (
        batch.images * tower.patches * (tower.values * e + block)
        + (1 + tower.num_feature_layers) * batch.tokens * width * e
    )


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
    layer_input = batch.residual_tokens * shape.hidden * batch.itemsize
    if recompute.distributed and not batch.sequence_parallel:
        layer_input //= batch.tp
    if recompute.method == "block":
        recomputed = min(recompute.num_layers, len(kinds))
        kept = (layer_bytes(shape, kind, batch, adapters=adapters) for kind in kinds[recomputed:])
        return recomputed * layer_input + sum(kept)
    return -(-len(kinds) // recompute.num_layers) * layer_input
