"""The NVIDIA libraries that a process with a GPU uses: a library whose compiled code is missing is not used."""

import logging
import sys
from contextlib import nullcontext
from importlib import import_module, invalidate_caches

import numpy as np
import pytest
import torch

from models.architecture import ModelSpec
from models.megatron_overrides import check_megatron_overrides
from mrl.workers.worker import TrainWorker
from parallel import device
from parallel.dims import ParallelDims

MISSING_FILE = "FileNotFoundError('Could not find shared object file: transformer_engine_torch*.so')"


@pytest.fixture
def process_with_gpu(monkeypatch, tmp_path):
    """`process_with_gpu(files)`: this process acts as if it had a GPU, and can import these modules (path -> Python code)."""
    before = dict(sys.modules)

    def prepare(files: dict[str, str]) -> None:
        for path, code in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(device, "has_cuda", lambda: True)
        monkeypatch.setattr(device, "capabilities", device.capabilities.__wrapped__)  # detects again at each call
        invalidate_caches()

    yield prepare
    for name in [name for name in sys.modules if name not in before]:
        del sys.modules[name]


@pytest.fixture
def capabilities(process_with_gpu):
    """`capabilities(files)` -> Capabilities of a process that has a GPU and can import these modules."""

    def detect(files: dict[str, str]) -> device.Capabilities:
        process_with_gpu(files)
        return device.capabilities()

    return detect


def test_a_transformer_engine_without_its_extension_is_reported_in_one_line_and_hidden_from_megatron(
    capabilities, caplog, own_records
):
    files = {"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": f"raise {MISSING_FILE}"}
    with caplog.at_level(logging.WARNING):
        assert not capabilities(files).transformer_engine
    (message,) = (record.getMessage() for record in own_records())
    assert "\n" not in message and "make setup LOCK=requirements-gpu.txt" in message
    assert "Transformer Engine is installed" in message and "transformer_engine_torch*.so" in message
    with pytest.raises(ImportError):
        import_module("transformer_engine.pytorch")


def test_the_message_about_an_apex_that_cannot_be_imported_says_how_to_build_apex(capabilities, caplog, own_records):
    """The lock of the GPU packages contains no Apex."""
    with caplog.at_level(logging.WARNING):
        assert not capabilities({"amp_C.py": f"raise {MISSING_FILE}"}).apex
    (message,) = (record.getMessage() for record in own_records())
    assert "NVIDIA's Apex is installed" in message and "stage with-apex in the Dockerfile" in message


def test_a_library_that_cannot_be_imported_is_hidden_before_the_first_import_of_megatron(process_with_gpu):
    """Every process calls `patch_megatron_for_cpu` first, also on a GPU."""
    process_with_gpu(
        {"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": f"raise {MISSING_FILE}"}
    )
    device.patch_megatron_for_cpu()
    with pytest.raises(ImportError):
        import_module("transformer_engine.pytorch")


@pytest.mark.parametrize("broken", [False, True])
def test_a_plan_refuses_fields_that_need_a_transformer_engine_that_cannot_be_imported(
    process_with_gpu, own_records, broken
):
    code = f"raise {MISSING_FILE}" if broken else ""
    process_with_gpu({"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": code})
    for overrides in ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, {"moe_grouped_gemm": True}):
        with pytest.raises(ValueError, match="which is not installed or cannot be") if broken else nullcontext():
            check_megatron_overrides(overrides)
    assert device.capabilities().transformer_engine is not broken
    warnings = [record for record in own_records() if record.levelno >= logging.WARNING]
    assert len(warnings) == broken, "the plan and the layers of a process import the library once"


def test_a_rank_refuses_fp8_before_it_waits_for_other_ranks_if_its_transformer_engine_cannot_be_imported(
    process_with_gpu,
):
    """A driver without a GPU only knows that the library is installed."""
    process_with_gpu(
        {"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": f"raise {MISSING_FILE}"}
    )
    spec = ModelSpec("unread", ParallelDims(), "bfloat16", None, {"fp8": "hybrid", "fp8_recipe": "mxfp8"})
    with pytest.raises(
        ValueError, match=r"megatron\.fp8=hybrid: needs Transformer Engine, which is not installed or cannot"
    ):
        TrainWorker.setup(object.__new__(TrainWorker), spec, 0, ("unused", 0), 1.0)


def test_an_apex_without_its_extensions_is_not_used(capabilities, caplog):
    wrong = "raise ImportError('undefined symbol: _ZN3c106detail')"
    found = capabilities({"amp_C.py": "", "fused_weight_gradient_mlp_cuda.py": wrong})
    assert found.apex and not found.fused_wgrad
    assert "undefined symbol" in caplog.text and "no fused weight gradient" in caplog.text


def test_libraries_that_can_be_imported_are_used_and_absent_ones_are_not_reported(capabilities, own_records):
    found = capabilities({"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": ""})
    assert found.transformer_engine and not found.apex and not found.fused_wgrad
    assert not [record for record in own_records() if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("chosen", [None, "1"])
def test_products_of_float32_matrices_are_exact_on_a_gpu_unless_the_user_wants_tf32(capabilities, monkeypatch, chosen):
    """Transformer Engine asks cuBLAS for TF32. NVIDIA's libraries refuse this if the variable is 0."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")  # restores the variable after the test
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE") if chosen is None else monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", chosen)
    reads = "import os; value = os.environ['NVIDIA_TF32_OVERRIDE']"
    capabilities({"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": reads})
    assert import_module("transformer_engine.pytorch").value == (chosen or "0")


def test_on_a_gpu_host_memory_is_pinned(monkeypatch):
    """Copies to a GPU use the full speed of the bus, and do not block the host, only if the host memory is pinned."""
    asked: dict[bool, dict] = {}
    for has_gpu in (False, True):
        monkeypatch.setattr(device, "has_cuda", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(torch, "empty", lambda *_, has_gpu=has_gpu, **options: asked.update({has_gpu: options}))
        device.host_memory(8)
    assert asked[True]["pin_memory"] and not asked[False]["pin_memory"]


def test_an_array_is_copied_to_a_gpu_through_pinned_memory_without_a_wait(monkeypatch):
    copies: list[tuple] = []

    class Pinned:
        def to(self, target: torch.device, non_blocking: bool = False) -> None:
            copies.append((target.type, non_blocking))

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: Pinned())
    device.copy_to_device(np.arange(3), torch.device("cuda"))
    assert copies == [("cuda", True)]
    assert device.copy_to_device(np.arange(3), torch.device("cpu")).tolist() == [0, 1, 2] and len(copies) == 1
