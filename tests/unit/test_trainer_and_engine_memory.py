"""The memory of trainers and engines agrees with formulas of papers and of Megatron, and with SGLang's layouts."""

from argparse import Namespace
from dataclasses import replace
from math import prod

import pytest
from published_dense_configs import ANY, QWEN3_8B
from published_moe_configs import DEEPSEEK_V3, QWEN3_30B_A3B
from tiny_families import FAMILIES, SIZES

from models.families import family_of
from models.hf_config import HFConfig
from mrl.planner.activation_bytes import Adapters, attention_bytes, layer_bytes, virtual_stage_bytes
from mrl.planner.engine_memory import adapter_slot_bytes, engine_memory, engine_weights, kv_bytes
from mrl.planner.micro_batch_shape import MicroBatchShape, Recompute
from mrl.planner.model_shape import LayerKind, ModelShape
from mrl.planner.trainer_memory import TrainerSettings, head_bytes, in_flight, trainer_memory
from mrl.planner.trainer_state_bytes import pipeline_stages
from mrl.weight_sync.engine_layout import ITEM_BYTES, EngineLayout, EngineParallelSizes
from parallel.dims import ParallelDims
from parallel.trainer_config import MAX_MERGED_ELEMENTS, LoraConfig

FULL = Recompute("full", "uniform", 1)
DENSE = LayerKind()
# Model of table 3 in Korthikanti et al. 2022 -> (hidden size, layers, heads)
GPT = {"22B": (6144, 48, 64), "175B": (12288, 96, 96), "530B": (20480, 105, 128), "1T": (25600, 128, 160)}


def published(fields) -> tuple[ModelShape, HFConfig]:
    config = HFConfig("config.json", ANY | fields)
    family = family_of(config)
    return ModelShape.of(family, family.read(config)), config


def gpt(name: str) -> ModelShape:
    """Return a model of the paper: ungated MLP, no rotary embedding, as many key heads as query heads, dropout."""
    hidden, layers, heads = GPT[name]
    return ModelShape(
        kinds=(LayerKind(),) * layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        value_dim=hidden // heads,
        ffn=4 * hidden,
        num_experts=0,
        topk=0,
        moe_ffn=0,
        shared_ffn=0,
        vocab=51200,
        qk_norm_per_head=False,
        gated=False,
        dropout=True,
    )


@pytest.mark.parametrize("name", GPT)
@pytest.mark.parametrize("tp", [1, 8])
def test_a_layer_keeps_the_bytes_of_the_papers_equation_4(name, tp):
    """With recomputed attention scores, equation 4 is s b h 34 / t. The paper does not count the statistics of norms."""
    shape, batch = gpt(name), MicroBatchShape.of(ParallelDims(tp=tp), 2048, 2)
    statistics = 2 * batch.residual_tokens * 4
    found = layer_bytes(shape, DENSE, batch, frozenset(["core_attn"])) - statistics
    assert found == 34 * 2048 * shape.hidden // tp


