"""Micro-batches: each sampled token is predicted once, from the token before it, on the rank that has that token."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel import device

device.patch_megatron_for_cpu()  # must come before any import of Megatron

from mrl.algorithms.corrections import ImportanceSampling  # noqa: E402
from mrl.algorithms.losses import PPOClip  # noqa: E402
from mrl.algorithms.objective import Objective  # noqa: E402
from mrl.core import metrics  # noqa: E402
from mrl.core.types import OFFLINE, ReplicaBatch, TokenBlock  # noqa: E402
from mrl.workers.actor_critic import policy_loss  # noqa: E402
from mrl.workers.micro_batch import MicroBatch  # noqa: E402
from parallel.packing import pack  # noqa: E402

many = settings(max_examples=60)


@st.composite
def blocks(draw) -> tuple[TokenBlock, np.ndarray]:
    """Draw (a block, its [B] groups). All tokens of the block are different, except in shared prompts."""
    groups = np.array(draw(st.lists(st.integers(0, 3), min_size=1, max_size=8)))
    prompts = [[1000 * group + place for place in range(draw(st.integers(1, 6)))] for group in range(4)]
    responses = [[10_000 + 100 * row + place for place in range(draw(st.integers(1, 7)))] for row in range(len(groups))]
    sampled = None
    if draw(st.booleans()):  # several turns: any tokens of a response, even all, may come from a tool
        sampled = [[draw(st.booleans()) for _ in response] for response in responses]
    chosen = sampled or [[True] * len(response) for response in responses]
    pairs = zip(responses, chosen, strict=True)
    logprobs = [[-float(token) for token, mine in zip(*pair, strict=True) if mine] for pair in pairs]
    return TokenBlock.from_lists([prompts[group] for group in groups], responses, logprobs, None, sampled), groups


def sampled_tokens(block: TokenBlock, row: int) -> list[int]:
    """Return the tokens of a row's response that the policy sampled."""
    if block.sampled is None:
        return block.response(row).tolist()
    return block.tokens[block.cu_seqlens[row] : block.cu_seqlens[row + 1]][
        block.sampled[block.cu_seqlens[row] : block.cu_seqlens[row + 1]]
    ].tolist()


def predecessors(block: TokenBlock) -> dict[int, int]:
    """Return response token -> the token before it in its sequence."""
    result = {}
    for row in range(len(block.lengths)):
        whole = [*block.prompt(row).tolist(), *block.response(row).tolist()]
        start = len(block.prompt(row))
        result |= dict(zip(whole[start:], whole[start - 1 : -1], strict=True))
    return result


@many
@given(
    blocks(), st.booleans(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False)
)
def test_each_sampled_token_is_predicted_once_from_the_token_before_it(made, shared, cp_size, tp_multiple, random):
    block, groups = made
    count = len(groups)
    rows = np.array(random.sample(range(count), random.randint(1, count)))
    numbers = np.arange(count, dtype=np.float32).repeat(block.sampled_lengths)
    block = block.with_columns(advantages=numbers)
    batch = ReplicaBatch((rows,), np.arange(count) / 7, groups if shared else None)
    row_of = {token: row for row in range(count) for token in block.response(row).tolist()}
    expected = predecessors(block.select(rows))
    order = [token for row in rows for token in sampled_tokens(block, row)]
    tools = [token for row in rows for token in block.response(row).tolist() if token not in set(order)]
    predicted, computed = [], []
    for rank in range(cp_size):
        packer = partial(pack, device=torch.device("cpu"), cp_rank=rank, cp_size=cp_size, multiple=tp_multiple)
        micro = MicroBatch.build(block, rows, batch, packer)
        assert len(micro.tokens) == len(micro.packed.token_index) and micro.num_sampled == len(order)
        targets = micro.targets.tolist()
        assert targets == [order[index] for index in micro.local_sampled.tolist()]
        assert micro.tokens[micro.predictor_index].tolist() == [expected[token] for token in targets]
        assert micro.rollout_logprobs.tolist() == [-float(token) for token in targets]
        assert micro.columns["advantages"].tolist() == [float(row_of[token]) for token in targets]
        assert micro.weights.tolist() == [row_of[token] / 7 for token in targets]
        assert micro.weights.dtype == torch.float64
        predicted += micro.local_sampled.tolist()
        real = torch.from_numpy(micro.packed.token_index >= 0)
        computed += micro.tokens[real].tolist()
        assert not micro.tokens[~real].any(), "padding is token 0, which every vocabulary has"
    assert sorted(predicted) == list(range(len(order)))
    responses = {*order, *tools}
    prompts = [token for token in computed if token not in responses]
    once = {int(group): block.prompt(row).tolist() for row, group in enumerate(groups) if row in rows}
    each = list(once.values()) if shared else [block.prompt(row).tolist() for row in rows]
    assert sorted(prompts) == sorted(token for prompt in each for token in prompt)
    assert sorted(computed) == sorted([*prompts, *order, *tools]), "tool results are computed once and never predicted"


