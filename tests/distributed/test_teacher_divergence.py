"""parallel.distillation: values equal divergences of whole distributions in float64; memory compared with parallel.logprobs."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from test_logprobs import Created, on_one_rank, peak_bytes_of

from parallel.dims import ParallelDims
from parallel.trainer_config import Divergence

DIVERGENCES = [Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("js", 0.5), Divergence("js", 0.1)]
MIN_REST_PROB = 1e-6


class Case(NamedTuple):
    """Inputs of one comparison, with the whole vocabulary padded to a multiple of tp."""

    hidden: np.ndarray  # [T, H]
    weight: np.ndarray  # [padded V, H]
    teacher_hidden: np.ndarray  # [T, H_t]
    teacher_weight: np.ndarray  # [padded V, H_t]
    vocab_size: int
    divergence: Divergence
    top_k: int | None = None  # None: the whole vocabulary
    temperature: float = 1.0
    chunk_size: int = 8
    dtype: str = "float32"


def make_case(positions=9, vocab=21, padded=24, width=8, teacher_width=6, scale=0.7, **settings) -> Case:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    hidden, teacher_hidden = normal(positions, width), normal(positions, teacher_width)
    weight, teacher_weight = normal(padded, width) * scale, normal(padded, teacher_width) * scale
    settings = {"divergence": DIVERGENCES[0]} | settings
    return Case(hidden, weight, teacher_hidden, teacher_weight, vocab, **settings)


def loss_of(values):
    """Return a weighted sum with a different weight for every position, some negative."""
    import torch

    return (values * (torch.arange(1.0, len(values) + 1, dtype=values.dtype) - 3.5)).sum()


def plain_divergence(divergence: Divergence, t, s):
    """Return the divergence [T] of probabilities [T, K], as the papers define it. 0 log 0 is 0."""
    import torch

    def kl(p, q):
        return torch.special.xlogy(p, p / q).sum(-1)

    if divergence.kind == "js":
        m = divergence.beta * t + (1 - divergence.beta) * s
        return divergence.beta * kl(t, m) + (1 - divergence.beta) * kl(s, m)
    return kl(t, s) if divergence.kind == "forward_kl" else kl(s, t)


def reference(case: Case) -> tuple[np.ndarray, ...]:
    """Return the divergences, and the gradients of `loss_of` for hidden and weight, from whole logits in float64."""
    import torch

    hidden, weight = (torch.from_numpy(x).double().requires_grad_() for x in (case.hidden, case.weight))
    teacher = torch.from_numpy(case.teacher_hidden).double() @ torch.from_numpy(case.teacher_weight).double().T
    t = (teacher[:, : case.vocab_size] / case.temperature).softmax(-1)
    s = ((hidden @ weight[: case.vocab_size].T) / case.temperature).softmax(-1)
    if case.top_k:
        top = t.topk(case.top_k, dim=-1).indices
        t, s = (torch.cat([each.gather(1, top), each.scatter(1, top, 0.0).sum(1, keepdim=True)], 1) for each in (t, s))
        t, s = (torch.cat([each[:, :-1], each[:, -1:].clamp(min=MIN_REST_PROB)], 1) for each in (t, s))
    values = plain_divergence(case.divergence, t, s)
    loss_of(values).backward()
    return values.detach().numpy(), hidden.grad.numpy(), weight.grad.numpy()


def chunked(rank: int, case: Case) -> tuple[np.ndarray, ...]:
    """Return the same three results on this rank: its summand of the gradient of hidden, and its rows of that of weight."""
    import torch

    from parallel import distillation, groups

    group, dtype = groups.tp_group(), getattr(torch, case.dtype)
    hidden, teacher_hidden = (torch.from_numpy(x).to(dtype) for x in (case.hidden, case.teacher_hidden))
    weight, teacher_weight = (
        torch.from_numpy(x).chunk(group.size())[group.rank()].to(dtype) for x in (case.weight, case.teacher_weight)
    )
    hidden.requires_grad_(), weight.requires_grad_()
    settings = dict(temperature=case.temperature, chunk_size=case.chunk_size)
    if case.top_k is None:
        values = distillation.linear_divergence(
            hidden, weight, teacher_hidden, teacher_weight, group, case.vocab_size, case.divergence, **settings
        )
    else:
        log_t, ids = distillation.linear_top_k(
            teacher_hidden, teacher_weight, group, case.vocab_size, case.top_k, **settings
        )
        log_s = distillation.linear_top_k_rest_logprobs(hidden, weight, ids, group, case.vocab_size, **settings)
        values = distillation.divergence_of(case.divergence, log_t, log_s)
    loss_of(values).backward()
    assert values.dtype == torch.promote_types(dtype, torch.float32) and hidden.grad.dtype == weight.grad.dtype == dtype
    return tuple(x.detach().double().numpy() for x in (values, hidden.grad, weight.grad))


def each_chunked(rank: int, cases: list[Case]) -> list[tuple[np.ndarray, ...]]:
    return [chunked(rank, case) for case in cases]


def compare(results: list, case: Case, atol: float, rtol: float) -> None:
    """Check values within `atol`, and gradients within `rtol` of their norm."""
    values, d_hidden, d_weight = reference(case)
    for result in results:
        np.testing.assert_allclose(result[0], values, atol=atol, rtol=rtol)
        assert (result[0] == results[0][0]).all(), "one answer on all ranks"
    for found, expected in (
        (sum(r[1] for r in results), d_hidden),
        (np.concatenate([r[2] for r in results]), d_weight),
    ):
        assert np.linalg.norm(found - expected) <= rtol * np.linalg.norm(expected), case
        np.testing.assert_allclose(found, expected, atol=rtol * np.abs(expected).max(), rtol=0)


@pytest.mark.extended_except("2-float32-2e-05-0.0002")
@pytest.mark.parametrize(("dtype", "atol", "rtol"), [("float64", 1e-10, 1e-9), ("float32", 2e-5, 2e-4)])
@pytest.mark.parametrize("tp", [1, 2])
def test_values_and_gradients_equal_whole_distributions(run_ranks, tp, dtype, atol, rtol):
    cases = [
        make_case(divergence=divergence, top_k=top_k, temperature=temperature, chunk_size=size, dtype=dtype)
        for divergence, top_k in itertools.product(DIVERGENCES, (None, 1, 5, 21))
        for temperature, size in ((1.0, 1), (0.6, 6), (1.7, 100))
    ]
    assert min(np.median(reference(case)[0]) for case in cases) > 1e-4, "divergences of 0 would prove nothing"
    for case, *results in zip(cases, *run_ranks(ParallelDims(tp=tp), each_chunked, cases), strict=True):
        compare(results, case, atol, rtol)


@pytest.mark.extended_except("None-2-4")
@pytest.mark.parametrize(("vocab", "padded"), [(17, 24), (3, 8), (2, 4)])
@pytest.mark.parametrize("top_k", [None, 2])
def test_padding_has_no_probability_even_on_a_rank_with_only_padding(run_ranks, vocab, padded, top_k):
    cases = [make_case(vocab=vocab, padded=padded, divergence=each, top_k=top_k) for each in DIVERGENCES]
    for case, *results in zip(cases, *run_ranks(ParallelDims(tp=4), each_chunked, cases), strict=True):
        compare(results, case, atol=2e-5, rtol=2e-4)
        assert not np.concatenate([r[2] for r in results])[vocab:].any(), "padding rows have gradient 0"


@pytest.mark.extended
def test_the_divergence_of_k_tokens_grows_with_k_up_to_that_of_the_whole_vocabulary(run_ranks):
    for divergence in DIVERGENCES:
        cases = [make_case(divergence=divergence, top_k=k) for k in (1, 2, 5, 10, 20, 21, None)]
        ((*found, whole),) = [
            [result[0] for result in ranks] for ranks in run_ranks(ParallelDims(), each_chunked, cases)
        ]
        for fewer, more in itertools.pairwise([*found, whole]):
            assert (fewer <= more + 1e-4).all(), "data-processing inequality"
        np.testing.assert_allclose(found[-1], whole, atol=1e-4)
        assert (found[0] > -1e-6).all() and (found[0] < whole / 1.5).any()


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("top_k", [None, 64])
def test_a_large_vocabulary_stays_within_the_tolerances(run_ranks, top_k):
    case = make_case(40, 9_999, 10_000, 64, 48, scale=0.3, chunk_size=32, top_k=top_k, divergence=DIVERGENCES[2])
    compare(run_ranks(ParallelDims(tp=2), chunked, case), case, atol=2e-5, rtol=1e-4)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("top_k", [None, 8])
def test_bfloat16_matmuls_keep_bfloat16_accuracy(run_ranks, tp, top_k):
    """bfloat16 has 8 bits: rounding changes a logit of 6 by at most 2^-6 = 0.016, and a factor of a gradient by at most 0.4%."""
    import torch

    case = make_case(32, 101, 104, 16, 16, scale=0.5, dtype="bfloat16", chunk_size=16, top_k=top_k)
    rounded = [torch.from_numpy(x).bfloat16().float().numpy() for x in case[:4]]
    results = run_ranks(ParallelDims(tp=tp), chunked, case._replace(**dict(zip(Case._fields, rounded, strict=False))))
    compare(results, case._replace(**dict(zip(Case._fields, rounded, strict=False))), atol=0.05, rtol=0.03)


@pytest.mark.parametrize("top_k", [None, 3])
def test_no_positions_give_no_values_and_zero_gradients(run_ranks, top_k):
    for values, d_hidden, d_weight in run_ranks(ParallelDims(tp=2), chunked, make_case(positions=0, top_k=top_k)):
        assert values.shape == (0,) and d_hidden.shape == (0, 8)
        assert d_weight.shape == (12, 8) and not d_weight.any()


def test_equal_models_have_divergence_0_and_no_gradient(run_ranks):
    cases = [make_case(divergence=each, top_k=k, teacher_width=8) for each in DIVERGENCES for k in (None, 5)]
    cases = [case._replace(teacher_hidden=case.hidden, teacher_weight=case.weight) for case in cases]
    for results in run_ranks(ParallelDims(tp=2), each_chunked, cases):
        for values, d_hidden, d_weight in results:
            assert np.abs(values).max() < 1e-5 and np.abs(d_hidden).max() < 1e-4 and np.abs(d_weight).max() < 1e-4


def test_gradients_equal_finite_differences(run_ranks):
    assert run_ranks(ParallelDims(), on_one_rank, finite_differences_agree) == [True]


def finite_differences_agree(group) -> bool:
    import torch

    from parallel import distillation

    case = make_case(positions=5, vocab=7, padded=8, width=3, teacher_width=2)
    hidden, weight = (torch.from_numpy(x).double().requires_grad_() for x in (case.hidden, case.weight))
    teacher = [torch.from_numpy(x).double() for x in (case.teacher_hidden, case.teacher_weight)]
    ids = distillation.linear_top_k(*teacher, group, 7, 3)[1]
    return all(
        torch.autograd.gradcheck(
            lambda h, w, d=divergence: distillation.linear_divergence(h, w, *teacher, group, 7, d, 0.7, 4),
            (hidden, weight),
        )
        for divergence in DIVERGENCES
    ) and torch.autograd.gradcheck(
        lambda h, w: distillation.linear_top_k_rest_logprobs(h, w, ids, group, 7, 0.7, 2), (hidden, weight)
    )


def test_js_tends_to_forward_kl_for_small_beta_and_to_reverse_kl_for_large_beta(run_ranks):
    near_0, near_1 = Divergence("js", 1e-4), Divergence("js", 1 - 1e-4)
    forward, reverse, small, large = (
        reference(make_case(scale=0.25, divergence=each)) for each in (*DIVERGENCES[:2], near_0, near_1)
    )
    for limit, js in ((forward, small), (reverse, large)):
        for expected, found in zip(limit, js, strict=True):
            np.testing.assert_allclose(found / 1e-4, expected, atol=2e-2 * np.abs(expected).max())
    case = make_case(divergence=near_0, dtype="float64")
    compare(run_ranks(ParallelDims(), chunked, case), case, atol=1e-12, rtol=1e-9)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "top_k"), [("forward_kl", None), ("reverse_kl", None), ("js", None), ("js", 16)])
def test_memory_is_at_most_1_2_times_that_of_log_probabilities_and_entropies(run_ranks, dtype, kind, top_k):
    case = make_case(
        640, 1599, 1600, 16, 16, 1.0, divergence=Divergence(kind), top_k=top_k, chunk_size=160, dtype=dtype
    )
    ((largest, peak, peak_of_logprobs),) = run_ranks(ParallelDims(), memory_of, case)
    assert largest <= 160 * 1600, "whole logits would have 640 rows"
    assert peak_of_logprobs > 2 * 160 * 1600 * 4, "two chunks of logits are counted"
    assert peak <= 1.2 * peak_of_logprobs, (peak, peak_of_logprobs)


def memory_of(rank: int, case: Case) -> tuple[int, int, int]:
    """Return (elements of the largest tensor of `chunked`, peak bytes of `chunked`, peak bytes of `sampled`)."""
    with Created() as created:
        chunked(rank, case)
    return max(created.sizes), peak_bytes_of(lambda: chunked(rank, case)), peak_bytes_of(lambda: sampled(case))


def sampled(case: Case) -> None:
    """Run a forward and a backward pass of the log-probabilities of sampled tokens, with entropies, as a policy loss does."""
    import torch

    from parallel import groups
    from parallel.logprobs import linear_logprobs

    dtype = getattr(torch, case.dtype)
    hidden, weight = (torch.from_numpy(x).to(dtype).requires_grad_() for x in (case.hidden, case.weight))
    targets = torch.zeros(len(hidden), dtype=torch.int64)
    logprobs, entropies, _ = linear_logprobs(
        hidden, weight, targets, groups.tp_group(), case.vocab_size, case.temperature, case.chunk_size, True
    )
    loss_of(logprobs).backward()
    assert len(entropies) == len(logprobs)


@pytest.mark.parametrize("positions", [0, 1, 9, 1000, 8192])
@pytest.mark.parametrize(("rows", "chunk_size"), [(151_936, 512), (37_984, 128), (24, 3), (5, 1)])
def test_slices_of_the_vocabulary_have_every_row_once_and_no_more_logits_than_a_chunk(rows, chunk_size, positions):
    from parallel.logprobs import ALIGNED_ROWS, OutputLayer

    found = OutputLayer(None, 7, rows, 1.0, chunk_size).vocabulary_slices(rows, positions)
    assert [each.start for each, _ in found] == [0, *(each.stop for each, _ in found[:-1])]
    assert found[-1][0].stop == rows and all(part.first_row == 7 + each.start for each, part in found)
    sizes = [each.stop - each.start for each, _ in found]
    assert all(size == 1 or size * positions <= chunk_size * rows for size in sizes)
    assert all(size <= ALIGNED_ROWS or size % ALIGNED_ROWS == 0 for size in sizes[:-1])


@pytest.mark.parametrize("settings", [{"kind": "kl"}, {"kind": "js", "beta": 0.0}, {"kind": "js", "beta": 1.0}])
def test_an_unknown_kind_or_beta_raises_an_error(settings):
    with pytest.raises(ValueError, match=r"expected forward_kl, reverse_kl, js|beta=.*: must be between 0 and 1"):
        Divergence(**settings)


@pytest.mark.parametrize("top_k", [None, 5])
def test_no_pass_waits_for_the_device(run_ranks, top_k):
    assert run_ranks(ParallelDims(tp=2), waits_of, make_case(top_k=top_k, divergence=DIVERGENCES[2])) == [[], []]


def waits_of(rank: int, case: Case) -> list[str]:
    from host_waits import HostWaits

    with HostWaits((__file__, "")) as waits:  # this file may wait: it converts arrays and tensors
        chunked(rank, case)
    return waits.found