def test_without_sequence_parallelism_activations_outside_of_matrices_are_not_sharded():
    """The bytes are those of equation 2 of the paper: s b h (10 + 24 / t)."""
    shape, batch = gpt("175B"), MicroBatchShape.of(ParallelDims(tp=8, sp=False), 2048, 2)
    found = layer_bytes(shape, DENSE, batch, frozenset(["core_attn"])) - 2 * 2048 * 4
    assert found == 2048 * shape.hidden * (10 + 24 // 8)


@pytest.mark.parametrize("name", GPT)
def test_a_layer_keeps_the_bytes_of_megatrons_estimate(name):
    from megatron.training.theoretical_memory_usage import compute_activation_memory

    hidden, layers, _ = GPT[name]
    sizes = dict(seq_length=2048, micro_batch_size=1, hidden_size=hidden, ffn_hidden_size=4 * hidden)
    layout = dict(tensor_model_parallel_size=8, pipeline_model_parallel_size=1)
    more = dict(virtual_pipeline_model_parallel_size=None, padded_vocab_size=51200)
    theirs = [compute_activation_memory(Namespace(**sizes, **layout, **more, num_layers=n), 1) for n in (0, layers)]
    batch = MicroBatchShape.of(ParallelDims(tp=8), 2048, 2)
    ours = virtual_stage_bytes(
        gpt(name), batch, (DENSE,) * layers, Recompute("selective", modules=frozenset(["core_attn"]))
    )
    assert ours == pytest.approx(theirs[1] - theirs[0], rel=1e-4)


def test_a_recomputed_layer_keeps_only_its_input():
    shape, batch = gpt("22B"), MicroBatchShape.of(ParallelDims(tp=8), 2048, 2)
    assert virtual_stage_bytes(shape, batch, (DENSE,) * 48, FULL) == 48 * 2 * 2048 // 8 * 6144
    every_third = replace(FULL, num_layers=3)
    assert virtual_stage_bytes(shape, batch, (DENSE,) * 48, every_third) == 16 * 2 * 2048 // 8 * 6144
    some = virtual_stage_bytes(shape, batch, (DENSE,) * 48, Recompute("full", "block", 8))
    assert some == 8 * 2 * 2048 // 8 * 6144 + 40 * layer_bytes(shape, DENSE, batch)


def test_micro_batches_in_flight_are_those_of_the_paper():
    """Section 4.2.3: the first stage keeps p micro-batches. Interleaved, it keeps L (1 + (p - 1) / (p m)) layers."""
    dims = ParallelDims(pp=4)
    assert [in_flight(dims, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(dims, 0, micro_batches=2) == 2
    p, m, layers = 4, 3, 48
    kept = in_flight(ParallelDims(pp=p, vpp=m), 0) * layers // (p * m)
    assert kept == layers * (1 + (p - 1) / (p * m))


def test_published_models_have_their_published_number_of_parameters():
    assert published(QWEN3_8B)[0].num_parameters == 8_190_735_360
    assert published(QWEN3_30B_A3B)[0].num_parameters == 30_532_122_624
    assert published(DEEPSEEK_V3)[0].num_parameters == 671_026_419_200 - 58 * 256  # without the correction biases


def test_ranks_hold_all_parameters_and_share_one_copy_of_the_optimizer_state():
    shape, _ = published(QWEN3_30B_A3B)
    dims = ParallelDims(tp=4, dp=8, ep=8, etp=1)
    (rank,) = trainer_memory(shape, dims, TrainerSettings()).stages
    experts = 48 * 128 * 3 * 2048 * 768
    held = experts // 8 + (shape.num_parameters - experts) / 4
    assert rank.state.weights == pytest.approx(2 * held, rel=0.01)
    assert rank.state.gradients == 2 * rank.state.weights
    assert rank.state.optimizer == pytest.approx(12 * shape.num_parameters / dims.world_size, rel=0.01)


@pytest.mark.extended_after(20)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 2), (4, 1, 1), (4, 2, 1)], ids=str)
def test_an_engine_rank_holds_the_weights_that_sglang_allocates(name, sizes):
    prefix, fields = FAMILIES[name]
    config = HFConfig("config.json", SIZES | fields | dict(architectures=[f"{prefix}ForCausalLM"]))
    family, parallel_sizes = family_of(config), EngineParallelSizes(*sizes)
    arch = family.read(config)
    if parallel_sizes.ep > 1 and arch.num_experts % parallel_sizes.ep:
        pytest.skip("the number of experts is not a multiple of ep")
    layout = EngineLayout.of(family, arch, parallel_sizes)
    shapes = layout.param_shapes(parallel_sizes.tp - 1)
    exact = sum(prod(s) * ITEM_BYTES[layout.dtype_of(param, "bfloat16")] for param, s in shapes.items())
    assert engine_weights(ModelShape.of(family, arch), parallel_sizes, 2) == exact


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("fields", [QWEN3_8B, QWEN3_30B_A3B], ids=["dense", "moe"])
def test_an_engine_in_fp8_holds_a_byte_for_each_weight_of_a_matrix_and_the_scales(fields):
    shape, config = published(fields)
    family = family_of(config)
    layout = EngineLayout.of(family, family.read(config), EngineParallelSizes(2)).with_block_scales()
    exact = sum(prod(s) * ITEM_BYTES[layout.dtype_of(param, "bfloat16")] for param, s in layout.param_shapes(1).items())
    assert engine_weights(shape, EngineParallelSizes(2), 2, fp8=True) == exact
    assert 0.5 < exact / engine_weights(shape, EngineParallelSizes(2), 2) < 0.6


def test_the_kv_cache_of_a_token_has_the_published_size():
    qwen, _ = published(QWEN3_8B)
    deepseek, _ = published(DEEPSEEK_V3)
    assert kv_bytes(qwen, EngineParallelSizes(1), 2) == 36 * 2 * 8 * 128 * 2 == 147_456
    assert kv_bytes(qwen, EngineParallelSizes(8), 2) == kv_bytes(qwen, EngineParallelSizes(16), 2) == 147_456 // 8
    assert kv_bytes(deepseek, EngineParallelSizes(8), 2) == 61 * (512 + 64) * 2  # the published 70 KB, on every rank


