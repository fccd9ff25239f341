"""Transfer plans: engine layouts equal shards that are cut by hand, and plans are executed on plain tensors."""

import ast
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_families import FAMILIES
from tiny_families import SIZES as TINY_SIZES

from models.architecture import Architecture
from models.conversion.mapping import Box
from models.families.gemma3 import GEMMA3
from models.families.gpt_oss import GPT_OSS
from models.families.minimax_m2 import MINIMAX_M2
from models.families.mixtral import MIXTRAL
from models.families.phi3 import PHI3
from models.families.qwen import QWEN3, QWEN3_MOE
from models.families.qwen3_next import QWEN3_5, QWEN3_NEXT
from models.hf_config import HFConfig
from mrl.weight_sync.engine_layout import VOCAB_PADDING, EngineLayout, EngineParallelSizes
from mrl.weight_sync.transfer_plan import (
    Bucket,
    LinkSpeeds,
    TensorChunk,
    TransferPlan,
    compile_transfer_plan,
    estimate_transfer_cost,
    even_pipeline_stages,
    trainer_shards,
)
from parallel.dims import ParallelDims
from parallel.rope import Rope

LAYERS, KV_HEADS, EXPERTS, VOCAB = 4, 2, 4, 41
SIZES = dict(vocab=VOCAB, hidden=8, ffn=16, q=8 * 4, kv=KV_HEADS * 4, head_dim=4, experts=EXPERTS, moe_ffn=8)
MOE = dict(num_moe_experts=EXPERTS, moe_layer_freq=[0, 1, 1, 1])
BYTES = {"float32": 4, "bfloat16": 2}
DENSE = (QWEN3, PHI3, GEMMA3)


def architecture(family, tied=False) -> Architecture:
    moe = {} if family in DENSE else MOE if family is QWEN3_MOE else MOE | dict(moe_layer_freq=[1] * LAYERS)
    transformer = dict(num_layers=LAYERS, num_attention_heads=8, num_query_groups=KV_HEADS, **moe)
    return Architecture(VOCAB, 64, Rope(rope_theta=1e4, dim=4), tied, transformer, SIZES)


def tensors_of(family, arch) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in family.hf_shapes(arch).items()}


