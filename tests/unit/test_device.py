"""The NVIDIA libraries that a process with a GPU uses: a library whose compiled code is missing is not used."""

import logging
import sys
from importlib import import_module, invalidate_caches

import pytest

from parallel import device

MISSING_FILE = "FileNotFoundError('Could not find shared object file: transformer_engine_torch*.so')"


@pytest.fixture
def capabilities(monkeypatch, tmp_path):
    """`capabilities(files)` -> Capabilities of a process with a GPU, in whose path are these modules: path -> Python code."""
    before = dict(sys.modules)

    def detect(files: dict[str, str]) -> device.Capabilities:
        for path, code in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(device, "has_cuda", lambda: True)
        invalidate_caches()
        return device.capabilities.__wrapped__()

    yield detect
    for name in [name for name in sys.modules if name not in before]:
        del sys.modules[name]


def test_a_transformer_engine_without_its_extension_is_reported_in_one_line_and_hidden_from_megatron(
    capabilities, caplog
):
    files = {"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": f"raise {MISSING_FILE}"}
    with caplog.at_level(logging.WARNING):
        assert not capabilities(files).transformer_engine
    (message,) = (record.getMessage() for record in caplog.records)
    assert "\n" not in message and "make setup LOCK=requirements-gpu.txt" in message
    assert "Transformer Engine is installed" in message and "transformer_engine_torch*.so" in message
    with pytest.raises(ImportError):
        import_module("transformer_engine.pytorch")


def test_an_apex_without_its_extensions_is_not_used(capabilities, caplog):
    wrong = "raise ImportError('undefined symbol: _ZN3c106detail')"
    found = capabilities({"amp_C.py": "", "fused_weight_gradient_mlp_cuda.py": wrong})
    assert found.apex and not found.fused_wgrad
    assert "undefined symbol" in caplog.text and "no fused weight gradient" in caplog.text


def test_libraries_that_can_be_imported_are_used_and_absent_ones_are_not_reported(capabilities, caplog):
    found = capabilities({"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": ""})
    assert found.transformer_engine and not found.apex and not found.fused_wgrad
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
