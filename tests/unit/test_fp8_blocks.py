"""Block quantization to FP8: equal to SGLang's own function, and sent so that engines hold what SGLang would compute."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_transfer_plan import engine_parameters, tensors_of

from models.architecture import Architecture
from models.conversion.fp8_blocks import (
    FP8_DTYPE,
    SCALE_SUFFIX,
    block_box,
    dequantize_blocks,
    quantize_blocks,
    quantized_shapes,
    quantizing_reader,
)
from models.conversion.mapping import Box
from models.families.phi3 import PHI3
from models.families.qwen import QWEN3, QWEN3_MOE
from mrl.weight_sync.engine_layout import ITEM_BYTES, EngineLayout, EngineParallelSizes
from mrl.weight_sync.sender import checksums, chunk_views, decode_delta, encode_delta, fill_buffer
from mrl.weight_sync.transfer_plan import compile_transfer_plan, even_pipeline_stages, trainer_shards
from parallel.dims import ParallelDims
from parallel.rope import Rope

LAYERS = 2
SIZES = dict(vocab=41, hidden=128, ffn=512, q=512, kv=256, head_dim=128, experts=4, moe_ffn=256)


def sglang_quantizer():
    """Return SGLang's `per_block_cast_to_fp8`. Only this function is run, because importing its module takes ten seconds."""
    path = Path(find_spec("sglang").submodule_search_locations[0], "srt/layers/quantization/fp8_utils.py")
    names = ("ceil_to_ue8m0", "per_block_cast_to_fp8")
    source = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in names]
    assert len(source) == len(names)
    scope = {"torch": torch, "Tuple": tuple, "ceil_align": lambda x, multiple: -(-x // multiple) * multiple}
    exec(compile(ast.Module(source, []), str(path), "exec"), scope)
    return scope["per_block_cast_to_fp8"]


def same_bytes(a, b) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def matrices(dtype):
    """Yield random matrices: several sizes, tiny and huge weights, outliers, and blocks of zeros."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (128, 128), (127, 129), (3, 700), (300, 260), (640, 384)):
        for size in (1e-7, 1e-4, 0.02, 1.0, 448.0, 1e4, 1e30):
            weight = torch.randn(shape, generator=generator) * size
            yield weight.to(dtype)
            yield (weight * (torch.rand(shape, generator=generator) * 8 - 4).exp()).to(dtype)
            weight[: shape[0] // 2] = 0.0
            weight[0, 0] = -1000 * size
            yield weight.to(dtype)
    exponents = torch.arange(-20, 20).float().repeat_interleave(128)
    yield torch.exp2(exponents)[None].to(dtype)
    yield (448 * torch.exp2(exponents))[None].to(dtype)  # the largest weight of a block becomes 448


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_are_quantized_bit_for_bit_as_sglang_does(dtype):
    theirs = sglang_quantizer()
    for weight in matrices(dtype):
        values, scales = quantize_blocks(weight)
        expected_values, expected_scales = theirs(weight)
        assert same_bytes(values, expected_values) and same_bytes(scales, expected_scales)


@pytest.mark.extended
def test_a_quantized_weight_differs_by_at_most_half_a_step_of_its_format():
    """E4M3 has 3 bits of mantissa: the relative error is at most 1/16, or half of the smallest step (2**-9) near zero."""
    for weight in matrices(torch.float32):
        values, scales = quantize_blocks(weight)
        scale = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.size(0), : weight.size(1)].double()
        weights = values.double() * scale
        assert torch.equal(dequantize_blocks(values, scales).double(), weights), "the product is exact"
        assert ((weights - weight.double()).abs() <= torch.maximum(weight.double().abs() / 16, scale * 2**-10)).all()
        assert values.float().abs().max() <= 448


def test_parts_of_a_matrix_are_read_as_parts_of_the_quantized_matrix():
    generator = torch.Generator().manual_seed(1)
    tensors = {"w": torch.randn(300, 400, generator=generator), "norm": torch.randn(300, generator=generator)}
    read = quantizing_reader(lambda name, box: tensors[name][box.slices], {"w": (300, 400)})
    values, scales = quantize_blocks(tensors["w"].bfloat16())
    for _ in range(50):
        first, last = (torch.randint(0, size, (2,), generator=generator).sort().values.tolist() for size in (300, 400))
        box = Box((first[0], last[0]), (first[1] + 1 - first[0], last[1] + 1 - last[0]))
        assert same_bytes(read("w", box), values[box.slices].contiguous())
    for box in (Box((0, 0), (3, 4)), Box((1, 2), (2, 1))):
        assert same_bytes(read("w" + SCALE_SUFFIX, box), scales[box.slices].contiguous())
    assert read("norm", Box((7,), (9,))).dtype == torch.float32, "other tensors keep their dtype"


@pytest.mark.parametrize(
    ("box", "what"),
    [
        (Box((64, 0), (128, 256)), "rows 64 to 192 of 300"),
        (Box((0, 128), (300, 64)), "columns 128 to 192 of 256"),
    ],
)
def test_a_box_with_a_part_of_a_block_is_refused(box, what):
    assert block_box(Box((128, 128), (172, 128)), (300, 256)) == Box((1, 1), (2, 1))
    with pytest.raises(ValueError, match=f"{what} contain only a part of a block of 128 x 128 weights"):
        block_box(box, (300, 256))


def architecture(family, **sizes) -> Architecture:
    moe = {} if family in (QWEN3, PHI3) else dict(num_moe_experts=4, moe_layer_freq=[0, 1])
    transformer = dict(num_layers=LAYERS, num_attention_heads=4, num_query_groups=2, **moe)
    return Architecture(41, 64, Rope(rope_theta=1e4, dim=128), False, transformer, SIZES | sizes)


def fp8_plan(family, axes, parallel_sizes, bucket_bytes, num_engines=1):
    arch, dims = architecture(family), ParallelDims(**axes)
    layout = EngineLayout.of(family, arch, EngineParallelSizes(*parallel_sizes)).with_block_scales()
    shards = trainer_shards(layout.rows, layout.sizes, dims, even_pipeline_stages(LAYERS, dims))

    def dtype_of(param):
        dtype = layout.dtype_of(param, "bfloat16")
        return dtype, ITEM_BYTES[dtype]

    return arch, layout, shards, compile_transfer_plan(shards, layout, num_engines, dtype_of, bucket_bytes)


def reader_of(rank, shards, layout, tensors):
    """Return the function with which a trainer rank reads what it sends. The rank has only its own shards."""

    def read(name, box):
        assert any(rank in s.ranks and s.box.intersect(box) == box for s in shards[name]), (
            f"rank {rank} lacks {name} {box}"
        )
        return tensors[name][box.slices]

    return quantizing_reader(read, quantized_shapes(layout.rows, layout.sizes))


def quantized_parameter(param):
    """Quantize a parameter of an unquantized engine, as SGLang would. An MoE parameter has a matrix for each expert."""
    experts = [quantize_blocks(matrix.bfloat16()) for matrix in param.reshape(-1, *param.shape[-2:])]
    values = torch.stack([values.view(torch.uint8) for values, _ in experts]).view(torch.float8_e4m3fn)
    scales = torch.stack([scales for _, scales in experts])
    return values.view(param.shape), scales.view(*param.shape[:-2], *scales.shape[-2:])


@pytest.mark.extended_after(3)
@pytest.mark.parametrize("bucket_bytes", [5000, 1 << 22])
@pytest.mark.parametrize(
    ("family", "axes", "parallel_sizes"),
    [
        (QWEN3, dict(tp=2, pp=2, dp=2), (1,)),
        (QWEN3, dict(tp=2), (2,)),
        (QWEN3, {}, (4, 1, 2)),
        (PHI3, dict(tp=2, pp=2), (2,)),
        (QWEN3_MOE, dict(tp=2, dp=2, ep=2, etp=1), (2, 2)),
        (QWEN3_MOE, dict(pp=2, dp=2, ep=2), (2,)),
    ],
)
def test_every_engine_rank_receives_the_parameters_that_sglang_would_quantize(
    family, axes, parallel_sizes, bucket_bytes
):
    """The expected parameters are those of an unquantized engine, quantized as a whole on each rank."""
    arch, layout, shards, plan = fp8_plan(family, axes, parallel_sizes, bucket_bytes)
    tensors = {name: tensor * 0.05 for name, tensor in tensors_of(family, arch).items()}
    plain = EngineLayout.of(family, arch, EngineParallelSizes(*parallel_sizes))
    held = 0
    for engine_rank in range(parallel_sizes[0]):
        filled = {
            name: torch.zeros(shape, dtype=getattr(torch, layout.dtype_of(name, "bfloat16")))
            for name, shape in layout.param_shapes(engine_rank).items()
        }
        for bucket, destinations in plan.buckets_of_receiver(engine_rank):
            buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            sums = fill_buffer(buffer, bucket, reader_of(bucket.sender, shards, layout, tensors))
            views = chunk_views(buffer, bucket)
            for destination, view in zip(destinations, views, strict=True):
                filled[destination.param][destination.box.slices].copy_(view.view(destination.box.sizes))
            stored = [filled[d.param][d.box.slices] for d in destinations]
            assert checksums(stored) == sums
            held += sum(chunk.nbytes for chunk in bucket.chunks)
        unquantized = engine_parameters(plain, engine_rank, tensors)
        assert filled.keys() == unquantized.keys() | {
            n + SCALE_SUFFIX for n in filled if filled[n].dtype == torch.float8_e4m3fn
        }
        for name, param in unquantized.items():
            if layout.dtype_of(name, "bfloat16") == FP8_DTYPE:
                values, scales = quantized_parameter(param)
                assert same_bytes(filled[name], values) and same_bytes(filled[name + SCALE_SUFFIX], scales), name
            else:
                assert same_bytes(filled[name], param.bfloat16()), name
    assert held == plan.min_bytes, "the plan counts the bytes of FP8 values and of scales"


def test_a_push_in_fp8_sends_about_half_the_bytes():
    arch, layout, _, plan = fp8_plan(QWEN3, dict(tp=2), (2,), 1 << 22)
    plain = EngineLayout.of(QWEN3, arch, EngineParallelSizes(2))
    shapes = [plain.param_shapes(rank) for rank in range(2)]
    matrices = sum(s.numel() for s in (torch.empty(t) for r in shapes for n, t in r.items() if "_proj" in n))
    others = sum(torch.empty(t).numel() for r in shapes for n, t in r.items() if "_proj" not in n)
    padding = 2 * (64 - 41) * 128  # rows of embedding and output layer, which no trainer sends
    assert plan.min_bytes == matrices + matrices // 128**2 * 4 + 2 * (others - padding)
    assert layout.dtype_of("lm_head.weight", "bfloat16") == "bfloat16"


def test_the_difference_between_two_pushes_in_fp8_is_exact():
    arch, layout, shards, plan = fp8_plan(QWEN3, {}, (1,), 1 << 22)
    old = {name: tensor * 0.05 for name, tensor in tensors_of(QWEN3, arch).items()}
    new = {name: tensor + 0.001 * torch.sin(tensor * 1e4) for name, tensor in old.items()}
    for bucket in plan.buckets:
        before, after = (torch.zeros(bucket.nbytes, dtype=torch.uint8) for _ in range(2))
        fill_buffer(before, bucket, reader_of(0, shards, layout, old))
        fill_buffer(after, bucket, reader_of(0, shards, layout, new))
        packed = encode_delta(after, before, bucket)
        assert packed is not None
        delta = decode_delta(torch.frombuffer(bytearray(packed), dtype=torch.uint8), bucket)
        assert torch.equal(before ^ delta, after) and not torch.equal(before, after)


@pytest.mark.parametrize(
    ("sizes", "tp", "message"),
    [
        (dict(ffn=384), 2, r"rollout\.engine_tp=2: .*mlp\.(gate|up)_proj\.weight .* rows 0 to 192 of 384"),
        (dict(hidden=64), 1, r"an engine rank has 64 columns, not a multiple of 128"),
        (dict(q=256, kv=128, head_dim=64), 2, r"self_attn\.k_proj\.weight .* rows 0 to 64 of 128"),
        (dict(ffn=192), 1, r"mlp\.up_proj\.weight .* has 192 rows before this tensor, not a multiple of 128"),
    ],
)
def test_engines_that_split_a_block_are_refused(sizes, tp, message):
    layout = EngineLayout.of(QWEN3, architecture(QWEN3, **sizes), EngineParallelSizes(tp))
    layout.shards(0)
    with pytest.raises(ValueError, match=message):
        layout.with_block_scales().shards(0)


def test_trainers_that_split_a_block_are_refused():
    arch, dims = architecture(QWEN3, ffn=384), ParallelDims(tp=2)
    layout = EngineLayout.of(QWEN3, arch, EngineParallelSizes())
    shards = trainer_shards(layout.rows, layout.sizes, dims, even_pipeline_stages(LAYERS, dims))
    with pytest.raises(
        ValueError, match=r"a part of model\.layers\.0\.mlp\.gate_proj\.weight .*use a smaller parallel\.tp"
    ):
        compile_transfer_plan(shards, layout.with_block_scales(), 1, lambda _: ("bfloat16", 2), 1 << 20)
