"""TokenBlock and its file: the optional column of routed experts goes wherever the tokens go."""

import numpy as np
import pytest

from mrl.rollout import recording
from mrl.types import TokenBlock

PROMPTS, RESPONSES = [[1, 2, 3], [4], [5, 6]], [[7, 8], [9], [10, 11, 12]]
LENGTHS = [5, 2, 5]
LOGPROBS = [[-0.1, -0.2], [-0.3], [-0.4, -0.5, -0.6]]


def routing() -> list[np.ndarray]:
    """[tokens - 1, 2 layers, 2 experts] of each sequence, every number another."""
    start = np.cumsum([0, *LENGTHS])
    return [
        np.arange(4 * s, 4 * (s + n - 1), dtype=np.int16).reshape(-1, 2, 2)
        for s, n in zip(start, LENGTHS, strict=False)
    ]


def block(*, routed: bool) -> TokenBlock:
    return TokenBlock.from_lists(PROMPTS, RESPONSES, LOGPROBS, routing() if routed else None)


def test_routed_experts_lie_beside_their_tokens():
    column = block(routed=True).routed_experts
    assert column.shape == (12, 2, 2) and column.dtype == np.int16
    assert [int(row[0, 0]) for row in column] == [0, 4, 8, 12, -1, 20, -1, 28, 32, 36, 40, -1]


@pytest.mark.parametrize("routed", [True, False])
def test_select_takes_every_column_along(routed):
    picked = block(routed=routed).select(np.array([2, 0]))
    assert picked.tokens.tolist() == [5, 6, 10, 11, 12, 1, 2, 3, 7, 8]
    assert picked.cu_seqlens.tolist() == [0, 5, 10]
    assert np.allclose(picked.rollout_logprobs, [-0.4, -0.5, -0.6, -0.1, -0.2])
    if routed:
        assert picked.routed_experts[:, 0, 0].tolist() == [28, 32, 36, 40, -1, 0, 4, 8, 12, -1]
    else:
        assert picked.routed_experts is None


@pytest.mark.parametrize("routed", [True, False])
def test_a_recorded_step_is_read_back(tmp_path, routed):
    written = block(routed=routed)
    recording.write(tmp_path, 3, written, groups=np.array([0, 0, 1]))
    read, columns = recording.read(tmp_path, 3)
    assert list(columns) == ["groups"] and columns["groups"].tolist() == [0, 0, 1]
    for name, value in vars(written).items():
        assert np.array_equal(vars(read)[name], value)


def test_routing_of_other_sequences_is_refused():
    with pytest.raises(AssertionError, match="routed experts of 2 of 3 sequences"):
        TokenBlock.from_lists(PROMPTS, RESPONSES, LOGPROBS, routing()[:2])
    with pytest.raises(AssertionError, match="routed experts of 4 tokens for a sequence of 2"):
        TokenBlock.from_lists(PROMPTS, RESPONSES, LOGPROBS, [routing()[0]] * 3)
