"""A trainer and an engine release their GPU memory when they are offloaded, and continue after they are loaded again.

The programs measure the memory that their own processes hold, because other processes may use the GPU.
"""

import importlib.util
import threading

import numpy as np
import pytest
from tiny_families import make_family

from models.architecture import ModelSpec
from mrl.algorithms.losses import CrossEntropy
from mrl.config.process_schema import PauseMode
from mrl.core.types import TokenBlock, TrainBatch
from mrl.rollout.client import EngineClient, SamplingParams
from mrl.rollout.engines.server import EngineServer
from mrl.rollout.engines.server_args import default_server_args, memory_saver_args
from mrl.weight_sync.engine_control import EngineControl
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

WORKSPACES = 80 * 2**20  # bytes: cuBLAS and Transformer Engine keep a workspace of 32 MiB each on a Hopper GPU


def offload_and_load_trainer(rank: int, path: str, dims: ParallelDims) -> None:
    import torch

    from mrl.workers.actor_critic import MegatronActor
    from parallel.device import device, has_cuda, release_cached_memory, synchronize
    from parallel.optimizer import optimizer_tensors

    actor = MegatronActor(ModelSpec(path, dims, "bfloat16", OptimConfig(lr=1e-3), {}))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, 5).tolist() for _ in range(6)]
    block = TokenBlock.from_lists(prompts, [rng.integers(0, 40, 2 + i).tolist() for i in range(6)])
    step = partition_step(TrainBatch.of(block, None), dims, Packing(30))
    batch = step.replica_batches[dims.coords(rank).dp]

    def train() -> None:
        actor.update(block, [batch], CrossEntropy(), [1e-3])

    def everything() -> list[torch.Tensor]:
        return [t.detach().clone().cpu() for t in (*actor._weights(), *optimizer_tensors(actor.optimizer))]

    def held() -> int:
        """Return the bytes that torch has reserved on the GPU for this process."""
        synchronize()
        return release_cached_memory() or 0

    def host_copies() -> list:
        return [block for part in (actor.offloader._weights, actor.offloader._state) for block in part._blocks]

    train()
    total = torch.ones(1, device=device())
    torch.distributed.all_reduce(total)  # so that NCCL has allocated its buffers
    weights = sum(p.numel() * p.element_size() for p in actor.chunks[0].module.parameters())
    state = sum(t.numel() * t.element_size() for t in optimizer_tensors(actor.optimizer))
    before, loaded = everything(), held()
    kept = actor.offload(keep_weights=True)
    without_state = held()
    offloaded = actor.offload(keep_weights=False)
    if has_cuda():
        assert weights > 50e6 / dims.world_size and state > 5 * weights / dims.world_size
        assert loaded - without_state >= state, (loaded, without_state, state)
        assert loaded - held() >= weights + state, (loaded, held(), weights, state)
        assert offloaded < 0.2 * weights + WORKSPACES, (offloaded, weights, state)
        assert all(block.is_pinned() for block in host_copies())
    assert kept - offloaded >= weights, (kept, offloaded, weights)
    addresses = [block.data_ptr() for block in host_copies()]
    actor.load_to_device()
    torch.distributed.all_reduce(total)
    assert total.item() == dims.world_size**2
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    actor.offload(keep_weights=False)
    assert addresses == [block.data_ptr() for block in host_copies()]
    actor.load_to_device()
    train()
    assert not all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))


def offload_and_load_engine(folder: str, log: str) -> None:
    import torch
    from gpu_memory import bytes_by_pid, bytes_of

    from parallel.device import has_cuda

    def held() -> int:
        return bytes_of((process.pid for process in server.processes()), listed) if has_cuda() else 0

    # On a GPU, weights and KV cache use 0.3 of the memory that is free when the engine starts.
    free, listed = (torch.cuda.mem_get_info()[0], bytes_by_pid()) if has_cuda() else (0, {})
    args = default_server_args("bfloat16" if has_cuda() else "float32", 512, mem_fraction_static=0.3)
    with EngineServer(args | memory_saver_args() | {"model_path": folder}, log) as server:
        server.wait_ready(300)
        client, control = EngineClient(server.url, 60), EngineControl(server.url, 60)
        sampling = SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True)
        client.generate([[5, 6, 7]], sampling)
        loaded = held()
        control.pause(PauseMode.retract)
        control.release_memory(["kv_cache", "weights", "cuda_graph"])
        if has_cuda():  # on a CPU, nothing is freed
            assert loaded - held() > 0.2 * free, (loaded, held(), free)
        done = []
        asking = threading.Thread(target=lambda: done.append(client.generate([[5, 6, 7]], sampling)))
        asking.start()
        control.resume_memory(["weights"])
        client.update_weights_from_disk(folder)
        assert not done
        if has_cuda():
            assert loaded - held() > 0.1 * free, (loaded, held(), free)
        control.resume_memory(["cuda_graph", "kv_cache"])
        control.resume()
        asking.join(60)
        assert len(done[0][0].token_ids) == 200


@pytest.fixture
def folder(device_type, tmp_path) -> str:
    """Folder with a model. For a GPU, the model has about 50 million parameters."""
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, head_dim=128, num_hidden_layers=4)
    make_family("qwen3", tmp_path, max_position_embeddings=512, **(sizes if device_type == "cuda" else {}))
    return str(tmp_path)


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(dp=2)], ids=["one", "dp"])
def test_an_offloaded_trainer_releases_its_memory_and_continues(run_program, folder, dims):
    run_program(dims, offload_and_load_trainer, folder, dims)


def test_an_offloaded_engine_releases_its_memory_and_continues(start_process, device_type, folder, tmp_path):
    if device_type == "cuda" and importlib.util.find_spec("torch_memory_saver") is None:
        pytest.skip("torch_memory_saver is not installed")
    process = start_process(offload_and_load_engine, folder, str(tmp_path / "engine.log"))
    process.join(500)
    assert process.exitcode == 0, process
