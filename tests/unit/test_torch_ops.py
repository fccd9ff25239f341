"""Experts on a CPU give the results of SGLang's own version."""

from types import SimpleNamespace

import pytest
import torch

E, FFN, HIDDEN, TOPK = 6, 5, 8, 2


@pytest.fixture(scope="module")
def layer():
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

    generator = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        num_experts=E,
        num_local_experts=E,
        w13_weight=torch.randn(E, 2 * FFN, HIDDEN, generator=generator),
        w2_weight=torch.randn(E, HIDDEN, FFN, generator=generator),
        moe_runner_config=MoeRunnerConfig(activation="silu"),
    )


def routed(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x, scores = (torch.randn(num_tokens, n, generator=generator) for n in (HIDDEN, E))
    weights, ids = scores.softmax(-1).topk(TOPK)
    return x, weights, ids


def run(layer, x, weights, ids):
    from mrl.rollout.cpu.torch_ops import experts

    method = SimpleNamespace(moe_runner_config=layer.moe_runner_config, with_bias=False)
    dispatched = SimpleNamespace(hidden_states=x, topk_output=(weights, ids, None))
    return experts(method, layer, dispatched).hidden_states


def stock(layer, x, weights, ids):
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

    return moe_forward_native(layer, x, (weights, ids, None), layer.moe_runner_config)


@pytest.mark.parametrize("num_tokens", [1, 2, 50])
def test_experts_equal_sglangs(layer, num_tokens):
    x, weights, ids = routed(num_tokens)
    assert torch.allclose(run(layer, x, weights, ids), stock(layer, x, weights, ids), atol=1e-5)


def test_the_sum_over_ranks_with_some_experts_each_is_the_result_of_all(layer):
    """On each rank, the number -1 stands for all experts of other ranks."""
    x, weights, ids = routed(20)
    total = torch.zeros_like(x)
    for first in (0, E // 2):
        local = ids - first
        local = torch.where((local >= 0) & (local < E // 2), local, -1)
        mine = SimpleNamespace(
            num_local_experts=E // 2,
            w13_weight=layer.w13_weight[first : first + E // 2],
            w2_weight=layer.w2_weight[first : first + E // 2],
            moe_runner_config=layer.moe_runner_config,
        )
        total += run(mine, x, weights, local)
    assert torch.allclose(total, stock(layer, x, weights, ids), atol=1e-5)
