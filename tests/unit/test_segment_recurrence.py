"""Recurrences over packs: the chunked computation equals a computation from token to token, with and without shared prompts."""

import numpy as np
import pytest
import segment_recurrences as reference
import torch
from segment_trees import random_segments

from parallel.packing import Segment, pack
from parallel.segment_recurrence import CHUNK, RecurrencePlan, causal_convolution, gated_delta_rule, selective_scan

CPU = torch.device("cpu")
SHARED = [Segment(5), Segment(7, 0), Segment(1, 0), Segment(130, 0), Segment(70), Segment(2, 4), Segment(3, 5)]
TREES = [random_segments(np.random.default_rng(seed)) for seed in range(12)]


def plan_of(segments, kernel=4, chunk=CHUNK, **options) -> RecurrencePlan:
    return RecurrencePlan.of(pack(segments, CPU, **options), kernel, CPU, chunk)


def random_inputs(num_tokens: int, dtype=torch.float64, heads: int = 3) -> list[torch.Tensor]:
    """Return query, key [S, 3, 4], value [S, heads, 5], log_decay [S, heads], and the weight of the update [S, heads]."""
    torch.manual_seed(0)
    query, key = torch.randn(2, num_tokens, 3, 4, dtype=dtype)
    value = torch.randn(num_tokens, heads, 5, dtype=dtype)
    log_decay, weight = -torch.rand(num_tokens, heads, dtype=dtype), torch.rand(num_tokens, heads, dtype=dtype)
    return [x.requires_grad_() for x in (query, key, value, log_decay, weight)]


def check_equal(found, expected, inputs, tolerance: float) -> None:
    """Compare the outputs, and the gradients of a function of all outputs."""
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view(expected.shape)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected)]
    for mine, other in zip(*gradients, strict=True):
        assert other.abs().max() > 1e-3, "a gradient of zero proves nothing"
        torch.testing.assert_close(mine, other, rtol=0, atol=10 * tolerance)


@pytest.mark.extended_after(5)
@pytest.mark.parametrize("chunk", [3, CHUNK])
@pytest.mark.parametrize("segments", [[Segment(1)], [Segment(130)], SHARED, *TREES], ids=len)
def test_the_chunked_rule_equals_the_recurrence(segments, chunk):
    inputs = random_inputs(sum(s.length for s in segments))
    decays = any(segment.length > 1 or segment.parent is not None for segment in segments)  # not at a first token
    found = gated_delta_rule(*inputs, plan_of(segments, chunk=chunk))
    expected = reference.by_sequence(segments, reference.delta_rule, *inputs)
    check_equal(found, expected, inputs if decays else [*inputs[:3], inputs[4]], 1e-10)


@pytest.mark.extended_after(5)
@pytest.mark.parametrize("chunk", [3, CHUNK])
@pytest.mark.parametrize("segments", [[Segment(1)], [Segment(130)], SHARED, *TREES], ids=len)
def test_the_chunked_scan_of_mamba_2_equals_the_recurrence(segments, chunk):
    """Two heads share each of three queries and keys."""
    inputs = random_inputs(sum(s.length for s in segments), heads=6)
    decays = any(segment.length > 1 or segment.parent is not None for segment in segments)  # not at a first token
    found = selective_scan(*inputs, plan_of(segments, chunk=chunk))
    expected = reference.by_sequence(segments, reference.selective_scan, *inputs)
    check_equal(found, expected, inputs if decays else [*inputs[:3], inputs[4]], 1e-10)


RULES = [(gated_delta_rule, reference.delta_rule), (selective_scan, reference.selective_scan)]


@pytest.mark.parametrize(("rule", "expected_rule"), RULES, ids=["delta", "mamba"])
def test_strong_decay_gives_finite_gradients(rule, expected_rule):
    """The factor of the state over a whole chunk underflows to zero."""
    inputs = random_inputs(200, torch.float32)
    inputs[3] = (torch.full((200, 3), -20.0)).requires_grad_()
    found = rule(*inputs, plan_of([Segment(200)]))
    expected = expected_rule(*(x.double() for x in inputs))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(found.sum(), inputs))


@pytest.mark.parametrize("rule", [gated_delta_rule, selective_scan], ids=["delta", "mamba"])
def test_gradients_of_decays_are_exact_under_strong_decay(rule):
    """The gradient of the parameter A_log is a sum of all tokens, in which large terms of single tokens would leave round-off."""
    inputs = random_inputs(28, torch.float32)
    inputs[3] = (16 * inputs[3]).detach().requires_grad_()
    segments = [Segment(length) for length in (5, 4, 9, 7, 3)]
    sums = []
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype) for x in inputs]
        found = rule(*given, plan_of(segments))
        (gradient,) = torch.autograd.grad(
            (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum(), given[3]
        )
        sums.append((gradient.double() * inputs[3]).sum(0))
    torch.testing.assert_close(sums[0], sums[1], rtol=0, atol=1e-6 * sums[1].abs().max().item())


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("segments", [[Segment(1)], [Segment(9)], SHARED, *TREES], ids=len)
def test_the_convolution_reads_the_tokens_of_the_sequence(segments, kernel):
    torch.manual_seed(0)
    x = torch.randn(sum(s.length for s in segments), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 1, kernel, dtype=torch.float64, requires_grad=True)
    found = causal_convolution(x, weight, plan_of(segments, kernel))
    expected = reference.by_sequence(segments, lambda rows: reference.convolution(rows, weight), x)
    check_equal(found, expected, [x], 1e-12)


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("segments", [[Segment(9)], SHARED, *TREES[:6]], ids=len)
def test_ranks_find_their_tokens_in_the_gathered_rows(segments, cp):
    packs = [pack(segments, CPU, cp_rank=rank, cp_size=cp, multiple=2) for rank in range(cp)]
    plans = [RecurrencePlan.of(one, 4, CPU) for one in packs]
    total = sum(s.length for s in segments)
    gathered = torch.from_numpy(np.concatenate([one.token_index for one in packs]))
    for one, plan in zip(packs, plans, strict=True):
        assert plan.select_tokens(gathered).tolist() == list(range(total))
        rows = plan.to_rows(torch.arange(1, total + 1)[:, None])[:, 0] - 1
        assert rows.tolist() == one.token_index.tolist(), "padding is zero"


def test_without_context_parallelism_only_the_end_of_a_pack_is_padding():
    plan = plan_of([Segment(3), Segment(4, 0)], multiple=4)
    assert plan.num_rows == 8 and plan.row_of_token is None
    assert plan.to_rows(plan.select_tokens(torch.arange(8.0))).tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


def test_responses_start_from_the_last_chunk_of_their_prompt():
    plan = plan_of([Segment(5), Segment(4, 0), Segment(9, 0)], chunk=4)
    assert plan.widths == (1, 1, 2, 1, 1)
    assert [None if rows is None else rows.tolist() for rows in plan.previous] == [None, None, [0, 0], [1], None]
