"""A checkpoint that is written in the background contains the state when the save began, even if the model is offloaded."""

import pytest

from models.architecture import ModelSpec
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig


def save_and_load(rank: int, path: str, folder: str, dims: ParallelDims) -> None:
    import torch

    from mrl.workers.actor_critic import MegatronActor
    from parallel.device import device

    actor = MegatronActor(ModelSpec(path, dims, "bfloat16", OptimConfig(lr=1e-3), {}))
    weights = [tensor.clone() for tensor in actor._weights()]
    torch.cuda.manual_seed(7)
    actor.begin_save(folder, asynchronous=True)  # a fork writes the copies in host memory
    number = torch.rand((), device=device()).item()
    with torch.no_grad():
        for tensor in actor._weights():
            tensor.zero_()
    actor.offload(keep_weights=False)  # suspends the communicators, which the end of the save must not use
    actor.finish_save(60)
    actor.load_to_device()
    assert actor.load(folder)
    assert torch.rand((), device=device()).item() == number
    assert all(torch.equal(a, b) for a, b in zip(actor._weights(), weights, strict=True))


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(dp=2)], ids=["one", "dp"])
def test_a_checkpoint_holds_what_the_device_held_when_it_began(run_program, tiny_qwen3, tmp_path, dims):
    run_program(dims, save_and_load, str(tiny_qwen3()), str(tmp_path / "checkpoint"), dims)