@many
@given(
    blocks(),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.randoms(use_true_random=False),
)
def test_each_mtp_layer_predicts_a_sampled_token_once_from_earlier_tokens_of_its_row(
    made, layers, cp_size, tp_multiple, random
):
    block, groups = made
    rows = np.array(random.sample(range(len(groups)), random.randint(1, len(groups))))
    batch = ReplicaBatch((rows,), np.ones(len(groups)), None, sampled_tokens=5)
    whole = {row: [*block.prompt(row).tolist(), *block.response(row).tolist()] for row in rows}
    place = {token: (row, whole[row].index(token)) for row in rows for token in sampled_tokens(block, row)}
    predicted: list[list[int]] = [[] for _ in range(layers)]
    for rank in range(cp_size):
        packer = partial(pack, device=torch.device("cpu"), cp_rank=rank, cp_size=cp_size, multiple=tp_multiple)
        micro = MicroBatch.build(block, rows, batch, packer, mtp_layers=layers)
        assert len(micro.mtp) == layers and micro.packed.later_tokens.shape == (layers, len(micro.tokens))
        assert micro.num_sampled_in_mini_batch == 5
        for depth, (mtp, later) in enumerate(zip(micro.mtp, micro.packed.later_tokens, strict=True), 1):
            for index, token in zip(mtp.index.tolist(), mtp.targets.tolist(), strict=True):
                row, position = place[token]
                assert micro.tokens[index] == whole[row][position - 1 - depth]
                assert later[index] == whole[row][position - 1], "the layer reads the token before its target"
            predicted[depth - 1] += mtp.targets.tolist()
            assert not later[torch.from_numpy(micro.packed.token_index < 0)].any()
    for depth, tokens in enumerate(predicted, 1):
        assert sorted(tokens) == sorted(token for token, (_, position) in place.items() if position > depth)


@many
@given(blocks(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_an_empty_micro_batch_is_one_token_without_weight(made, cp_size, tp_multiple):
    block, groups = made
    batch = ReplicaBatch((np.empty(0, np.int64),), np.ones(len(groups)), groups)
    for rank in range(cp_size):
        packer = partial(pack, device=torch.device("cpu"), cp_rank=rank, cp_size=cp_size, multiple=tp_multiple)
        micro = MicroBatch.build(block, batch.micro_batches[0], batch, packer)
        assert micro.num_sampled == 0 and len(micro.tokens) > 0
        assert (
            not len(micro.predictor_index)
            and not len(micro.targets)
            and not len(micro.weights)
            and not len(micro.local_sampled)
        )


class Surprising(PPOClip):
    """A user's loss with two metrics of its own. One of them has the name of a sum that mrl reports."""

    def __call__(self, inputs):
        loss, found = super().__call__(inputs)
        return loss, found | {"surprise": -inputs.logprobs.detach(), "entropy": torch.ones_like(loss)}


def test_metrics_of_a_users_loss_get_the_prefix_own_and_metrics_of_mrl_do_not():
    logprobs, entropies = torch.tensor([-1.0, -3.0]), torch.tensor([0.5, 1.5])
    micro = SimpleNamespace(
        columns={"advantages": torch.ones(2)},
        rollout_logprobs=logprobs,
        responses=None,
        weights=torch.tensor([0.25, 0.75], dtype=torch.float64),
    )
    _, statistics = policy_loss(torch.stack([logprobs, entropies]), micro, Surprising())
    assert statistics.sums["own/surprise"].item() == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert statistics.sums["own/entropy"].item() == 1.0 and statistics.sums["entropy"].item() == 2.0
    assert "loss/clip_fraction" in statistics.sums and "surprise" not in statistics.sums
    metrics.check(["own/surprise", "own/entropy", "loss/clip_fraction"])


def test_a_row_of_a_file_without_logprobs_counts_as_a_sample_of_the_actor_and_not_as_one_of_the_engine():
    """Tokens 0 and 1 are sampled. Tokens 2 and 3 are from a file; only token 3 has a log-probability, and is corrected."""
    logprobs = torch.tensor([-1.0, -3.0, -2.0, -1.5], requires_grad=True)
    old = torch.tensor([-1.1, -2.9, -2.1, -1.5])
    rollout = torch.tensor([-1.1, -2.9, math.nan, -1.0])
    micro = SimpleNamespace(
        columns={"advantages": torch.ones(4), "old_logprobs": old, OFFLINE: torch.tensor([0.0, 0.0, 1.0, 1.0])},
        rollout_logprobs=rollout,
        responses=None,
        weights=torch.full((4,), 0.25, dtype=torch.float64),
    )
    objective = Objective(PPOClip(), correction=ImportanceSampling())
    loss, statistics = policy_loss(torch.stack([logprobs, torch.zeros(4)]), micro, objective)
    loss.backward()
    ratio = (logprobs.detach() - old).exp()
    weights = torch.tensor([1.0, 1.0, 1.0, math.exp(-0.5)])
    expected = -0.25 * ratio * weights  # A = 1, and no ratio is outside the clip
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-6, atol=0)
    mismatch = {
        name.removeprefix("mismatch/"): value.item() for name, value in statistics.sums.items() if "mismatch/" in name
    }
    assert mismatch["count"] == 2 and mismatch["nan"] == 0 and mismatch["log_ratio"] == 0
    assert statistics.sums["mismatch_abs"] == 0 and statistics.maxima["mismatch_abs"] == 0
    del micro.columns[OFFLINE]
    _, statistics = policy_loss(torch.stack([logprobs, torch.zeros(4)]), micro, objective)
    assert statistics.sums["mismatch/nan"] == 1 and statistics.sums["mismatch/count"] == 3
