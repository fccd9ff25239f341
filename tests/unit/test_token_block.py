"""TokenBlock and its file: the optional column of routed experts goes wherever the tokens go."""

import numpy as np
import pytest

from mrl.core.types import TokenBlock
from mrl.rollout import rollout_log

PROMPTS, RESPONSES = [[1, 2, 3], [4], [5, 6]], [[7, 8], [9], [10, 11, 12]]
LENGTHS = [5, 2, 5]
SAMPLED = [[True, False], [False], [False, True, True]]
LOGPROBS = [[-0.1, -0.2], [-0.3], [-0.4, -0.5, -0.6]]


def routing() -> list[np.ndarray]:
    """Return an array [tokens - 1, 2 layers, 2 experts] for each sequence. All numbers are different."""
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
    rollout_log.write_recording(tmp_path, 3, written, groups=np.array([0, 0, 1]))
    read, columns = rollout_log.read_recording(tmp_path, 3)
    assert list(columns) == ["groups"] and columns["groups"].tolist() == [0, 0, 1]
    for name, value in vars(written).items():
        assert np.array_equal(vars(read)[name], value)


def masked() -> TokenBlock:
    """Return a block whose middle row has no sampled token."""
    logprobs = [[x for x, mine in zip(*pair, strict=True) if mine] for pair in zip(LOGPROBS, SAMPLED, strict=True)]
    numbers = np.arange(3, dtype=np.float32)
    return TokenBlock.from_lists(PROMPTS, RESPONSES, logprobs, routing(), SAMPLED).with_columns(advantages=numbers)


def test_only_sampled_tokens_have_columns():
    found = masked()
    assert found.response_lengths.tolist() == [2, 1, 3] and found.sampled_lengths.tolist() == [1, 0, 2]
    assert found.tokens[found.sampled_index].tolist() == [7, 11, 12]
    assert np.allclose(found.rollout_logprobs, [-0.1, -0.5, -0.6])
    with pytest.raises(AssertionError, match=r"advantages has shape \(6,\) for 3 sampled tokens"):
        found.with_columns(advantages=np.zeros(6, np.float32))


def test_a_mask_and_its_columns_go_where_their_rows_go():
    picked = masked().select(np.array([2, 1, 0]))
    assert picked.tokens[picked.sampled_index].tolist() == [11, 12, 7]
    assert picked.columns["advantages"].tolist() == [1, 2, 0] and picked.sampled_lengths.tolist() == [2, 0, 1]
    alone = masked().select(np.array([1]))
    assert alone.tokens.tolist() == [4, 9] and not len(alone.sampled_index) and not len(alone.columns["advantages"])


def test_a_mask_is_recorded(tmp_path):
    rollout_log.write_recording(tmp_path, 0, masked())
    read, _ = rollout_log.read_recording(tmp_path, 0)
    assert read.sampled.tolist() == masked().sampled.tolist()
    assert read.sampled_lengths.tolist() == [1, 0, 2]


def test_marks_that_do_not_fit_the_response_are_refused():
    with pytest.raises(AssertionError, match="`sampled` has 1 values for a response of 2 tokens"):
        TokenBlock.from_lists(PROMPTS, RESPONSES, LOGPROBS, None, [[True], *SAMPLED[1:]])
    with pytest.raises(AssertionError, match="6 logprobs for 3 sampled tokens"):
        TokenBlock.from_lists(PROMPTS, RESPONSES, LOGPROBS, None, SAMPLED)


def test_routing_of_other_sequences_is_refused():
    with pytest.raises(AssertionError, match="routed experts of 2 of 3 sequences"):
        TokenBlock.from_lists(PROMPTS, RESPONSES, LOGPROBS, routing()[:2])
    with pytest.raises(AssertionError, match="routed experts of 4 tokens for a sequence of 2"):
        TokenBlock.from_lists(PROMPTS, RESPONSES, LOGPROBS, [routing()[0]] * 3)
