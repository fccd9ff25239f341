"""A Mamba-2 layer of Megatron's model equals a layer that is computed in float64 from token to token, with its gradients."""

import pytest
from test_gated_delta_net import PACK, largest_differences, norm
from tiny_families import make_family

from parallel.dims import ParallelDims

EPS = 1e-5


def reference_layer(p: dict, hidden, layer):
    """Return the outputs [S, H] of the layer with the parameters `p`, for hidden states [S, H]. `layer` has its sizes.

    The rows of a group are its gates, its values, its key, its query, and one number for each of its heads.
    """
    import segment_recurrences as reference
    import torch.nn.functional as F

    heads = layer.heads // layer.groups
    values, state = heads * layer.head_dim, layer.state_dim
    projected = norm(hidden, EPS) * p["linear_in.layer_norm_weight"] @ p["linear_in.weight"].T
    gate, convolved, numbers = projected.unflatten(1, (layer.groups, -1)).split(
        [values, values + 2 * state, heads], dim=-1
    )

    def convolution(rows):
        return reference.convolution(rows, p["conv_weight"]) + p.get("conv_bias", 0.0)

    convolved = F.silu(reference.by_sequence(PACK, convolution, convolved.flatten(1)))
    v, k, q = convolved.unflatten(1, (layer.groups, -1)).split([values, state, state], dim=-1)
    v, step = v.reshape(len(v), layer.heads, -1), F.softplus(numbers.flatten(1) + p["dt_bias"])
    scanned = reference.by_sequence(PACK, reference.selective_scan, q, k, v, -p["A_log"].exp() * step, step)
    gated = (scanned + p["D"][:, None] * v).reshape(gate.shape) * F.silu(gate)
    return norm(gated, EPS).flatten(1) * p["norm_weight"] @ p["linear_proj.weight"].T


@pytest.mark.extended_except("nemotron_h-cp2")
@pytest.mark.parametrize("cp", [1, 2, 3], ids="cp{}".format)
@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_moe"])
def test_a_layer_equals_the_recurrence_from_token_to_token(run_ranks, tmp_path, name, cp):
    """The second model has one head in each group, and no bias of the convolution."""
    folder, dims = make_family(name, tmp_path, layers_block_type=["linear_attention"]), ParallelDims(cp=cp)
    for differences in run_ranks(dims, largest_differences, folder, dims, reference_layer):
        assert len(differences) == (11 if name == "nemotron_h" else 10)
        assert max(differences.values()) < 1e-9, differences
