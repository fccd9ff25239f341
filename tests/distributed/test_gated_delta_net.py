"""A gated delta net of Megatron's model equals a layer that is computed in float64 from token to token, with its gradients."""

import pytest
from tiny_families import make_family

from parallel.dims import ParallelDims
from parallel.packing import Segment

# two prompts with responses, a response to a response, and a sequence of three chunks
PACK = [Segment(5), Segment(7, 0), Segment(70, 0), Segment(2, 1), Segment(3), Segment(1, 4), Segment(140)]
EPS = 1e-6


def norm(x, eps: float = EPS):
    """Return the RMSNorm of `x` over its last dim, without a weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def reference_layer(p: dict, hidden, layer):
    """Return the outputs [S, H] of the layer with the parameters `p`, for hidden states [S, H]. `layer` has its sizes."""
    import segment_recurrences as reference
    import torch
    import torch.nn.functional as F

    key_heads, key_dim, value_dim = layer.key_heads, layer.key_dim, layer.value_dim
    repeat = len(p["A_log"]) // key_heads
    projected = norm(hidden) * (1 + p["linear_in.layer_norm_weight"]) @ p["linear_in.weight"].T
    columns = [key_dim, key_dim, *[repeat * value_dim] * 2, repeat, repeat]
    q, k, v, gate, b, a = projected.unflatten(1, (key_heads, -1)).split(columns, dim=-1)
    qkv = torch.cat([q, k, v], dim=-1).flatten(1)
    convolved = reference.by_sequence(PACK, lambda rows: reference.convolution(rows, p["conv_weight"]), qkv)
    q, k, v = F.silu(convolved).unflatten(1, (key_heads, -1)).split(columns[:3], dim=-1)
    q, k = (x.repeat_interleave(repeat, dim=1) for x in (q, k))
    v, gate = (x.reshape(len(x), -1, value_dim) for x in (v, gate))
    log_decay = -p["A_log"].exp() * F.softplus(a.flatten(1) + p["dt_bias"])
    out = reference.by_sequence(PACK, reference.delta_rule, q, k, v, log_decay, b.flatten(1).sigmoid())
    return (norm(out) * p["norm_weight"] * F.silu(gate)).flatten(1) @ p["linear_proj.weight"].T


def largest_differences(rank: int, folder, dims: ParallelDims, reference=reference_layer) -> dict[str, float]:
    """Return the largest difference of outputs, of gradients of hidden states, and of gradients of each parameter.

    The layer is the first block of the first layer. `reference`: computes the expected outputs.
    """
    import torch
    import torch.distributed as dist

    from models.hf_config import HFConfig
    from models.model_builder import build_model
    from parallel import groups
    from parallel.packing import pack

    layer = build_model(HFConfig.load(folder), dims, torch.float64)[0].decoder.layers[0].self_attention
    torch.manual_seed(0)
    parameters = dict(layer.named_parameters())
    for parameter in parameters.values():
        parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    total = sum(segment.length for segment in PACK)
    hidden = torch.randn(total + 1, 32, dtype=torch.float64)  # the last row stands for padding
    weights = torch.linspace(-1, 1, total * 32, dtype=torch.float64).view(total, 32)

    expected_inputs = hidden[:-1].clone().requires_grad_()
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in parameters.items()}
    expected = reference(copies, expected_inputs, layer)
    (expected * weights).sum().backward()

    packed = pack(PACK, torch.device("cpu"), cp_rank=dims.coords(rank).cp, cp_size=dims.cp)
    real = packed.token_index >= 0
    tokens = packed.token_index[real]
    own = hidden[packed.token_index][:, None].requires_grad_()
    out = layer(own, packed_seq_params=packed)[0][:, 0]
    (out[real] * weights[tokens]).sum().backward()
    differences = {
        "outputs": out[real] - expected[tokens],
        "hidden states": own.grad[real, 0] - expected_inputs.grad[tokens],
    }
    for name, parameter in parameters.items():
        dist.all_reduce(parameter.grad, group=groups.cp_group())
        assert copies[name].grad.abs().max() > 1e-3, f"{name}: a gradient of zero proves nothing"
        differences[name] = parameter.grad - copies[name].grad
    return {name: difference.abs().max().item() for name, difference in differences.items()}


@pytest.mark.extended_except("qwen3_5-cp2")
@pytest.mark.parametrize("cp", [1, 2, 3], ids="cp{}".format)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_biased"])
def test_a_layer_equals_the_recurrence_from_token_to_token(run_ranks, tmp_path, name, cp):
    folder, dims = make_family(name, tmp_path, num_hidden_layers=1), ParallelDims(cp=cp)
    for differences in run_ranks(dims, largest_differences, folder, dims):
        assert len(differences) == 9
        assert max(differences.values()) < 1e-9, differences
