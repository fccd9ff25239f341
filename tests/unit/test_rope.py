"""parallel.rope: frequencies are bit-equal to those of transformers, and every parameter of a config is checked."""

import re

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from parallel.rope import rope_from_parameters

LLAMA31 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
    rope_theta=5e5,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, rope_theta=1e6)
DEEPSEEK = dict(
    YARN,
    factor=40.0,
    original_max_position_embeddings=4096,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=0.707,
    rope_theta=1e4,
)
LONG = dict(  # for three pairs
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0, 1.3, 2.1],
    long_factor=[1.5, 4.0, 9.0],
    original_max_position_embeddings=1024,
    factor=4.0,
)
KNOWN = [
    dict(rope_type="default", rope_theta=5e3),
    dict(rope_type="linear", factor=2.5, rope_theta=1e4),
    LLAMA31,
    LLAMA31 | dict(factor=32.0, original_max_position_embeddings=64, rope_theta=1e4),
    YARN,
    YARN | dict(attention_factor=0.8),
    YARN | dict(factor=0.5, beta_fast=24.0, beta_slow=2.0),
    YARN | dict(beta_fast=None, mscale=1.0),
    YARN | dict(truncate=False, rope_theta=150000.0, factor=32.0, original_max_position_embeddings=4096),
    YARN | dict(original_max_position_embeddings=6),  # here the ramp is a step
    DEEPSEEK,
]


def theirs(parameters: dict, dim: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        head_dim=dim,
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=parameters.get("original_max_position_embeddings", 64),
        rope_parameters=dict(parameters),
    )
    if parameters["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("parameters", KNOWN, ids=lambda p: p["rope_type"])
def test_frequencies_and_amplitude_equal_those_of_transformers(parameters, dim):
    rope = rope_from_parameters(parameters, dim)
    expected, amplitude = theirs(parameters, dim)
    assert torch.equal(rope.inv_freq(), expected)
    assert rope.amplitude == amplitude
    torch.testing.assert_close(rope.inv_freq(torch.float64), expected.double(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("change", [{}, dict(factor=0.5), dict(attention_factor=0.8)], ids=str)
def test_short_frequencies_of_longrope_equal_those_of_transformers(change):
    rope = rope_from_parameters(LONG | change, 6)
    expected, amplitude = theirs(LONG | change, 6)
    assert torch.equal(rope.inv_freq(), expected) and rope.amplitude == amplitude
    assert not torch.equal(expected, rope_from_parameters(dict(rope_type="default", rope_theta=1e4), 6).inv_freq())
    assert rope.longest_sequence(4096) == 1024 and rope.longest_sequence(100) == 100


def test_sglang_uses_the_same_angles_of_longrope_for_short_sequences():
    from sglang.srt.layers.rotary_embedding import get_rope

    parameters = {name: value for name, value in LONG.items() if name != "factor"}  # SGLang derives the factor
    theirs = get_rope(6, 6, 4096, 10000.0, rope_scaling=parameters).long_short_cos_sin_cache[:1024]
    rope = rope_from_parameters(LONG, 6)
    angles = torch.outer(torch.arange(1024).float(), rope.inv_freq())
    ours = torch.cat([angles.cos(), angles.sin()], -1) * rope.amplitude
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("parameters", KNOWN, ids=lambda p: p["rope_type"])
def test_float64_frequencies_equal_those_of_transformers(monkeypatch, parameters, dim):
    """The code of transformers names torch.float and torch.float32, so the test replaces both by float64."""
    found = rope_from_parameters(parameters, dim).inv_freq(torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    expected, _ = theirs(parameters, dim)
    monkeypatch.undo()
    assert expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("parameters", [p for p in KNOWN if not p.keys() & {"attention_factor", "mscale"}], ids=str)
def test_sglang_uses_the_same_angles(parameters):
    """Some parameters are not compared: SGLang has another name for `attention_factor`, and refuses beta_fast=None."""
    from sglang.srt.layers.rotary_embedding import get_rope

    theirs = get_rope(64, 64, 256, parameters["rope_theta"], rope_scaling=dict(parameters)).cos_sin_cache[:256]
    rope = rope_from_parameters(parameters, 64)
    angles = torch.outer(torch.arange(len(theirs)).float(), rope.inv_freq())
    ours = torch.cat([angles.cos(), angles.sin()], -1) * rope.amplitude
    atol = 1e-5 if parameters["rope_type"] == "linear" else 0  # SGLang then divides positions, not frequencies
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("parameters", "dim", "message"),
    [
        (dict(rope_type="dynamic", factor=2.0, rope_theta=1e4), 16, "rope_type='dynamic' is not implemented; known:"),
        (dict(rope_type="proportional", rope_theta=1e4), 16, "rope_type='proportional' is not implemented"),
        (
            LONG | dict(short_factor=[1.0]),
            6,
            "short_factor=[1.0] of the rotary embedding: expected a list of 3 positive",
        ),
        (LONG | dict(long_factor=None), 6, "long_factor=None of the rotary embedding: expected a list of 3 positive"),
        (dict(rope_type="default", rope_theta=1e4, factor=2.0), 16, "factor=2.0 is not a field of rope_type='default'"),
        (YARN | dict(beta_quick=3), 16, "beta_quick=3 is not a field of rope_type='yarn'"),
        (dict(rope_type="linear", rope_theta=1e4), 16, "factor is missing; rope_type='linear' needs it"),
        (dict(rope_type="linear", rope_theta=1e4, factor=None), 16, "factor=None of the rotary embedding"),
        (dict(rope_type="linear", rope_theta=1e4, factor="2"), 16, "factor='2' of the rotary embedding"),
        (
            dict(rope_type="linear", rope_theta=1e4, factor=0.0),
            16,
            "factor=0.0 of the rotary embedding: expected a positive number.",
        ),
        (YARN | dict(mscale=-1.0), 16, "mscale=-1.0 of the rotary embedding: expected 0 or a positive number."),
        (LLAMA31 | dict(low_freq_factor=4.0), 16, "low_freq_factor=4.0 of the rotary embedding: expected less than"),
        (dict(rope_type="default", rope_theta=1e4), 15, "rotates 15 components of a head in pairs"),
    ],
)
def test_an_unsupported_parameter_is_named_in_the_error(parameters, dim, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rope_from_parameters(parameters, dim)


def test_a_partial_rotation_changes_only_the_first_components_of_a_head():
    """The reference is GLM-4.5 in transformers. Each token is rotated by its position in its own sequence."""
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    from parallel import device

    device.patch_megatron_for_cpu()
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    from parallel.megatron_layers import PackedRotaryEmbedding
    from parallel.packing import Segment, pack

    rope = rope_from_parameters(dict(rope_type="default", rope_theta=50.0), 8)
    packed = pack([Segment(5), Segment(3)], torch.device("cpu"))
    rotary = PackedRotaryEmbedding(rope)
    angles = rotary(rotary.get_rotary_seq_len(None, None, None, None, packed))  # [8, 1, 8]
    heads = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0))  # [tokens, heads, head_dim]
    found = _apply_rotary_pos_emb_bshd(heads, angles)

    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    angles_of_positions = torch.outer(positions.float(), rope.inv_freq()).repeat(1, 2)[None]
    expected, _ = apply_rotary_pos_emb(
        heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], angles_of_positions.cos(), angles_of_positions.sin()
    )
    torch.testing.assert_close(found, expected[0].transpose(0, 1))
    assert torch.equal(found[..., 8:], heads[..., 8:]) and not torch.allclose(found[1, :, :8], heads[1, :, :8])