def engine_parameters(layout, rank, tensors) -> dict[str, torch.Tensor]:
    """Return the parameters of one engine rank, filled from whole tensors as its layout says."""
    filled = {name: torch.zeros(shape) for name, shape in layout.param_shapes(rank).items()}
    for shard in layout.shards(rank):
        box = shard.box_in_param(shard.box)
        filled[shard.param][box.slices] = tensors[shard.name][shard.box.slices].view(box.sizes)
    return filled


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_fuses_its_shards_of_dense_projections(tp):
    arch = architecture(QWEN3)
    tensors = tensors_of(QWEN3, arch)
    q, k, v, o, gate, up = (
        tensors[f"model.layers.1.{name}_proj.weight"]
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    )
    layout = EngineLayout.of(QWEN3, arch, EngineParallelSizes(tp))
    for rank in range(tp):
        filled = engine_parameters(layout, rank, tensors)
        heads = min(tp, KV_HEADS)  # with more ranks than key/value heads, several ranks hold the same head
        mine = [t.chunk(n)[rank * n // tp] for t, n in ((q, tp), (k, heads), (v, heads))]
        assert torch.equal(filled["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(mine))
        assert torch.equal(filled["model.layers.1.self_attn.o_proj.weight"], o.chunk(tp, 1)[rank])
        both = torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
        assert torch.equal(filled["model.layers.1.mlp.gate_up_proj.weight"], both)
        assert torch.equal(filled["model.norm.weight"], tensors["model.norm.weight"])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_holds_its_shards_of_the_sections_of_a_fused_tensor(tp):
    arch = architecture(PHI3)
    tensors = tensors_of(PHI3, arch)
    stored = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"
    q, k, v = tensors[stored[0]].split([SIZES["q"], SIZES["kv"], SIZES["kv"]])
    gate, up = tensors[stored[1]].chunk(2)
    layout = EngineLayout.of(PHI3, arch, EngineParallelSizes(tp))
    for rank in range(tp):
        filled, heads = engine_parameters(layout, rank, tensors), min(tp, KV_HEADS)
        mine = [t.chunk(n)[rank * n // tp] for t, n in ((q, tp), (k, heads), (v, heads))]
        assert torch.equal(filled[stored[0]], torch.cat(mine))
        assert torch.equal(filled[stored[1]], torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]))


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("family", [QWEN3_MOE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_expert_weights_are_stacked_and_sharded_as_in_the_engine(family, tp, ep):
    """w13 [E, 2 * ffn, hidden] has the rank's rows of gate, then its rows of up. w2 [E, hidden, ffn] has its columns of down.

    With ep=2 and tp=4, ranks 0 and 1 share the first half of the experts.
    """
    arch = architecture(family)
    tensors = tensors_of(family, arch)
    block, parts = ("mlp", ("gate_proj", "up_proj", "down_proj"))
    if family is MIXTRAL:
        block, parts = "block_sparse_moe", ("w1", "w3", "w2")
    prefix = f"model.layers.1.{block}.experts."
    gate, up, down = (torch.stack([tensors[f"{prefix}{e}.{p}.weight"] for e in range(EXPERTS)]) for p in parts)
    size, count, cuts = 8 * ep // tp, EXPERTS // ep, tp // ep
    layout = EngineLayout.of(family, arch, EngineParallelSizes(tp, ep))
    for rank in range(tp):
        filled = engine_parameters(layout, rank, tensors)
        group, cut = rank // cuts, rank % cuts
        whole, mine = slice(group * count, (group + 1) * count), slice(cut * size, (cut + 1) * size)
        assert torch.equal(filled[f"{prefix}w13_weight"], torch.cat([gate[whole, mine], up[whole, mine]], 1))
        assert torch.equal(filled[f"{prefix}w2_weight"], down[whole, :, mine])


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(6, 2, 3), (6, 3, 2), (3, 3, 2), (12, 3, 4)])
def test_an_engine_tp_that_does_not_divide_the_heads_is_refused(heads, kv_heads, tp):
    arch = architecture(QWEN3)
    arch = replace(arch, transformer=arch.transformer | dict(num_attention_heads=heads, num_query_groups=kv_heads))
    message = (
        f"{tp} ranks cannot share {heads} query heads and {kv_heads} key/value heads evenly; use a number of ranks that "
        "divides the query heads, and that divides the key/value heads or is a multiple of them"
    )
    with pytest.raises(ValueError, match=message):
        EngineLayout.of(QWEN3, arch, EngineParallelSizes(tp))


def test_each_data_parallel_attention_group_holds_the_whole_attention():
    arch = architecture(QWEN3)
    tensors = tensors_of(QWEN3, arch)
    layout, alone = (
        EngineLayout.of(QWEN3, arch, EngineParallelSizes(4, dp=2)),
        EngineLayout.of(QWEN3, arch, EngineParallelSizes(2)),
    )
    whole, mlp = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.down_proj.weight"
    for rank in range(4):
        mine = engine_parameters(layout, rank, tensors)
        assert torch.equal(mine[whole], engine_parameters(alone, rank % 2, tensors)[whole])
        assert torch.equal(mine[mlp], tensors[mlp].chunk(4, 1)[rank])


def test_the_embedding_of_gemma_3_is_whole_on_every_rank():
    arch, name = architecture(GEMMA3, tied=True), "model.embed_tokens.weight"
    tensors = tensors_of(GEMMA3, arch)
    layout = EngineLayout.of(GEMMA3, arch, EngineParallelSizes(2))
    assert all(torch.equal(engine_parameters(layout, rank, tensors)[name], tensors[name]) for rank in range(2))


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_engines_stack_the_experts_of_gpt_oss_with_alternating_rows(ep):
    """With ep=tp, each rank has whole experts. Biases are float32."""
    arch = GPT_OSS.read(
        HFConfig("config.json", TINY_SIZES | FAMILIES["gpt_oss"][1] | dict(architectures=[GPT_OSS.architecture]))
    )
    tensors, prefix = tensors_of(GPT_OSS, arch), "model.layers.1.mlp.experts."
    layout = EngineLayout.of(GPT_OSS, arch, EngineParallelSizes(ep, ep))
    fused = dict(gate_up_proj="w13_weight", gate_up_proj_bias="w13_weight_bias")
    fused |= dict(down_proj="w2_weight", down_proj_bias="w2_weight_bias")
    for rank in range(ep):
        filled, mine = engine_parameters(layout, rank, tensors), range(rank * 4 // ep, (rank + 1) * 4 // ep)
        for name, param in fused.items():
            assert torch.equal(filled[prefix + param], torch.stack([tensors[f"{prefix}{e}.{name}"] for e in mine]))
            is_bias = param.endswith("_bias")
            assert layout.dtype_of(prefix + param, "bfloat16") == ("float32" if is_bias else "bfloat16")
        sinks = tensors["model.layers.1.self_attn.sinks"].chunk(ep)[rank]
        assert torch.equal(filled["model.layers.1.self_attn.sinks"], sinks)


def test_the_router_of_minimax_is_float32():
    layout, block = (
        EngineLayout.of(MINIMAX_M2, architecture(MINIMAX_M2), EngineParallelSizes()),
        "model.layers.1.block_sparse_moe",
    )
    dtypes = {name: layout.dtype_of(name, "bfloat16") for name in layout.param_shapes(0) if name.startswith(block)}
    assert {name.removeprefix(f"{block}.") for name, dtype in dtypes.items() if dtype == "float32"} == {
        "gate.weight",
        "e_score_correction_bias",
    }


def recurrent(family, name) -> Architecture:
    """Return a tiny model with a gated delta net in layer 0 and attention in layer 1."""
    return family.read(
        HFConfig("config.json", TINY_SIZES | FAMILIES[name][1] | dict(architectures=[family.architecture]))
    )


@pytest.mark.parametrize(("family", "name"), [(QWEN3_5, "qwen3_5"), (QWEN3_NEXT, "qwen3_next")])
def test_the_decays_of_gated_delta_nets_are_float32(family, name):
    layout = EngineLayout.of(family, recurrent(family, name), EngineParallelSizes(2))
    in_float32 = [param for param in layout.param_shapes(0) if layout.dtype_of(param, "bfloat16") == "float32"]
    assert in_float32 == ["model.layers.0.linear_attn.A_log"]


def attributes(file: str, name: str) -> set[str]:
    """Return the names of the attributes that the methods of a class in SGLang's model code set."""
    tree = ast.parse(Path(find_spec("sglang").submodule_search_locations[0], "srt", "models", file).read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    targets = [target for node in ast.walk(found) if isinstance(node, ast.Assign) for target in node.targets]
    return {target.attr for target in targets if isinstance(target, ast.Attribute)}


@pytest.mark.parametrize(
    ("family", "name", "file", "prefix"),
    [(QWEN3_5, "qwen3_5", "qwen3_5.py", "Qwen3_5"), (QWEN3_NEXT, "qwen3_next", "qwen3_next.py", "Qwen3Hybrid")],
)
def test_layers_of_models_with_gated_delta_nets_have_the_modules_of_sglang(family, name, file, prefix):
    """The attention of such a model has no module of its own: its projections and norms are modules of the layer."""
    layout = EngineLayout.of(family, recurrent(family, name), EngineParallelSizes())
    for layer, kind in enumerate(("Linear", "Attention")):
        params = [param.split(".") for param in layout.param_shapes(0) if param.startswith(f"model.layers.{layer}.")]
        modules = {param[3] for param in params}
        assert modules <= attributes(file, f"{prefix}{kind}DecoderLayer")
        assert modules >= ({"linear_attn"} if kind == "Linear" else {"qkv_proj", "o_proj", "q_norm", "k_norm"})


def test_each_rank_fuses_its_heads_of_the_projections_of_gated_delta_nets():
    arch, block = recurrent(QWEN3_5, "qwen3_5"), "model.layers.0.linear_attn"
    tensors, layout = tensors_of(QWEN3_5, arch), EngineLayout.of(QWEN3_5, arch, EngineParallelSizes(2))
    keys, values = arch.sizes["gdn_k"], arch.sizes["gdn_v"]
    for rank in range(2):
        mine = engine_parameters(layout, rank, tensors)
        sections = tensors[f"{block}.in_proj_qkv.weight"].split([keys, keys, values])
        parts = [part.chunk(2)[rank] for part in (*sections, tensors[f"{block}.in_proj_z.weight"])]
        assert torch.equal(mine[f"{block}.in_proj_qkvz.weight"], torch.cat(parts))
        sections = tensors[f"{block}.conv1d.weight"].split([keys, keys, values])
        assert torch.equal(mine[f"{block}.conv1d.weight"], torch.cat([part.chunk(2)[rank] for part in sections]))


def test_vocabulary_rows_are_padded_before_they_are_sharded():
    arch = architecture(QWEN3)
    tensors = tensors_of(QWEN3, arch)
    padded = torch.cat([tensors["lm_head.weight"], torch.zeros(VOCAB_PADDING - VOCAB, 8)])
    layout = EngineLayout.of(QWEN3, arch, EngineParallelSizes(2))
    ranks = [engine_parameters(layout, rank, tensors)["lm_head.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(ranks), padded) and len(ranks[0]) == len(ranks[1])


def test_tied_embeddings_also_fill_the_engines_copy_as_output_layer():
    arch = architecture(QWEN3, tied=True)
    tensors = tensors_of(QWEN3, arch)
    layout = EngineLayout.of(QWEN3, arch, EngineParallelSizes(1))
    assert "lm_head.weight" not in layout.param_shapes(0)
    filled = engine_parameters(layout.with_output_copy(), 0, tensors)
    assert torch.equal(filled["lm_head.weight"], filled["model.embed_tokens.weight"])


def test_expert_projections_are_not_confused_with_those_of_a_dense_mlp():
    names = EngineLayout.of(QWEN3_MOE, architecture(QWEN3_MOE), EngineParallelSizes()).engine_names
    dense, moe = "model.layers.0.mlp.", "model.layers.1.mlp."
    assert names[f"{dense}up_proj.weight"] == (
        f"{dense}gate_up_proj.weight",
        (f"{dense}gate_proj.weight", f"{dense}up_proj.weight"),
    )
    expert = f"{moe}experts.1."
    assert names[f"{expert}up_proj.weight"] == (
        f"{moe}experts.w13_weight",
        (f"{expert}gate_proj.weight", f"{expert}up_proj.weight"),
    )
    assert names[f"{moe}gate.weight"] == (f"{moe}gate.weight", (f"{moe}gate.weight",))


dims_of = st.builds(
    dict,
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    vpp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 3]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([None, 1, 2]),
)


def trainer_dims(axes, family) -> ParallelDims:
    """Return the dims if Megatron accepts these sizes. Hypothesis skips all other sizes."""
    if family in (QWEN3, PHI3):
        axes = axes | dict(ep=1, etp=None)
    if axes["pp"] == 1:
        axes = axes | dict(vpp=1)
    try:
        return ParallelDims(**axes)
    except ValueError:
        assume(False)
        raise


@settings(max_examples=60)
@given(
    axes=dims_of,
    family=st.sampled_from([QWEN3, QWEN3_MOE, MIXTRAL, PHI3]),
    parallel_sizes=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]),
    num_engines=st.integers(1, 3),
    bucket_bytes=st.sampled_from([64, 400, 10_000, 1 << 20]),
    dtype=st.sampled_from(list(BYTES)),
    tied=st.booleans(),
)
def test_every_engine_rank_receives_every_byte_once_from_a_rank_that_has_it(
    axes, family, parallel_sizes, num_engines, bucket_bytes, dtype, tied
):
    dims, arch = trainer_dims(axes, family), architecture(family, tied)
    tensors, rows = tensors_of(family, arch), family.param_mappings(arch)
    layout = EngineLayout.of(family, arch, EngineParallelSizes(*parallel_sizes))
    shards = trainer_shards(rows, SIZES, dims, even_pipeline_stages(LAYERS, dims))
    plan = compile_transfer_plan(shards, layout, num_engines, lambda _: (dtype, BYTES[dtype]), bucket_bytes)
    assert all(0 < b.nbytes <= bucket_bytes + 16 * len(b.chunks) for b in plan.buckets)
    for bucket in plan.buckets:
        for chunk in bucket.chunks:
            sources = [s for s in shards[chunk.name] if s.box.intersect(chunk.box) == chunk.box]
            assert len(sources) == 1 and bucket.sender in sources[0].ranks, "senders send only what they have"
    received = 0
    for engine_rank in range(num_engines * parallel_sizes[0]):
        filled = {n: torch.full(s, torch.nan) for n, s in layout.param_shapes(engine_rank % parallel_sizes[0]).items()}
        for bucket, destinations in plan.buckets_of_receiver(engine_rank):
            for chunk, destination in zip(bucket.chunks, destinations, strict=True):
                target = filled[destination.param][destination.box.slices]
                assert target.isnan().all(), "nothing arrives twice"
                target.copy_(tensors[chunk.name][chunk.box.slices].view(destination.box.sizes))
                received += chunk.nbytes
        for name, expected in engine_parameters(layout, engine_rank % parallel_sizes[0], tensors).items():
            assert torch.equal(filled[name].nan_to_num(0.0), expected), name
    assert received == plan.min_bytes


@pytest.mark.parametrize("family", [QWEN3, QWEN3_MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_replicas_divide_the_sending_evenly(family, dp):
    """Every rank sends, and two ranks of a stage differ by at most two chunks."""
    axes = dict(tp=2, pp=2, dp=dp, **(dict(ep=2, etp=1) if family is QWEN3_MOE else {}))
    dims, arch = ParallelDims(**axes), architecture(family)
    shards = trainer_shards(family.param_mappings(arch), SIZES, dims, even_pipeline_stages(LAYERS, dims))
    plan = compile_transfer_plan(
        shards, EngineLayout.of(family, arch, EngineParallelSizes(2)), 1, lambda _: ("float32", 4), 1 << 20
    )
    load = defaultdict(int)
    for bucket in plan.buckets:
        load[bucket.sender] += bucket.nbytes
    largest = max(chunk.nbytes for bucket in plan.buckets for chunk in bucket.chunks)
    # Stages have different layers. Replicas share the sending. Tensor-parallel ranks share the sending of unsharded tensors.
    for stage in range(2):
        loads = [load[rank] for rank in range(dims.world_size) if dims.coords(rank).pp == stage]
        assert min(loads) > 0 and max(loads) - min(loads) <= 2 * largest


def test_the_order_of_buckets_cannot_deadlock():
    """A sender has two buffers, and a receiver takes one bucket at a time in the order of the plan. Every bucket arrives."""
    dims, arch = ParallelDims(tp=2, pp=2, dp=2, ep=2), architecture(QWEN3_MOE)
    shards = trainer_shards(QWEN3_MOE.param_mappings(arch), SIZES, dims, even_pipeline_stages(LAYERS, dims))
    plan = compile_transfer_plan(
        shards, EngineLayout.of(QWEN3_MOE, arch, EngineParallelSizes(2, 2)), 2, lambda _: ("float32", 4), 200
    )
    queues = {rank: [bucket for bucket, _ in plan.buckets_of_receiver(rank)] for rank in range(4)}
    taken: dict[tuple[int, int], set[int]] = defaultdict(set)
    moved = True
    while moved:
        moved = False
        for rank, queue in queues.items():
            if not queue:
                continue
            bucket = queue[0]
            before = [b for b in plan.buckets_of_sender(bucket.sender) if b.index <= bucket.index - 2]
            if all(taken[b.sender, b.index] == set(b.receivers) for b in before):  # the buffer of the bucket is free
                taken[bucket.sender, bucket.index].add(rank)
                queue.pop(0)
                moved = True
    assert not any(queues.values())


def test_the_estimated_cost_has_the_bytes_and_seconds_of_each_rank():
    chunk = TensorChunk("a", Box((0,), (250,)), "a", "float32", 4)
    small = TensorChunk("b", Box((0,), (100,)), "b", "float32", 4)
    buckets = (Bucket(0, 0, (0, 2), (chunk,)), Bucket(1, 0, (3,), (small,)), Bucket(1, 1, (1,), (small,)))
    plan = TransferPlan(buckets, ((), ()), 2, 1000)
    nbytes = [bucket.nbytes for bucket in buckets]
    cost = estimate_transfer_cost(plan, 2, LinkSpeeds(1e-6, 2e-6, 1000.0), shared=False)
    assert [(each.rank, each.bytes, each.messages) for each in cost.senders] == [
        ("trainer 0", 2 * nbytes[0], 2),
        ("trainer 1", nbytes[1] + nbytes[2], 2),
    ]
    assert [(each.rank, each.bytes, each.messages) for each in cost.receivers] == [
        ("engine 0 rank 0", nbytes[0], 1),
        ("engine 0 rank 1", nbytes[2], 1),
        ("engine 1 rank 0", nbytes[0], 1),
        ("engine 1 rank 1", nbytes[1], 1),
    ]
    assert cost.senders[0].seconds == pytest.approx(2 * nbytes[0] / 1e3 + 2e-3)
    assert cost.receivers[0].seconds == pytest.approx(nbytes[0] / 2e3 + 1e-3)
    assert cost.seconds == cost.senders[0].seconds
    assert cost.imbalance == pytest.approx(2 * nbytes[0] / (nbytes[0] + (nbytes[1] + nbytes[2]) / 2))
    assert cost.ratio == plan.sent_bytes / 1000
    shared = estimate_transfer_cost(plan, 2, LinkSpeeds(1e-6, 2e-6, 1000.0), shared=True)
    assert (shared.senders[0].bytes, shared.senders[0].messages) == (nbytes[0], 1), "all receivers read one copy"
