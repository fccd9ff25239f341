"""Parameters that an engine reports are compared with the family's table: names, shapes and dtypes. Checksums know all dtypes."""

import pytest
import torch
from test_fp8_blocks import architecture
from test_transfer_plan import engine_parameters, tensors_of

from models.architecture import Architecture
from models.families.glm4_moe import GLM4_MOE
from models.families.qwen import QWEN3
from mrl.weight_sync.disk_sync import ExpectedChecksums, sglang_hash
from mrl.weight_sync.engine_control import WeightMismatchError
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes, check_engine_parameters
from parallel.rope import Rope

NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


def reported(layout, **changes):
    """Return what an engine in bfloat16 reports. `changes`: parameter -> other dtype."""
    found = {n: (tuple(s), layout.dtype_of(n, "bfloat16")) for n, s in layout.param_shapes(0).items()}
    return found | {name: (found[name][0], dtype) for name, dtype in changes.items()}


def test_an_engine_whose_parameter_has_another_dtype_is_refused():
    layout = EngineLayout.of(QWEN3, architecture(QWEN3), EngineParallelSizes())
    check_engine_parameters(layout, 0, reported(layout), "engine rank 0")
    why = r"engine rank 3 stores 2 parameters .*down_proj\.weight is \[128, 512\] float8_e4m3fn, the table says .* bfloat16"
    with pytest.raises(ValueError, match=why):
        check_engine_parameters(
            layout, 0, reported(layout, **{DOWN: "float8_e4m3fn", NORM: "float32"}), "engine rank 3"
        )


def test_an_engine_in_fp8_has_scales_of_blocks_and_constants_for_its_kv_cache():
    layout = EngineLayout.of(QWEN3, architecture(QWEN3), EngineParallelSizes()).with_block_scales()
    # a layer of DeepSeek-V3 has two attention modules
    constants = [
        f"model.layers.0.self_attn.{name}" for name in ("attn.k_scale", "attn_mqa.k_scale", "attn_mha.v_scale")
    ]
    found = reported(layout) | dict.fromkeys(constants, ((), "float32"))
    assert found[DOWN] == ((128, 512), "float8_e4m3fn") and found[f"{DOWN}_scale_inv"] == ((1, 4), "float32")
    check_engine_parameters(layout, 0, found, "engine rank 0")
    packed = found | {f"{DOWN}_scale_inv": ((128, 1), "int32")}  # as DeepGEMM needs the scales on some GPUs
    with pytest.raises(
        ValueError, match=r"is \[128, 1\] int32, the table says \[1, 4\] float32.*fp8_gemm_runner_backend"
    ):
        check_engine_parameters(layout, 0, packed, "engine rank 0")


def glm_layout() -> tuple[Architecture, EngineLayout]:
    sizes = dict(vocab=41, hidden=8, ffn=16, q=16, kv=8, head_dim=4, experts=4, moe_ffn=8, shared_ffn=8)
    transformer = dict(
        num_layers=2, num_attention_heads=4, num_query_groups=2, num_moe_experts=4, moe_layer_freq=[0, 1]
    )
    arch = Architecture(
        41, 64, Rope(rope_theta=1e4, dim=4), False, transformer, sizes, parts=frozenset(["shared_experts"])
    )
    return arch, EngineLayout.of(GLM4_MOE, arch, EngineParallelSizes(2))


def test_checksums_are_computed_in_the_dtype_of_each_parameter():
    """SGLang stores the router and the correction bias of GLM-4.5 in float32, and all other parameters in bfloat16."""
    arch, layout = glm_layout()
    tensors = tensors_of(GLM4_MOE, arch)
    expected = ExpectedChecksums(layout, torch.bfloat16)
    assert dict(expected.observe(tensors.items())).keys() == tensors.keys()
    ranks = []
    for rank in range(2):
        engine = engine_parameters(layout, rank, tensors)
        in_float32 = [name for name in engine if ".mlp.gate." in name]
        assert [name.rsplit(".", 1)[1] for name in sorted(in_float32)] == ["e_score_correction_bias", "weight"]
        ranks.append({n: sglang_hash(p if n in in_float32 else p.bfloat16()) for n, p in engine.items()})
    expected.compare(ranks, "http://engine")
    ranks[1][NORM] = "0"
    with pytest.raises(WeightMismatchError, match=r"rank 1 .*model\.norm\.weight"):
        expected.compare(ranks, "http://engine")