def test_an_engine_allocates_its_memory_fraction():
    qwen, _ = published(QWEN3_8B)
    found = engine_memory(qwen, EngineParallelSizes(1), 2, free=80 << 30, fraction=0.8)
    assert found.total == int((80 << 30) * 0.8)
    assert found.tokens == found.kv_cache // 147_456
    assert engine_memory(qwen, EngineParallelSizes(1), 2, free=16 << 30, fraction=0.8).tokens == 0


def test_a_slot_for_adapters_has_the_buffers_of_sglang():
    """The shapes are those of LoRAMemoryPool.get_lora_A_shape and get_lora_B_shape, for Qwen3-8B and rank 16."""
    qwen, _ = published(QWEN3_8B)
    for tp, keys in ((1, 8), (2, 4), (16, 1)):  # with 16 ranks, two ranks have the same key head
        qkv = 3 * 16 * 4096 + (32 // tp + 2 * keys) * 128 * 16
        output = 16 * 4096 // tp + 4096 * 16
        gate_up, down = 2 * 16 * 4096 + 2 * 12288 // tp * 16, 16 * 12288 // tp + 4096 * 16
        assert adapter_slot_bytes(qwen, EngineParallelSizes(tp), 2, 16, ["q_proj", "v_proj"]) == 36 * 2 * qkv
        every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        assert adapter_slot_bytes(qwen, EngineParallelSizes(tp), 2, 16, every) == 36 * 2 * (
            qkv + output + gate_up + down
        )


def test_more_ranks_never_need_more_memory_per_rank():
    shape, _ = published(QWEN3_30B_A3B)
    peaks = [
        trainer_memory(shape, ParallelDims(tp=4, dp=dp, ep=8, etp=1), TrainerSettings()).by_phase["update"]
        for dp in (2, 4, 8, 16)
    ]
    assert peaks == sorted(peaks, reverse=True)
    tokens = [
        trainer_memory(shape, ParallelDims(dp=8, ep=8), TrainerSettings(max_tokens=n)).by_phase["update"]
        for n in (2048, 4096, 8192)
    ]
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("teachers", [(), (4096,)], ids=["sampled", "distilled"])
def test_frozen_weights_have_no_gradients_while_a_rank_trains_adapters(teachers):
    shape, config = published(QWEN3_8B)
    family = family_of(config)
    adapters = ModelShape.of_adapters(family, family.read(config), LoraConfig(rank=1))
    settings = TrainerSettings(max_tokens=8192, teacher_hidden=teachers)
    batch = MicroBatchShape.of(ParallelDims(), 8192, 2)
    dense, lora = (
        head_bytes(shape, batch, s, gradients=True) for s in (settings, replace(settings, adapters=adapters))
    )
    head, num_gradients = shape.vocab * shape.hidden, 2 if teachers else 1
    # 6 bytes: the sum over chunks in float32, and the result in bfloat16; 2 bytes: an earlier gradient in bfloat16
    assert dense - lora == head * (6 + 2 * (num_gradients - 1))
    dims = ParallelDims(pp=4)  # the first stage has no head
    dense, lora = (
        trainer_memory(shape, dims, s).stages[0].working for s in (settings, replace(settings, adapters=adapters))
    )
    assert dense - lora == 2 * 2 * shape.ffn * shape.hidden


def adapters_of(config: HFConfig, ep: int = 1, **lora) -> Adapters:
    family = family_of(config)
    arch = family.read(config)
    return Adapters(ModelShape.of_adapters(family, arch, LoraConfig(**lora)), arch.num_experts // ep)


@pytest.mark.parametrize("tp", [1, 4])
def test_adapters_keep_copies_of_their_matrices_and_their_products(tp):
    shape, config = published(QWEN3_8B)
    batch, rank, rows = MicroBatchShape.of(ParallelDims(tp=tp), 2048, 2), 8, 2048 // tp

    def added(recomputed: frozenset[str] = frozenset(), **lora) -> int:
        adapters = adapters_of(config, rank=rank, **lora)
        return layer_bytes(shape, DENSE, batch, recomputed, adapters) - layer_bytes(shape, DENSE, batch, recomputed)

    norm = rows * 4  # its statistics, because an adapter computes the norm of its linear layer again
    # A has the inputs of a linear layer, B its outputs, and A x the tokens of the pack, or those of this rank
    qkv = 2 * 3 * rank * (4096 + 6144 // tp + 2048) + norm
    output = 2 * rank * (4096 // tp + 4096 + rows)
    gate_up = 2 * 2 * rank * (4096 + 2 * 12288 // tp + 2048) + norm
    down = 2 * rank * (12288 // tp + 4096 + rows)
    assert added() == qkv + output + gate_up + down
    # B of the fused layer has the rows of all its matrices
    assert added(targets=["q_proj"]) == 2 * rank * (4096 + 6144 // tp + 2048) + norm
    assert added(frozenset(["mlp"])) == qkv + output


def test_every_expert_of_a_rank_has_adapters_of_its_own():
    shape, config = published(QWEN3_30B_A3B)
    kind, batch = LayerKind(("attention", "moe")), MicroBatchShape.of(ParallelDims(dp=8, ep=8), 2048, 2)
    of = dict(rank=4, targets=["q_proj", "gate_proj", "up_proj", "down_proj"])
    with_experts, without = (adapters_of(config, ep=8, **of, experts=experts) for experts in (True, False))
    found, attention = (layer_bytes(shape, kind, batch, adapters=each) for each in (with_experts, without))
    received = 2048 * 8
    gate_up = 2 * 4 * (16 * (2048 + 2 * 768) + received)
    down = 4 * (16 * (768 + 2048) + received)
    assert found - attention == 2 * (gate_up + down)
    moe = frozenset(["moe"])
    assert layer_bytes(shape, kind, batch, moe, with_experts) == layer_bytes(shape, kind, batch, moe, without)


def test_trainers_count_the_activations_of_adapters():
    shape, config = published(QWEN3_8B)
    small, large = (
        trainer_memory(shape, ParallelDims(), TrainerSettings(adapters=adapters_of(config, rank=rank).shape))
        for rank in (8, 16)
    )
    (first,), (second,) = small.stages, large.stages
    matrices = 3 * (4096 + 6144) + (4096 + 4096) + 2 * (4096 + 2 * 12288) + (12288 + 4096)
    assert second.saved - first.saved == 36 * 8 * 2 * (matrices + 7 * 8192)
    assert second.scoring >= first.scoring


@pytest.mark.parametrize("tp", [1, 4])
def test_a_push_of_merged_weights_needs_the_memory_of_the_largest_adapted_layer(tp):
    shape, config = published(QWEN3_8B)
    family = family_of(config)
    for targets, numel in (
        (["q_proj"], 6144 * 4096),
        ([], 2 * 12288 * 4096),
    ):  # of the fused layers q, k, v and gate, up
        adapters = ModelShape.of_adapters(family, family.read(config), LoraConfig(rank=8, targets=targets))
        (rank,) = trainer_memory(shape, ParallelDims(tp=tp), TrainerSettings(adapters=adapters)).stages
        assert rank.merged == 3 * 2 * numel // tp + 4 * 4 * MAX_MERGED_ELEMENTS
        assert rank.push == rank.state.weights + rank.merged + rank.buckets
    assert trainer_memory(shape, ParallelDims(), TrainerSettings()).stages[0].merged == 0


@pytest.mark.parametrize("tp", [1, 2])
def test_copies_of_weights_in_fp8_are_in_memory_with_the_weights(tp):
    shape, _ = published(QWEN3_8B)
    matrices = 36 * (6144 * 4096 + 4096 * 4096 + 3 * 12288 * 4096) // tp
    of_recipe = {"blockwise": 2 * matrices, "mxfp8": 2 * matrices * 33 // 32}
    plain = trainer_memory(shape, ParallelDims(tp=tp), TrainerSettings()).stages[0]
    assert plain.fp8 == 0
    for recipe, nbytes in of_recipe.items():
        settings = TrainerSettings.with_megatron(dict(fp8="hybrid", fp8_recipe=recipe))
        (rank,) = trainer_memory(shape, ParallelDims(tp=tp), settings).stages
        assert rank.fp8 == nbytes and rank.weights == plain.weights + nbytes and rank.push == plain.push + nbytes
        before = plain.phases() | dict(update=plain.update - plain.saved + rank.saved)
        assert rank.phases() == {phase: size + nbytes for phase, size in before.items()}
    scorer = TrainerSettings.with_megatron(dict(fp8="hybrid", fp8_recipe="blockwise"), trained=False)
    assert trainer_memory(shape, ParallelDims(tp=tp), scorer).stages[0].fp8 == matrices, "no backward pass"
    unused = TrainerSettings.with_megatron(dict(fp8=None, fp8_recipe="blockwise"))
    assert trainer_memory(shape, ParallelDims(tp=tp), unused).stages[0].fp8 == 0


@pytest.mark.extended_after(3)
@pytest.mark.parametrize(("recipe", "of_32"), [("tensorwise", 32), ("blockwise", 33), ("mxfp8", 33)])
@pytest.mark.parametrize(
    ("fields", "kind", "numel"),
    [
        # inputs of linear_qkv, linear_fc1 and linear_fc2; attention saves the input of linear_proj itself
        (QWEN3_8B, DENSE, 4096 + 4096 + 12288 // 2),
        # input of linear_qkv; eight experts of a token read its hidden state, and each has an activation
        (QWEN3_30B_A3B, LayerKind(("attention", "moe")), 2048 + 2 * 8 * (2048 + 768 // 2)),
    ],
    ids=["dense", "moe"],
)
def test_in_fp8_inputs_that_only_a_matrix_saves_have_one_byte(fields, kind, numel, recipe, of_32):
    shape, _ = published(fields)
    plain = MicroBatchShape.of(ParallelDims(tp=2, sp=False), 4096, 2)
    saved = [layer_bytes(shape, kind, batch) for batch in (plain, replace(plain, fp8=recipe))]
    assert saved[0] - saved[1] == 4096 * numel * (64 - of_32) // 32


@pytest.mark.extended
def test_in_fp8_latent_attention_keeps_two_copies_of_its_input():
    shape, _ = published(DEEPSEEK_V3)
    plain = MicroBatchShape.of(ParallelDims(), 4096, 2)
    in_fp8 = replace(plain, fp8="tensorwise")
    first, second = (attention_bytes(shape, batch) for batch in (plain, in_fp8))
    assert first["attention's input"] == second["attention's input"] == 2 * 4096 * 7168
    assert sum(first.values()) - sum(second.values()) == 4096 * (1536 + 512), "the compressed vectors have one byte"
    recomputed = [sum(attention_bytes(shape, batch, frozenset(["mla_up_proj"])).values()) for batch in (plain, in_fp8)]
    assert recomputed[0] == recomputed[1], "the recomputation begins with the compressed vectors"


def test_in_fp8_models_with_adapters_keep_their_activations():
    shape, config = published(QWEN3_8B)
    adapters = ModelShape.of_adapters(family_of(config), family_of(config).read(config), LoraConfig(rank=8))
    settings = [TrainerSettings(adapters=adapters, fp8=recipe) for recipe in ("", "blockwise")]
    plain, in_fp8 = (trainer_memory(shape, ParallelDims(), each).stages[0] for each in settings)
    assert plain.saved == in_fp8.saved and plain.fp8 < in_fp8.fp8


def test_each_rank_has_copies_in_fp8_of_its_own_experts():
    shape, _ = published(QWEN3_30B_A3B)
    settings = TrainerSettings.with_megatron(dict(fp8="e4m3", fp8_recipe="tensorwise"))
    (rank,) = trainer_memory(shape, ParallelDims(dp=8, ep=8), settings).stages
    attention, expert = 5120 * 2048 + 2048 * 4096, 3 * 768 * 2048
    assert rank.fp8 == 2 * 48 * (attention + 16 * expert)


def test_uneven_stages_have_the_layers_that_megatron_gives_them():
    shape, _ = published(QWEN3_30B_A3B)
    uneven = dict(num_layers_in_first_pipeline_stage=6, num_layers_in_last_pipeline_stage=10)
    stages = pipeline_stages(shape.num_layers, ParallelDims(pp=4), uneven)
    assert [chunk.layers for (chunk,) in stages] == [6, 16, 16, 10]
    assert [chunk.first for (chunk,) in stages] == [0, 6, 22, 38]
    with pytest.raises(ValueError, match=r"cannot be divided evenly over 3 pipeline stages"):
        pipeline_stages(shape.num_layers, ParallelDims(pp=4), dict(num_layers_in_first_pipeline_stage=7))


def test_layouts_with_equal_layers_count_them_once():
    """So a search counts 100,000 layouts a minute: the bytes of a layer depend on only a few sizes of the layout."""
    shape, _ = published(QWEN3_30B_A3B)
    layouts = [
        ParallelDims(tp=tp, pp=pp, dp=dp, ep=ep, etp=1)
        for tp in (1, 2, 4)
        for pp in (1, 2, 4, 8, 16)
        for dp in (8, 16, 32)
        for ep in (1, 2, 4, 8)
    ]
    before = layer_bytes.cache_info().misses
    for dims in layouts:
        trainer_memory(shape, dims, TrainerSettings(max_tokens=8192))
    assert len(layouts) == 180 and layer_bytes.cache_info().misses - before <= 3 * 3, "three for each tp"
