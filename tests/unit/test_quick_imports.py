"""Imports that a trainer process without a GPU avoids, and imports that commands without a cluster avoid."""

import gc
import subprocess
import sys

import pytest
import torch

from mrl.core.code_locations import quick_imports

PROGRAM = """
import sys
from parallel import device
device.patch_megatron_for_cpu()
import models.model_builder
from megatron.core.fusions import fused_bias_swiglu
import torch

from mrl.core.code_locations import quick_imports
gate = torch.ones(2, 4, requires_grad=True)
fused_bias_swiglu.swiglu(gate).sum().backward()
print("torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles Megatron's fused functions")
@pytest.mark.extended
def test_importing_megatron_on_a_cpu_does_not_import_the_torch_compiler():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("commands", [("generate", "evaluate"), ("plan", "convert", "doctor")], ids=" ".join)
def test_commands_without_a_cluster_import_neither_ray_nor_sglang(commands):
    """Without the extra `train`, neither of the two packages is installed."""
    modules = ", ".join(f"mrl.commands.{command}" for command in commands)
    program = f"import sys, {modules}; print({{'ray', 'sglang'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


METADATA = """
import importlib.metadata
standard = importlib.metadata.packages_distributions

from mrl.core.code_locations import quick_imports
with quick_imports():
    quick = importlib.metadata.packages_distributions
assert importlib.metadata.packages_distributions is standard is not quick
expected, found = standard(), quick()
assert expected["PIL"] == ["pillow"] and expected["mrl"]
print({name for name, each in expected.items() if sorted(found[name]) != sorted(each)})
"""


@pytest.mark.extended
def test_quick_package_metadata_has_the_distributions_of_the_standard_library():
    """The quick function may add names of missing files. A new process has the packages of the installation, and no others."""
    done = subprocess.run([sys.executable, "-c", METADATA], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_large_packages_are_imported_without_garbage_collection():
    frozen = gc.get_freeze_count()
    try:
        with quick_imports():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > frozen, "later collections skip what was imported"
    finally:
        gc.unfreeze()
