"""GPU memory that an offloaded trainer and an offloaded engine release. Run with `pytest -m gpu`.

Every program runs in a new process, because CUDA does not survive a fork.
"""

import importlib.util
import subprocess
import sys

import pytest
from tiny_families import make_family

TRAINER = """
import sys
import numpy as np, torch
from mrl.algorithms.losses import CrossEntropy
from mrl.algorithms.objective import token_weights
from mrl.core.types import RankBatch, TokenBlock
from mrl.workers.actor_critic import MegatronActor
from models.architecture import ModelSpec
from parallel import collectives, device, groups
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig
from parallel.optimizer import optimizer_tensors

collectives.init_process_group(0, 1, "127.0.0.1", 29513, 60)
groups.initialize(ParallelDims(), 0)
actor = MegatronActor(ModelSpec(sys.argv[1], ParallelDims(), "bfloat16", OptimConfig(lr=1e-3), {}))
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 40, 5).tolist() for _ in range(6)]
responses = [rng.integers(0, 40, 2 + i).tolist() for i in range(6)]
block = TokenBlock.from_lists(prompts, responses)
share = RankBatch((np.arange(6),), np.zeros(6, np.float32), token_weights(block.response_lengths, "token_mean"))

def train():
    actor.update(block, [share], CrossEntropy(), [1e-3])

def everything():
    return [t.detach().clone().cpu() for t in (*actor._weights(), *optimizer_tensors(actor.optimizer))]

def free():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]

train()
total = torch.ones(1, device="cuda")
torch.distributed.all_reduce(total)  # NCCL has its buffers
weights = sum(p.numel() * p.element_size() for p in actor.chunks[0].module.parameters())
state = sum(t.numel() * t.element_size() for t in optimizer_tensors(actor.optimizer))
assert weights > 50e6 and state > 5 * weights
before, loaded = everything(), free()
kept = actor.offload(keep_weights=True)
assert free() - loaded >= state, (free() - loaded, state)
offloaded = actor.offload(keep_weights=False)
assert free() - loaded >= weights + state, (free() - loaded, weights + state)
assert kept - offloaded >= weights and offloaded < 0.2 * weights, (kept, offloaded, weights)
host = [[block.data_ptr() for block in part._blocks] for part in (actor.offloader._weights, actor.offloader._state)]
assert all(block.is_pinned() for part in (actor.offloader._weights, actor.offloader._state) for block in part._blocks)
actor.load_to_device()
torch.distributed.all_reduce(total)
assert total.item() == 1.0
assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
actor.offload(keep_weights=False)
assert host == [[b.data_ptr() for b in part._blocks] for part in (actor.offloader._weights, actor.offloader._state)]
actor.load_to_device()
train()
assert not all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
"""

ENGINE = """
import sys, threading
import torch
from mrl.config.process_schema import PauseMode
from mrl.rollout.client import EngineClient, SamplingParams
from mrl.rollout.engines.server import EngineServer
from mrl.rollout.engines.server_args import default_server_args
from mrl.rollout.engines.server_args import memory_saver_args
from mrl.weight_sync.engine_control import EngineControl

folder, log = sys.argv[1:]
args = default_server_args("bfloat16", 512) | memory_saver_args() | {"model_path": folder, "mem_fraction_static": 0.3}
with EngineServer(args, log) as server:
    server.wait_ready(300)
    client, control = EngineClient(server.url, 60), EngineControl(server.url, 60)
    sampling = SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True)
    client.generate([[5, 6, 7]], sampling)
    loaded, total = torch.cuda.mem_get_info()
    control.pause(PauseMode.retract)
    control.release_memory(["kv_cache", "weights"])
    offloaded, _ = torch.cuda.mem_get_info()
    assert offloaded - loaded > 0.2 * total, (loaded, offloaded, total)  # weights and KV cache are 0.3 of it
    done = []
    asking = threading.Thread(target=lambda: done.append(client.generate([[5, 6, 7]], sampling)))
    asking.start()
    control.resume_memory(["weights"])
    client.update_weights_from_disk(folder)
    assert torch.cuda.mem_get_info()[0] - loaded > 0.1 * total and not done
    control.resume_memory(["kv_cache"])
    control.resume()
    asking.join(60)
    assert len(done[0][0].token_ids) == 200
"""


def run(code: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model of about 50 million parameters."""
    path = tmp_path_factory.mktemp("qwen3")
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, head_dim=128)
    make_family("qwen3", path, **sizes, num_hidden_layers=4, max_position_embeddings=512)
    return str(path)


@pytest.mark.gpu
def test_an_offloaded_trainer_releases_its_weights_and_optimizer_state(folder):
    run(TRAINER, folder)


@pytest.mark.gpu
def test_an_offloaded_engine_releases_its_weights_and_kv_cache(folder, tmp_path):
    if importlib.util.find_spec("torch_memory_saver") is None:
        pytest.skip("torch_memory_saver is not installed")
    run(ENGINE, folder, str(tmp_path / "engine.log"))
