"""Files and folders that appear only when they are complete have the mode that the user's umask gives."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from parallel.durable_files import apply_umask, atomic_folder
os.umask(int(sys.argv[1], 8))
with atomic_folder("made") as partial:
    (partial / "inner").mkdir()
    save_file({"x": np.zeros(2)}, partial / "inner/model.safetensors")
save_file({"x": np.zeros(2)}, "single.safetensors")
apply_umask(Path("single.safetensors"))
"""


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_modes_follow_the_umask(tmp_path, umask):
    """By default, mkdtemp and safetensors create private files. The program has its own process, because it sets the umask."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", PROGRAM, oct(umask)], cwd=tmp_path, env=environment, check=True, timeout=120)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    files = dict.fromkeys(("model.safetensors", "single.safetensors"), 0o666 & ~umask)
    assert modes == dict.fromkeys(("made", "inner"), 0o777 & ~umask) | files
