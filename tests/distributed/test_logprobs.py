"""parallel.logprobs compared with torch's log_softmax over whole logits in float64."""

import math
from typing import NamedTuple

import numpy as np
import pytest

from parallel.dims import ParallelDims


class Case(NamedTuple):
    """Inputs of one comparison, with the whole vocabulary padded to a multiple of tp."""

    hidden: np.ndarray  # [T, H]
    weight: np.ndarray  # [padded V, H]
    targets: np.ndarray  # [T]
    vocab_size: int
    temperature: float
    chunk_size: int
    needs_entropy: bool = True
    needs_sum_pi_squared: bool = True
    dtype: str = "float32"


def make_case(positions=9, vocab=21, padded=24, width=8, temperature=1.0, chunk_size=4, **settings) -> Case:
    """Make a case with logits of about +-12 and targets that include the first and the last token."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(positions, width)).astype(np.float32)
    weight = rng.normal(size=(padded, width)).astype(np.float32) * 1.5
    targets = rng.integers(0, vocab, positions)
    targets[: min(2, positions)] = [0, vocab - 1][: min(2, positions)]
    return Case(hidden, weight, targets, vocab, temperature, chunk_size, **settings)


def loss_of(logprobs, entropies):
    """Return a weighted sum with a different weight for every position, some negative."""
    import torch

    weights = torch.arange(1.0, len(logprobs) + 1, dtype=logprobs.dtype)
    return (logprobs * weights).sum() + (entropies * (4.5 - weights)).sum()


def reference(case: Case) -> tuple[np.ndarray, ...]:
    """Return log-probabilities, entropies, sums of squares, and the gradients of `loss_of` for hidden and weight, in float64."""
    import torch

    hidden, weight = (torch.from_numpy(x).double().requires_grad_() for x in (case.hidden, case.weight))
    logprobs = torch.log_softmax((hidden @ weight[: case.vocab_size].T) / case.temperature, -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1) * float(case.needs_entropy)
    chosen = logprobs.gather(1, torch.from_numpy(case.targets)[:, None])[:, 0]
    squares = (logprobs.exp() ** 2).sum(-1) * float(case.needs_sum_pi_squared)
    loss_of(chosen, entropies).backward()
    return tuple(x.numpy() for x in (chosen.detach(), entropies.detach(), squares.detach(), hidden.grad, weight.grad))


def fused(rank: int, case: Case) -> tuple[np.ndarray, ...]:
    """Return the same five results on this rank: its summand of the gradient of hidden, and its rows of that of weight."""
    import torch

    from parallel import groups
    from parallel.logprobs import linear_logprobs

    group, dtype = groups.tp_group(), getattr(torch, case.dtype)
    hidden = torch.from_numpy(case.hidden).to(dtype).requires_grad_()
    rows = torch.from_numpy(case.weight).chunk(group.size())[group.rank()]
    weight = rows.to(dtype).requires_grad_()
    found = linear_logprobs(hidden, weight, torch.from_numpy(case.targets), group, *case[3:8])
    assert all(x.dtype == torch.float32 for x in found) and not found[2].requires_grad
    loss_of(*found[:2]).backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    return tuple(x.detach().float().numpy() for x in (*found, hidden.grad, weight.grad))


def compare(results: list, case: Case, atol: float, rtol: float) -> None:
    """Check values within `atol`, and gradients within `rtol` of their norm."""
    *values, d_hidden, d_weight = reference(case)
    for result in results:
        for found, expected in zip(result[:3], values, strict=True):
            np.testing.assert_allclose(found, expected, atol=atol, rtol=0)
    for found, expected in (
        (sum(r[3] for r in results), d_hidden),
        (np.concatenate([r[4] for r in results]), d_weight),
    ):
        assert np.linalg.norm(found - expected) <= rtol * np.linalg.norm(expected)
        np.testing.assert_allclose(found, expected, atol=rtol * np.abs(expected).max(), rtol=0)


def each_fused(rank: int, cases: list[Case]) -> list[tuple[np.ndarray, ...]]:
    return [fused(rank, case) for case in cases]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_values_and_gradients_equal_log_softmax(run_ranks, tp):
    chunks = [
        (1, True, True),
        (3, True, True),
        (4, True, False),
        (100, True, True),
        (4, False, False),
        (4, False, True),
    ]
    cases = [
        make_case(temperature=temperature, chunk_size=size, needs_entropy=entropy, needs_sum_pi_squared=squares)
        for size, entropy, squares in chunks
        for temperature in (1.0, 0.6)
    ]
    for case, *results in zip(cases, *run_ranks(ParallelDims(tp=tp), each_fused, cases), strict=True):
        compare(results, case, atol=1e-5, rtol=2e-5)
        assert all((result[i] == results[0][i]).all() for result in results for i in range(3)), (
            "one answer on all ranks"
        )


@pytest.mark.extended_after(2)
@pytest.mark.parametrize(("vocab", "padded"), [(24, 24), (17, 24), (3, 8), (1, 4)])
def test_padding_has_no_probability_even_on_a_rank_with_only_padding(run_ranks, vocab, padded):
    case = make_case(vocab=vocab, padded=padded)
    results = run_ranks(ParallelDims(tp=4), fused, case)
    compare(results, case, atol=1e-5, rtol=2e-5)
    assert not np.concatenate([r[4] for r in results])[vocab:].any(), "padding rows have gradient 0"


def test_a_large_vocabulary_stays_within_the_tolerances(run_ranks):
    case = make_case(positions=40, vocab=9_999, padded=10_000, width=64, chunk_size=16)._replace(temperature=0.8)
    case = case._replace(weight=case.weight / 4)
    compare(run_ranks(ParallelDims(tp=2), fused, case), case, atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_logits_far_from_zero_do_not_overflow(run_ranks, shift):
    import torch

    case = make_case()
    case.hidden[:, 0], case.weight[:, 0] = 1.0, shift
    found = run_ranks(ParallelDims(tp=2), fused, case)
    for values in found:
        assert all(np.isfinite(x).all() for x in values)
    logits = torch.from_numpy(case.hidden @ case.weight[: case.vocab_size].T).double()
    expected = logits.log_softmax(1).gather(1, torch.from_numpy(case.targets)[:, None])[:, 0]
    np.testing.assert_allclose(found[0][0], expected, atol=5e-3)  # float32 resolves logits of 1e4 to 1e-3


@pytest.mark.parametrize("tp", [1, 2])
def test_bfloat16_matmuls_keep_bfloat16_accuracy(run_ranks, tp):
    """bfloat16 has 8 bits: rounding changes a logit of 12 by at most 2^-5 = 0.03, and a factor of a gradient by at most 0.4%."""
    import torch

    case = make_case(dtype="bfloat16", positions=32, vocab=101, padded=104, width=16, chunk_size=8)
    rounded = [torch.from_numpy(x).bfloat16().float().numpy() for x in (case.hidden, case.weight / 2)]
    case = case._replace(hidden=rounded[0], weight=rounded[1])
    compare(run_ranks(ParallelDims(tp=tp), fused, case), case, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("tp", [1, 2])
def test_no_positions_give_no_values_and_zero_gradients(run_ranks, tp):
    case = make_case(positions=0)
    for *values, d_hidden, d_weight in run_ranks(ParallelDims(tp=tp), fused, case):
        assert [value.shape for value in values] == [(0,)] * 3 and d_hidden.shape == (0, 8)
        assert d_weight.shape == (24 // tp, 8) and not d_weight.any()


def on_one_rank(rank: int, check, *args):
    """Run `check(group, *args)` with a group of only this process."""
    from parallel import groups

    return check(groups.tp_group(), *args)


def test_gradients_equal_finite_differences(run_ranks):
    assert run_ranks(ParallelDims(), on_one_rank, gradients_of_each_output) == [True]


def gradients_of_each_output(group) -> bool:
    import torch

    from parallel.logprobs import linear_logprobs

    case = make_case(positions=5, vocab=7, padded=8, width=3)
    hidden, weight = (torch.from_numpy(x).double().requires_grad_() for x in (case.hidden, case.weight))
    targets = torch.from_numpy(case.targets)
    return all(
        torch.autograd.gradcheck(
            lambda h, w, c=chunk: linear_logprobs(h, w, targets, group, 7, 0.7, c, True, True)[:2], (hidden, weight)
        )
        for chunk in (2, 5)
    )


def test_only_required_gradients_are_computed_and_nothing_is_saved_under_no_grad(run_ranks):
    run_ranks(ParallelDims(), on_one_rank, asked_for_only)


def asked_for_only(group) -> None:
    import torch

    from parallel.logprobs import linear_logprobs

    case = make_case()
    hidden, weight, targets = (torch.from_numpy(x) for x in case[:3])
    for needs in (hidden, weight):
        hidden.requires_grad_(needs is hidden).grad = None
        weight.requires_grad_(needs is weight).grad = None
        logprobs, *others = linear_logprobs(hidden, weight, targets, group, 21, chunk_size=4)
        assert not any(other.requires_grad or other.any() for other in others), "not needed: constant zeros"
        with Created() as created:
            logprobs.sum().backward()
        other = weight if needs is hidden else hidden
        assert needs.grad is not None and other.grad is None
        assert created.products == 5, "logits again of all chunks but the last, and one gradient of each of three"
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x), torch.no_grad():
        logprobs, *_ = linear_logprobs(hidden, weight.requires_grad_(), targets, group, 21, chunk_size=4)
    assert logprobs.grad_fn is None and not kept


def Created():
    """Return a torch dispatch mode that records the number of elements of each result and counts matrix products."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Mode(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []
            self.products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.products += "mm" in func.__name__
            self.sizes += [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            return out

    return Mode()


@pytest.mark.extended_after(2)
@pytest.mark.parametrize(
    ("dtype", "needs_entropy", "chunks"),
    [("float32", False, 2.0), ("bfloat16", False, 2.5), ("float32", True, 3.0), ("bfloat16", True, 3.0)],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_memory_holds_a_few_chunks_of_logits_and_never_all_logits(run_ranks, tp, dtype, needs_entropy, chunks):
    settings = {"needs_entropy": needs_entropy, "needs_sum_pi_squared": needs_entropy, "dtype": dtype}
    case = make_case(positions=640, vocab=1599, padded=1600, width=2, chunk_size=160, **settings)
    chunk, whole = 160 * 1600 // tp, 640 * 1600 // tp
    # gradients, statistics of each position, and about 80 kB for the workspace of a bfloat16 product on a CPU
    others = 2 * (case.hidden.size + case.weight.size // tp) + 16 * 640 + 25_000
    assert others < chunk / 2 and chunks * chunk < whole, "another half chunk, or whole logits, would be noticed"
    for largest, peak_bytes in run_ranks(ParallelDims(tp=tp), memory_of, case):
        assert largest == chunk
        assert peak_bytes <= 4 * (chunks * chunk + others)


def memory_of(rank: int, case: Case) -> tuple[int, int]:
    """Return (elements of the largest tensor, peak bytes allocated) of the forward and backward pass."""
    with Created() as created:
        fused(rank, case)
    return max(created.sizes), peak_bytes_of(lambda: fused(rank, case))


def peak_bytes_of(work) -> int:
    """Return the peak of the bytes that `work` allocates from torch."""
    import torch

    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_a_chunk_size_of_zero_raises_an_error(run_ranks):
    with pytest.raises(ValueError, match="chunk_size=0"):
        from parallel.logprobs import linear_logprobs

        linear_logprobs(*[None] * 4, 0, chunk_size=0)


def test_equal_logits_have_the_entropy_of_the_vocabulary(run_ranks):
    case = make_case()
    case.weight[:] = 0.0
    for logprobs, entropies, squares, *_ in run_ranks(ParallelDims(tp=2), fused, case):
        np.testing.assert_allclose(entropies, math.log(21), atol=1e-6)
        np.testing.assert_allclose(squares, 1 / 21, atol=1e-7)
        np.testing.assert_allclose(logprobs, -math.log(21), atol=1e-6)
