"""The actor on a GPU. Run with `pytest -m gpu`; the program runs in a new process, because CUDA does not survive a fork."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import numpy as np, torch
from transformers import Qwen3ForCausalLM
from mrl.algorithms.losses import CrossEntropy
from mrl.algorithms.objective import token_weights
from mrl.core.types import RankBatch, TokenBlock
from mrl.workers.actor_critic import MegatronActor
from models.architecture import ModelSpec
from parallel import collectives, device, groups
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

path = sys.argv[1]
collectives.init_process_group(0, 1, "127.0.0.1", 29511, 60)
groups.initialize(ParallelDims(), 0)
actor = MegatronActor(ModelSpec(path, ParallelDims(), "float32", OptimConfig(lr=1e-3), {}))
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 40, 5).tolist() for _ in range(6)]
responses = [rng.integers(0, 40, 2 + i).tolist() for i in range(6)]
block = TokenBlock.from_lists(prompts, responses)
rows = np.arange(6)
share = RankBatch((rows,), np.zeros(6, np.float32), token_weights(block.response_lengths, "token_mean"))
found = torch.cat(actor.compute_logprobs(block, share)).cpu()
model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
expected = []
for prompt, response in zip(prompts, responses):
    ids = torch.tensor(prompt + response)
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
    expected.append(logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt):, None])[:, 0])
torch.testing.assert_close(found.double(), torch.cat(expected), atol=1e-3, rtol=0)
before = actor.update(block, [share], CrossEntropy(), [1e-2])[0].sums["loss"]
assert actor.update(block, [share], CrossEntropy(), [1e-2])[0].sums["loss"] < before
"""


@pytest.mark.gpu
def test_logprobs_equal_transformers_and_an_update_lowers_the_loss(tiny_qwen3):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_qwen3())], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
