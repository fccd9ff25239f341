"""Experts and adapters on a CPU give the results of SGLang and of the formula; FP8 gives those of a float64 reference."""

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


@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 128)], ids=str)
def test_a_product_with_a_matrix_in_fp8_rounds_both_factors(shape):
    """The reference rounds the input in groups of 128 columns, and multiplies in float64."""
    from models.conversion.fp8_blocks import dequantize_blocks, quantize_blocks
    from mrl.rollout.cpu.torch_ops import block_fp8_linear

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).mul(6).exp()
    weight, bias = (torch.randn(*size, generator=generator) for size in ((200, shape[-1]), (200,)))
    values, scales = quantize_blocks(weight)
    groups = x.view(-1, 128).double()
    largest = groups.abs().amax(1, keepdim=True)
    rounded = (groups * 448 / largest).float().to(torch.float8_e4m3fn).double() * largest / 448
    expected = rounded.view(shape) @ dequantize_blocks(values, scales).double().T + bias.double()
    found = block_fp8_linear(x, values, [128, 128], scales, bias=bias)
    assert found.dtype == torch.float32 and found.shape == (*shape[:-1], 200)
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    unrounded = x.double() @ weight.double().T + bias.double()
    assert 1e-3 < (found - unrounded).abs().max() / unrounded.abs().max() < 0.1


def test_adapters_need_no_pinned_memory(monkeypatch):
    """The backend torch_native adds the adapters of each request to the output of a layer that fuses three matrices."""
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from mrl.rollout.cpu import torch_ops

    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)  # is restored after the test
    for module in (torch_ops.layers, torch_ops.torch_backend):
        monkeypatch.setattr(module, "torch", torch)
    torch_ops.unpin_lora()
    backend = TorchNativeLoRABackend(3, torch.device("cpu"))
    lengths = dict(extend_seq_lens=torch.tensor([3, 2]), extend_seq_lens_cpu=[3, 2])
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, batch_size=2, **lengths)
    backend.prepare_lora_batch(batch, [1, 2], lora_ranks=[0, 2, 2], scalings=[0.0, 0.5, 2.0], use_cuda_graph=False)
    x, base, slices = torch.randn(5, 4), torch.randn(5, 12), ((0, 6), (6, 9), (9, 12))
    a, b = torch.randn(3, 6, 4), torch.randn(3, 12, 2)
    offsets = torch.tensor([0, 6, 9, 12])
    found = backend.run_qkv_lora(x, a, b, offsets, offsets, 6, base_output=base.clone())
    for rows, slot, scale in ((slice(0, 3), 1, 0.5), (slice(3, 5), 2, 2.0)):
        for index, (start, end) in enumerate(slices):
            base[rows, start:end] += scale * x[rows] @ a[slot, 2 * index : 2 * index + 2].T @ b[slot, start:end].T
    torch.testing.assert_close(found, base)
