"""Checkpoints of a model on a GPU. Run with `pytest -m gpu`; each runs in a new process, as CUDA does not survive a fork."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from mrl.workers.actor_critic import MegatronActor
from models.architecture import ModelSpec
from parallel import collectives, device, groups
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

path, folder = sys.argv[1:]
collectives.init_process_group(0, 1, "127.0.0.1", 29512, 60)
groups.initialize(ParallelDims(), 0)
actor = MegatronActor(ModelSpec(path, ParallelDims(), "bfloat16", OptimConfig(lr=1e-3), {}))
weights = [tensor.clone() for tensor in actor._weights()]
torch.cuda.manual_seed(7)
actor.begin_save(folder, asynchronous=True)  # a fork writes what was copied to the host
number = torch.rand((), device="cuda").item()
with torch.no_grad():
    for tensor in actor._weights():
        tensor.zero_()
actor.finish_save(60)
assert actor.load(folder)
assert torch.rand((), device="cuda").item() == number
assert all(torch.equal(a, b) for a, b in zip(actor._weights(), weights, strict=True))
"""


@pytest.mark.gpu
def test_a_checkpoint_holds_what_the_gpu_held_when_it_began(tiny_qwen3, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tiny_qwen3()), str(tmp_path / "checkpoint")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
