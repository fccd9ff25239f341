"""Real SGLang servers of several model families: log-probabilities equal those of Transformers, also after a weight push."""

from typing import Any

import pytest
import torch
from live_engines import connected
from tiny_families import MINISTRAL_ROPE, make_family

from mrl.rollout.client import EngineClient, SamplingParams

pytestmark = pytest.mark.extended

PROMPTS = [[3 + (7 * i + j) % 37 for j in range(1 + i % 9)] for i in range(12)]
SAMPLING = SamplingParams(max_new_tokens=30, ignore_eos=True)
LOGPROB_TOLERANCE = 1e-4
ROPE = dict(rope_type="default", rope_theta=5000.0)
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "glm4_moe": dict(moe_intermediate_size=32),
    "deepseek_v3": dict(moe_intermediate_size=32),
    "gemma3": dict(rope_parameters=dict(full_attention=ROPE, sliding_attention=ROPE | dict(rope_theta=300.0))),
    # SGLang scales queries as if original_max_position_embeddings were 16384
    "ministral3": dict(rope_parameters=MINISTRAL_ROPE | dict(original_max_position_embeddings=16384)),
    "mixtral": dict(head_dim=8),  # SGLang ignores the field, and uses hidden_size / num_attention_heads
}


@torch.no_grad()
def logprob_difference(client: EngineClient, folder) -> float:
    """Return the largest difference between log-probabilities of the engine and of Transformers, over sampled responses."""
    from transformers import AutoModelForCausalLM

    model, largest = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), 0.0
    for prompt, done in zip(PROMPTS, client.generate(PROMPTS, SAMPLING), strict=True):
        logits = model(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
        ours = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        largest = max(largest, (ours - torch.tensor(done.logprobs)).abs().max().item())
    return largest


@pytest.mark.parametrize(
    "name",
    [
        *("llama_attention_biased", "qwen2_tied_multi_head", "mistral", "gemma3", "olmo2", "phi3"),
        *("mixtral", "glm4_moe", "deepseek_v3", "glm4", "ministral3"),
    ],
)
def test_an_engine_samples_from_its_model_and_from_pushed_weights(one_rank, tmp_path, name):
    from safetensors.torch import load_file

    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    # On a CPU, SGLang pads weights of other sizes with zeros, and includes the zeros in its checksums.
    sizes: dict[str, Any] = dict(intermediate_size=64)
    sizes |= OWN_FIELDS.get(name, {})
    first = make_family(name, tmp_path / "first", **sizes)
    other = make_family(name, tmp_path / "other", initializer_range=0.15, **sizes)
    args = default_server_args("float32", 64) | {"model_path": str(first), "random_seed": 0}
    with EngineServer(args, tmp_path / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        client = EngineClient(server.url, timeout_s=240)
        assert logprob_difference(client, first) < LOGPROB_TOLERANCE < logprob_difference(client, other)

        tensors = load_file(other / "model.safetensors")
        with connected([client.url], other, tensors) as sync:
            assert sync.push(version=1).tensors == len(tensors)
        assert logprob_difference(client, other) < LOGPROB_TOLERANCE
