"""`mrl bench gpu --device cpu` measures every section at toy size. In other tests, stand-ins replace the kernels of GPUs."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from varlen_kernel import varlen_attn

from mrl.bench.sections import SECTIONS, SectionJob
from mrl.core.code_locations import PACKAGE_ROOT

pytestmark = pytest.mark.extended

NEEDED = {  # section -> quantities that it must report
    "correctness": {"passed"},
    "matrix": {"rate"},
    "head": {"time", "rate", "largest error", "of the measured rate"},
    "attention": {"time", "rate", "size"},
    "step": {"time", "speed", "rate", "planned", "share", "computed tokens"},
    "long": {"time", "speed", "rate", "peak memory"},
    "sleep": {"sleep", "wake", "state", "storages of the model"},
    "ipc": {"push", "copy in the receiver"},
    "hashing": {"checksums", "share of checksums in a push", "share of the hash"},
}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    """The JSON file of a whole run on the CPU."""
    path = tmp_path_factory.mktemp("bench") / "report.json"
    words = ["--device", "cpu", "--minutes", "20", "--output", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "mrl.cli", "bench", "gpu", *words],
        cwd=PACKAGE_ROOT,
        capture_output=True,
        text=True,
        timeout=1300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("mrl bench gpu: reading the machine")
    return json.loads(path.read_text()) | {"printed": done.stdout}


def test_every_section_gives_numbers_with_units(report):
    assert [section["name"] for section in report["sections"]] == [section.name for section in SECTIONS]
    for section in report["sections"]:
        assert section["status"] == "measured" and section["seconds"] > 0, section
        values = [value for row in section["rows"] for value in row["values"]]
        assert NEEDED[section["name"]] <= {value["quantity"] for value in values}, section
        for value in values:
            assert isinstance(value["value"], int | float) and isinstance(value["unit"], str), value
            assert value["unit"] or value["quantity"] in ("calls", "difference from the first kernel"), value
    assert not report["failed"] and report["rates_tflops"]["measured"] > 0


def test_the_report_names_versions_and_what_was_left_out(report):
    assert report["schema"] == 1 and report["device"] == "cpu" and report["size"] == "toy"
    assert report["versions"]["torch"] and report["versions"]["mrl"] and "flash-attn" in report["versions"]
    assert report["machine"]["card"] is None and report["machine"]["driver"] is None
    reasons = "\n".join(report["left_out"])
    for part in ("matrix: matrix products in bfloat16", "head: Liger", "attention: 256 tokens", "step: peak memory"):
        assert part in reasons
    assert "left out: head: Liger" in report["printed"] and "tokens/s" in report["printed"]


def test_the_results_are_right(report):
    rows = {
        row["case"]: {v["quantity"]: v["value"] for v in row["values"]} for s in report["sections"] for row in s["rows"]
    }
    assert rows["programs of tests/gpu"] == {"passed": 6, "failed": 0}
    assert len(report["programs"]) == 6 and set(report["programs"].values()) == {"passed"}
    assert all(
        test.startswith("tests/gpu/test_") and (PACKAGE_ROOT / test.split("::")[0]).is_file()
        for test in report["programs"]
    )
    assert all(row["largest error"] < 1e-4 for row in rows.values() if "largest error" in row)
    computed = [row["computed tokens"] for row in rows.values() if "computed tokens" in row]
    assert len(computed) == 3 and computed[0] < computed[1] < computed[2], "shared prompts, packed, padded"
    left = rows["left on the device"]["storages of the model"]
    assert left == 0, "an offloaded model leaves nothing behind"


# The `check_...` functions run in forks that have imported Megatron for a CPU. Stand-ins replace packages that need a GPU.


@pytest.fixture
def job(tmp_path):
    """A job whose reports no test reads."""
    spec = SimpleNamespace(size="toy", rates={}, events=str(tmp_path / "events"))
    with (tmp_path / "events").open("w") as events:
        yield SectionJob(spec, events)


def in_process_group(rank: int, program: str, path: str) -> None:
    with open(path, "w") as events:
        globals()[program](SectionJob(SimpleNamespace(size="toy", rates={}), events))


def check_kernels(job: SectionJob) -> None:
    """All kernels of a pack give the same attention."""
    from mrl.bench import attention
    from parallel.packing import pack

    called = []

    def flash_attn_varlen_func(q, k, v, *bounds, softmax_scale, causal):
        assert causal and called.append("flash_attn") is None
        return varlen_attn(q, k, v, *bounds, scale=softmax_scale, window_size=(-1, 0), enable_gqa=True)

    class DotProductAttention(torch.nn.Module):
        def __init__(self, num_attention_heads, kv_channels, num_gqa_groups, **options):
            super().__init__()
            assert options == dict(attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal")
            self.scale = kv_channels**-0.5

        def forward(self, q, k, v, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
            called.append("transformer_engine")
            options = dict(scale=self.scale, window_size=(-1, 0), enable_gqa=True)
            bounds = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
            return varlen_attn(q, k, v, *bounds, **options).flatten(1)

    stand_ins = {
        "flash_attn": dict(flash_attn_varlen_func=flash_attn_varlen_func),
        "transformer_engine.pytorch": dict(DotProductAttention=DotProductAttention),
        "torch.nn.attention.varlen": dict(varlen_attn=varlen_attn),
    }
    for name, content in stand_ins.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    attention.find_spec = lambda name: SimpleNamespace(origin="flash_attn/__init__.py")
    attention.capabilities = lambda: SimpleNamespace(transformer_engine=True)
    attention.supports_varlen = lambda device, dtype: True
    attention.flash_attention_versions = lambda channels: [3, 2]
    sizes = attention.SIZES_BY_NAME["toy"]
    for name, segments in attention.packs(sizes).items():
        tokens = sum(segment.length for segment in segments)
        inputs = [torch.randn(tokens, count, sizes.channels).requires_grad_() for count in (4, 2, 2)]
        called.clear()
        found = {n: f(*inputs).flatten(1) for n, f in attention.attention_kernels(job, name, sizes, segments)}
        shared = "shared" in name
        assert list(found)[-1].endswith("(mrl's choice)") and len(found) == (4 if shared else 5), list(found)
        assert called == (["flash_attn"] if shared else ["flash_attn", "transformer_engine"])
        for one, other in pairwise(found):
            torch.testing.assert_close(found[one], found[other], msg=lambda text, pair=(one, other): f"{pair}: {text}")
            gradients = [
                torch.autograd.grad(found[kernel].square().sum(), inputs, retain_graph=True) for kernel in (one, other)
            ]
            for mine, theirs in zip(*gradients, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        packed = pack(segments, torch.device("cpu"))
        assert attention.attended_pairs(packed) == sum(
            call.count * sum(call.num_keys - call.num_queries + i + 1 for i in range(call.num_queries))
            for call in packed.calls
        )
    attention.find_spec = lambda name: SimpleNamespace(origin=None)  # only flash-attn-4 is installed
    names = [kernel for kernel, _ in attention.attention_kernels(job, name, sizes, segments)]
    assert not any(kernel.startswith("flash-attn") for kernel in names), names


def check_plans(job: SectionJob) -> None:
    """The model of the section `step` has as many layers as the planner predicts to fit into the memory of the GPU."""
    from mrl.bench import model_steps
    from mrl.planner.micro_batch_shape import GPU_KERNELS

    model_steps._kernels = lambda: GPU_KERNELS
    model_steps.model_dtype = lambda: torch.bfloat16
    full = model_steps.STEPS["full"]
    assert model_steps.layers_that_fit(full, 0, 36) == 36
    fits = [model_steps.layers_that_fit(full, gib << 30, 36) for gib in (40, 79, 139, 178)]
    assert 1 <= fits[0] < fits[1] < fits[2] <= fits[3] == 36, fits
    planned = model_steps.planned_bytes(full, full.config | dict(num_hidden_layers=fits[1]))
    assert 0.75 * 0.85 * (79 << 30) < planned <= 0.85 * (79 << 30)
    with pytest.raises(ValueError, match=r"one layer of hidden size 2560 needs .* --size toy"):
        model_steps.layers_that_fit(full, 4 << 30, 36)


def check_flops(job: SectionJob) -> None:
    """With shared prompts, the number of multiply-adds counts each computed token and each attended pair once."""
    import numpy as np

    from mrl.bench import model_steps

    bounds = ((8, 8), (16, 16))
    block, batch = model_steps.random_groups(np.random.default_rng(0), 512, (2, 4), bounds)
    config = model_steps.TOY
    found = {}
    for shared in (True, False):
        plan = model_steps.partition(batch, 10_000, shared)
        found[shared] = model_steps.multiply_adds(config, block, plan, shared)
        if shared:
            assert model_steps.largest_micro_batch(block, plan) == (144, pytest.approx(208 / 144))
    q, kv, hidden, ffn, layers = 4 * 16, 2 * 2 * 16, 64, 96, 2
    per_token = layers * (hidden * (2 * q + kv) + 3 * hidden * ffn)
    head, per_pair = 64 * 512 * 8 * 16, layers * 2 * q / 2
    assert found[False] == pytest.approx(per_token * 8 * 24 + per_pair * 8 * 24**2 + head)
    pairs = 2 * 8**2 + 8 * (24**2 - 8**2)
    assert found[True] == pytest.approx(per_token * (2 * 8 + 8 * 16) + per_pair * pairs + head)


@pytest.mark.parametrize("program", ["check_kernels", "check_plans", "check_flops"])
def test_over_stand_ins(run_ranks, tmp_path, program):
    from parallel.dims import ParallelDims

    run_ranks(ParallelDims(), in_process_group, program, str(tmp_path / "events"))


def test_fp8_products_are_right_where_this_torch_computes_them():
    from mrl.bench.device_rates import fp8_product

    torch.manual_seed(0)
    try:
        product = fp8_product(32, 64, 48)()
    except RuntimeError as error:
        pytest.skip(f"this CPU has no fp8 matrix products: {error}")
    assert product.shape == (32, 48) and product.dtype == torch.bfloat16 and product.isfinite().all()


def test_liger_gets_its_own_arguments(job, monkeypatch):
    from mrl.bench import device_rates

    class LigerFusedLinearCrossEntropyLoss:
        def __init__(self, reduction):
            assert reduction == "sum"

        def __call__(self, lin_weight, _input, target):
            return torch.nn.functional.cross_entropy(_input @ lin_weight.T, target, reduction="sum")

    liger = ModuleType("liger_kernel.transformers")
    vars(liger)["LigerFusedLinearCrossEntropyLoss"] = LigerFusedLinearCrossEntropyLoss
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setattr(device_rates, "find_spec", lambda name: object())
    monkeypatch.setattr(device_rates, "has_cuda", lambda: True)
    methods = device_rates.head_methods(job, device_rates.HEADS["toy"])
    hidden, weight, targets = torch.randn(5, 8), torch.randn(11, 8), torch.arange(5)
    whole = methods["whole logits in torch"](hidden, weight, targets)
    torch.testing.assert_close(methods["Liger's fused linear cross-entropy"](hidden, weight, targets), -whole.sum())
