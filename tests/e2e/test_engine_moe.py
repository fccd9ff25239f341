"""A real SGLang server with a mixture of experts: log-probabilities and routing equal those of Transformers."""

import numpy as np
import pytest
import torch
from live_engines import connected

from mrl.data.synthetic_tasks import make_tiny_model
from mrl.data.tokenizer import character_tokenizer
from mrl.rollout.client import EngineClient, SamplingParams

pytestmark = pytest.mark.extended

PROMPTS = [[5 + (7 * i + j) % 27 for j in range(1 + i % 9)] for i in range(40)]
SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)
LOGPROB_TOLERANCE = 1e-4
TIE_TOLERANCE = 1e-5  # router probabilities that differ by less may rank in either order


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of equal shape with different weights."""
    root = tmp_path_factory.mktemp("qwen3_moe")
    for seed in (0, 1):
        make_tiny_model(
            root / str(seed), character_tokenizer(), context=128, initializer_range=0.1, seed=seed, kind="qwen3_moe"
        )
    return root / "0", root / "1"


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    args = default_server_args("float32", 128) | {
        "model_path": str(folders[0]),
        "enable_return_routed_experts": True,
        "random_seed": 0,
    }
    with EngineServer(args, tmp_path_factory.mktemp("engine") / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        yield EngineClient(server.url, timeout_s=240)


@torch.no_grad()
def check_against_transformers(client, folder):
    """Compare log-probabilities and routing of sampled responses with those of the model in `folder`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    largest = 0.0
    for prompt, done in zip(PROMPTS, client.generate(PROMPTS, SAMPLING, routed_experts=True), strict=True):
        out = model(torch.tensor([prompt + done.token_ids]), output_router_logits=True)
        ours = out.logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])
        largest = max(largest, (ours[:, 0] - torch.tensor(done.logprobs)).abs().max().item())

        probs = torch.stack(out.router_logits, 1).softmax(-1)[:-1]  # [tokens - 1, layers, experts]
        assert done.routed_experts.shape == (len(prompt) + 11, 4, 2) and done.routed_experts.dtype == np.int16
        chosen = torch.from_numpy(done.routed_experts).long()
        assert (chosen[..., 0] != chosen[..., 1]).all()
        assert (probs.gather(-1, chosen) > probs.topk(2, -1).values - TIE_TOLERANCE).all()
    assert largest < LOGPROB_TOLERANCE


def test_logprobs_and_routing_equal_those_of_transformers(client, folders):
    check_against_transformers(client, folders[0])


def test_routing_is_reported_only_if_it_is_requested(client):
    assert client.generate(PROMPTS[:1], SAMPLING)[0].routed_experts is None


def test_pushed_experts_are_used_and_verified(one_rank, client, folders):
    """SGLang stacks the matrices of all experts. After the push, the engine computes the results of the other model."""
    from safetensors.torch import load_file

    tensors = load_file(folders[1] / "model.safetensors")
    with connected([client.url], folders[1], tensors) as sync:
        report = sync.push(1)
    assert report.tensors == len(tensors) == 4 * (6 + 3 + 3 * 8) + 3 and report.buckets > 1
    check_against_transformers(client, folders[1])
