"""What an engine should hold, from hand-made Hugging Face tensors."""

import hashlib

import pytest
import torch

from mrl.weight_sync.checksum import (
    EngineLayout,
    ExpectedChecksums,
    WeightMismatchError,
    expand_experts,
    tensor_checksum,
)

DENSE = {
    "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
}
EXPERTS = {
    "experts.w13_weight": ("experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight"),
    "experts.w2_weight": ("experts.{expert}.down_proj.weight",),
}
E, FFN, HIDDEN = 4, 4, 6
MLP = "model.layers.1.mlp."


def expert_tensors() -> dict[str, torch.Tensor]:
    shapes = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
    generator = torch.Generator().manual_seed(0)
    return {
        f"{MLP}experts.{e}.{part}.weight": torch.randn(shape, generator=generator)
        for part, shape in shapes.items()  # by part, not by expert: the order of sending must not matter
        for e in range(E)
    }


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def expected(tensors: dict[str, torch.Tensor], tp_size: int, ep_size: int = 1) -> ExpectedChecksums:
    checksums = ExpectedChecksums(EngineLayout(expand_experts(DENSE | EXPERTS, E), tp_size, ep_size=ep_size))
    for name, tensor in tensors.items():
        checksums.add(name, tensor)
    return checksums


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
def test_experts_are_stacked_and_cut_as_the_engine_does(tp_size, ep_size):
    """w13 [E, 2 * ffn, hidden]: each rank has its rows of gate, then its rows of up; w2 [E, hidden, ffn]: its columns.

    With ep_size=2 and tp_size=4, ranks 0 and 1 share the first half of the experts.
    """
    tensors = expert_tensors()
    gate, up, down = (
        torch.stack([tensors[f"{MLP}experts.{e}.{part}.weight"] for e in range(E)])
        for part in ("gate_proj", "up_proj", "down_proj")
    )
    size, count, cuts = FFN * ep_size // tp_size, E // ep_size, tp_size // ep_size
    for rank, checksums in enumerate(expected(tensors, tp_size, ep_size).ranks):
        group, cut = rank // cuts, rank % cuts
        whole, mine = slice(group * count, (group + 1) * count), slice(cut * size, (cut + 1) * size)
        assert checksums == {
            f"{MLP}experts.w13_weight": digest(torch.cat([gate[whole, mine], up[whole, mine]], 1)),
            f"{MLP}experts.w2_weight": digest(down[whole, :, mine]),
        }


def test_an_expert_is_not_taken_for_a_plain_mlp():
    """Some layers have experts, some an MLP; shared experts are an MLP; the router stands alone."""
    layout = EngineLayout(expand_experts(DENSE | EXPERTS, 2))
    assert layout.engine_name(f"{MLP}experts.1.up_proj.weight") == (
        f"{MLP}experts.w13_weight",
        tuple(f"{MLP}experts.{e}.{part}.weight" for e in range(2) for part in ("gate_proj", "up_proj")),
    )
    assert layout.engine_name(f"{MLP}up_proj.weight")[0] == f"{MLP}gate_up_proj.weight"
    assert layout.engine_name(f"{MLP}shared_experts.up_proj.weight")[0] == f"{MLP}shared_experts.gate_up_proj.weight"
    assert layout.engine_name(f"{MLP}gate.weight") == (f"{MLP}gate.weight", (f"{MLP}gate.weight",))
    assert layout.engine_name("up_proj.weight") == ("gate_up_proj.weight", ("gate_proj.weight", "up_proj.weight"))


def test_a_missing_expert_is_named():
    tensors = expert_tensors()
    del tensors[f"{MLP}experts.2.down_proj.weight"]
    with pytest.raises(WeightMismatchError, match=r"model\.layers\.1\.mlp\.experts\.w2_weight lack a part"):
        expected(tensors, 1).compare([{}], "engine")


@pytest.mark.parametrize(("tp_size", "rank", "first_row"), [(1, 0, 0), (2, 1, 2)])
def test_dense_projections_are_fused_by_rank(tp_size, rank, first_row):
    q, k, v = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6)
    checksums = ExpectedChecksums(EngineLayout(DENSE, tp_size))
    for name, tensor in {"a.q_proj.weight": q, "a.v_proj.weight": v, "a.k_proj.weight": k}.items():
        checksums.add(name, tensor)
    mine = slice(first_row, first_row + 4 // tp_size)
    assert checksums.ranks[rank] == {"a.qkv_proj.weight": digest(torch.cat([q[mine], k[mine], v[mine]]))}


def test_vocabulary_is_padded_with_zeros():
    checksums = ExpectedChecksums(EngineLayout(DENSE, 2))
    weight = torch.randn(40, 3)
    checksums.add("lm_head.weight", weight)
    padded = torch.cat([weight, torch.zeros(24, 3)])
    assert [rank["lm_head.weight"] for rank in checksums.ranks] == [digest(padded[:32]), digest(padded[32:])]


def test_the_hash_of_pieces_is_that_of_the_whole():
    whole = torch.randn(6, 5).to(torch.bfloat16)
    assert tensor_checksum([whole[:2], whole[2:]]) == tensor_checksum([whole])
