"""sglang.quantization=fp8: configs that cannot work are refused before any process starts, and plans count FP8 bytes."""

from types import SimpleNamespace

import pytest
from planned_runs import config_of, folder_of
from tiny_families import make_family

from models.conversion.fp8_blocks import SCALE_SUFFIX
from models.families import family_of
from models.hf_config import HFConfig
from mrl.controller import plan_engine_dtype, plan_tools
from mrl.controller.plan_engine_dtype import check_fp8_device
from mrl.controller.plan_models import engine_layout
from mrl.weight_sync.engine_layout import ITEM_BYTES
from parallel.dims import ParallelDims

FP8 = "sglang.quantization=fp8"


def layout_of(model, folder, *overrides):
    """Return the layout that a run's engines have, after all checks of it."""
    config, hf = config_of(model, folder, FP8, *overrides), HFConfig.load(folder_of(model, folder))
    dims = ParallelDims(tp=config.parallel.tp)
    return engine_layout(config, SimpleNamespace(hf=hf, arch=family_of(hf).read(hf), dims=dims))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("Qwen3-8B", ["rollout.engine_tp=8", "parallel.tp=8"]),
        ("Qwen3-30B-A3B", ["rollout.engine_tp=4", "sglang.ep_size=4", "parallel.tp=2"]),
        ("DeepSeek-V3", ["rollout.engine_tp=8", "parallel.tp=8"]),
    ],
)
def test_published_models_fit_the_blocks(model, overrides, tmp_path):
    shards = {shard.name: shard for shard in layout_of(model, tmp_path, *overrides).shards(0)}
    scales = {name: shard for name, shard in shards.items() if name.endswith(SCALE_SUFFIX)}
    for name, shard in scales.items():
        weights = shards[name.removesuffix(SCALE_SUFFIX)].box
        assert shard.box.sizes == tuple(-(-size // 128) for size in weights.sizes)
    assert not [name for name in scales if any(part in name for part in ("norm", "embed", "lm_head", ".gate."))]


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("Qwen3-4B", ["weight_sync.transport=disk"], "weight_sync.transport=disk writes weights in model.dtype; use"),
        ("Qwen3-4B", ["model.dtype=float32"], "must compute in bfloat16, not in float32; set sglang.dtype=bfloat16"),
        (
            "Qwen3-4B",
            ["sglang.load_format=auto"],
            "sglang.load_format='auto' is set by mrl with sglang.quantization=fp8; leave it out",
        ),
        ("Qwen3-4B", ["sglang.moe_runner_backend=flashinfer_trtllm"], "its kernels reorder weights"),
        (
            "Qwen3-4B",
            ["rollout.engine_tp=8"],
            "rollout.engine_tp=8: model.layers.0.mlp.gate_proj.weight .* rows 0 to 1216 of 9728",
        ),
        (
            "Qwen3-4B",
            ["parallel.tp=8"],
            "mlp.gate_proj.weight whose rows 0 to 1216 of 9728 .*use a smaller parallel.tp",
        ),
        ("Qwen3-Next-80B-A3B", ["cluster=h100"], "trainers send the weights of recurrent layers only in model.dtype"),
        ("GLM-4.5-Air", [], "gate_up_proj.weight has 10944 rows before this tensor, not a multiple of 128"),
    ],
)
def test_a_config_with_which_engines_cannot_receive_fp8_is_refused(model, overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        layout_of(model, tmp_path, *overrides)


def test_experts_in_fp8_need_a_gpu():
    dense, moe = SimpleNamespace(num_experts=0), SimpleNamespace(num_experts=8)
    check_fp8_device(dict(quantization="fp8", device="cpu"), dense)
    check_fp8_device(dict(quantization="fp8", device="cuda"), moe)
    check_fp8_device(dict(device="cpu"), moe)
    with pytest.raises(ValueError, match=r"engines on a CPU have no experts in FP8; leave sglang\.quantization out"):
        check_fp8_device(dict(quantization="fp8", device="cpu"), moe)


def test_gpus_without_matrix_products_in_fp8_are_refused(monkeypatch):
    args, arch = dict(quantization="fp8", device="cuda"), SimpleNamespace(num_experts=0)
    for capability in (None, (8, 9), (9, 0)):
        monkeypatch.setattr(plan_engine_dtype, "compute_capability", lambda capability=capability: capability)
        check_fp8_device(args, arch)
    monkeypatch.setattr(plan_engine_dtype, "compute_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 8\.0: SGLang reorders weights for its Marlin kernels"):
        check_fp8_device(args, arch)
    check_fp8_device(dict(device="cuda"), arch)


def test_mrl_certify_engine_refuses_engines_in_fp8(tmp_path):
    config = config_of("Qwen3-8B", tmp_path, FP8)
    with pytest.raises(ValueError, match=r"sglang\.quantization=fp8: mrl certify engine compares only engines"):
        plan_tools.plan_engine_check(config)


@pytest.mark.extended
def test_mrl_plan_sync_counts_the_bytes_of_fp8(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = dict(hidden_size=128, intermediate_size=384, head_dim=128)
    folder = make_family("qwen3", tmp_path / "model", **sizes)
    keys = [f"model.path={folder}", "model.dtype=bfloat16", "sft.train=null"]

    def planned(*overrides):
        return plan_tools.plan_sync(config_of(None, tmp_path, *keys, *overrides, experiment="quickstart")).transfers

    unquantized, quantized = planned(), planned(FP8)
    matrices = 2 * (2 * (4 + 2) * 128 * 128 + 3 * 384 * 128)  # 2 layers
    assert quantized.min_bytes == unquantized.min_bytes - matrices + matrices // 128**2 * ITEM_BYTES["float32"]
    assert quantized.sent_bytes < 0.6 * unquantized.sent_bytes
