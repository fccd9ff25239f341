"""Losses over preferences equal float64 references from the papers, however the batch is divided into micro-batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Case, loss_and_gradient, loss_inputs, make_case, slopes

from mrl.algorithms import preference
from mrl.algorithms.inputs import Responses
from mrl.algorithms.objective import TokenWeighting, sequence_mean
from mrl.algorithms.preference import DPO, IPO, KTO, ORPO, BradleyTerry, Hinge, OutcomeLabels, SimPO
from mrl.core.types import TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims

LENGTHS = (3, 1, 5, 2, 4, 4, 1, 9)


def log_sigma(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sums(case: Case, values: np.ndarray) -> list[float]:
    """Return the sum over each response."""
    return [float(values[span].sum()) for span in case.spans()]


def over_pairs(term):
    """Return a reference: the mean over pairs (chosen c, rejected r) of term(h_c, h_r, log pi_c, log pi_r, |y_c|, |y_r|)."""

    def reference(case: Case, logprobs: np.ndarray) -> float:
        ratios, own = sums(case, logprobs - case.columns["ref_logprobs"]), sums(case, logprobs)
        lengths = case.lengths.tolist()
        pairs = range(0, len(lengths), 2)
        return float(np.mean([term(*ratios[i : i + 2], *own[i : i + 2], *lengths[i : i + 2]) for i in pairs]))

    return reference


def log_odds(p: float) -> float:
    return math.log(math.exp(p) / (1 - math.exp(p)))


def kto(case: Case, logprobs: np.ndarray, beta=0.3, good=1.5, bad=0.5, z=0.2) -> float:
    ratios = sums(case, logprobs - case.columns["ref_logprobs"])
    labels = [case.columns["labels"][span][0] for span in case.spans()]
    losses = [
        good * (1 - math.exp(log_sigma(beta * (h - z)))) if label else bad * (1 - math.exp(log_sigma(beta * (z - h))))
        for h, label in zip(ratios, labels, strict=True)
    ]
    return float(np.mean(losses))


CASES = {
    "dpo": (DPO(beta=0.3), over_pairs(lambda c, r, *_: -log_sigma(0.3 * (c - r)))),
    "conservative dpo": (
        DPO(beta=0.3, label_smoothing=0.2),
        over_pairs(lambda c, r, *_: -0.8 * log_sigma(0.3 * (c - r)) - 0.2 * log_sigma(-0.3 * (c - r))),
    ),
    "dpo with likelihood": (
        DPO(beta=0.3, nll_coef=0.7),
        over_pairs(lambda c, r, pc, pr, nc, nr: -log_sigma(0.3 * (c - r)) - 0.7 * pc / nc),
    ),
    "ipo": (
        IPO(beta=0.3),
        over_pairs(lambda c, r, pc, pr, nc, nr: (c / nc - r / nr - 1 / 0.6) ** 2),
    ),
    "ipo of whole responses": (IPO(beta=0.3, per_token=False), over_pairs(lambda c, r, *_: (c - r - 1 / 0.6) ** 2)),
    "hinge": (Hinge(beta=0.8), over_pairs(lambda c, r, *_: max(0.0, 1 - 0.8 * (c - r)))),
    "simpo": (
        SimPO(beta=2.0, gamma=0.6),
        over_pairs(lambda c, r, pc, pr, nc, nr: -log_sigma(2 * pc / nc - 2 * pr / nr - 0.6)),
    ),
    "orpo": (
        ORPO(beta=0.4),
        over_pairs(lambda c, r, pc, pr, nc, nr: -pc / nc - 0.4 * log_sigma(log_odds(pc / nc) - log_odds(pr / nr))),
    ),
    "kto": (KTO(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5, reference_point=0.2), kto),
}


def pairs_case(seed: int, lengths=LENGTHS) -> Case:
    """Return a batch with log-probabilities below 0, and a label for each response."""
    case = make_case(seed, lengths)
    labels = np.repeat(np.arange(len(lengths)) % 3 == 0, lengths).astype(float)
    return replace(case, logprobs=-np.abs(case.logprobs) - 0.01, columns=case.columns | {"labels": labels})


def weights_of(case: Case, num_responses: int | None = None) -> np.ndarray:
    """Return the token weights [R] of sequence_mean in a batch of `num_responses` (default: the number in the case)."""
    weights = TokenWeighting(sequence_mean)(case.lengths, np.arange(len(case.lengths)))
    scale = len(case.lengths) / (num_responses or len(case.lengths))
    return (weights * scale).repeat(case.lengths)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_the_formula_of_the_paper(name, seed):
    loss, reference = CASES[name]
    case = pairs_case(seed)
    found, gradient = loss_and_gradient(loss, case, weights_of(case))
    assert found == pytest.approx(reference(case, case.logprobs), rel=1e-10)
    np.testing.assert_allclose(gradient, slopes(lambda x: reference(case, x), case.logprobs), atol=5e-8)
    assert np.abs(gradient).max() > 1e-4


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_of_whole_pairs_sum_to_the_loss_and_gradient_of_the_batch(name):
    loss, _ = CASES[name]
    case = pairs_case(7)
    whole, gradient = loss_and_gradient(loss, case, weights_of(case))
    parts = [case.select(np.array(rows)) for rows in ([6, 7, 0, 1], [2, 3], [4, 5])]
    found = [loss_and_gradient(loss, part, weights_of(part, len(case.lengths))) for part in parts]
    assert sum(value for value, _ in found) == pytest.approx(whole, rel=1e-12)
    order = np.concatenate([np.arange(s.start, s.stop) for s in (case.spans()[r] for r in (6, 7, 0, 1, 2, 3, 4, 5))])
    np.testing.assert_allclose(np.concatenate([g for _, g in found]), gradient[order], rtol=1e-12)


@pytest.mark.parametrize("lengths", [(0, 3, 2, 4), (3, 0, 2, 4)])
@pytest.mark.parametrize("name", ["dpo", "conservative dpo", "hinge", "ipo of whole responses"])
def test_a_pair_with_an_empty_response_has_the_weight_of_a_pair(name, lengths):
    loss, reference = CASES[name]
    case = pairs_case(3, lengths)
    found, gradient = loss_and_gradient(loss, case, weights_of(case))
    assert found == pytest.approx(reference(case, case.logprobs), rel=1e-10)
    np.testing.assert_allclose(gradient, slopes(lambda x: reference(case, x), case.logprobs), atol=5e-8)


@pytest.mark.parametrize("name", CASES)
def test_an_empty_micro_batch_has_the_loss_0_and_can_be_differentiated(name):
    """While other replicas compute a micro-batch, a replica without rows computes one token that is in no response."""
    case = replace(pairs_case(0, (1,)).at(np.empty(0, int)), lengths=np.array([0]))
    total, gradient = loss_and_gradient(CASES[name][0], case, np.empty(0))
    assert total == 0 and gradient.shape == (0,)


def test_the_metrics_are_means_over_pairs():
    case, loss = pairs_case(1), DPO(beta=0.3)
    _, metrics = loss(loss_inputs(case))
    found = {name: float((values * torch.tensor(weights_of(case))).sum()) for name, values in metrics.items()}
    rewards = 0.3 * np.array(sums(case, case.logprobs - case.columns["ref_logprobs"])).reshape(-1, 2)
    logprobs = np.array(sums(case, case.logprobs)).reshape(-1, 2)
    expected = {
        "preference/accuracy": (rewards[:, 0] > rewards[:, 1]).mean(),
        "preference/margin": (rewards[:, 0] - rewards[:, 1]).mean(),
        "preference/chosen_reward": rewards[:, 0].mean(),
        "preference/rejected_reward": rewards[:, 1].mean(),
        "preference/chosen_logprob": logprobs[:, 0].mean(),
        "preference/rejected_logprob": logprobs[:, 1].mean(),
    }
    assert found == pytest.approx(expected, rel=1e-12) and 0 < expected["preference/accuracy"] < 1


def test_kto_measures_whether_the_policy_agrees_with_the_labels():
    case, loss = pairs_case(1), KTO(beta=0.3).with_reference_point(0.1)
    _, metrics = loss(loss_inputs(case))
    weights = torch.tensor(weights_of(case))
    ratios = np.array(sums(case, case.logprobs - case.columns["ref_logprobs"]))
    labels = np.array([case.columns["labels"][span][0] for span in case.spans()])
    signed = np.where(labels > 0, 1, -1) * 0.3 * (ratios - 0.1)
    assert float((metrics["preference/margin"] * weights).sum()) == pytest.approx(signed.mean())
    assert float((metrics["preference/accuracy"] * weights).sum()) == pytest.approx((signed > 0).mean())


def test_the_reference_point_of_kto_is_never_negative():
    assert KTO().with_reference_point(-0.3).reference_point == 0.0
    assert KTO(beta=0.2).with_reference_point(0.3) == KTO(beta=0.2, reference_point=0.3)


def test_softplus_keeps_its_gradient_at_0_and_for_large_values():
    x = torch.tensor([0.0, 200.0, -200.0, 3.0], dtype=torch.float64, requires_grad=True)
    values = preference.softplus(x)
    values.sum().backward()
    assert values.tolist() == pytest.approx([math.log(2), 200.0, math.exp(-200.0), math.log1p(math.exp(3))], rel=1e-12)
    assert x.grad.tolist() == pytest.approx([0.5, 1.0, math.exp(-200.0), 1 / (1 + math.exp(-3))], rel=1e-12)


def test_orpo_is_finite_for_a_response_of_probability_1():
    case = replace(pairs_case(0, (2, 3)), logprobs=np.zeros(5))
    total, gradient = loss_and_gradient(ORPO(), case, weights_of(case))
    assert math.isfinite(total) and np.isfinite(gradient).all()


def scored(loss, scores: np.ndarray, columns: dict[str, np.ndarray]) -> tuple[float, np.ndarray, dict[str, float]]:
    """Return the mean loss over responses with these scores [B], its gradient, and the means of the metrics."""
    tensor = torch.tensor(scores, requires_grad=True)
    responses = Responses(torch.arange(len(scores)), torch.ones(len(scores), dtype=torch.int64))
    values, metrics = loss(tensor, responses, {name: torch.tensor(column) for name, column in columns.items()})
    values.mean().backward()
    return values.mean().item(), tensor.grad.numpy(), {name: float(value.mean()) for name, value in metrics.items()}


@pytest.mark.parametrize("center", [0.0, 0.05])
def test_the_loss_of_pairs_of_scores_equals_the_formula(center):
    rng = np.random.default_rng(0)
    scores, margins = rng.normal(size=8), np.repeat(rng.random(4), 2)

    def reference(s: np.ndarray) -> float:
        pairs = zip(s.reshape(-1, 2), margins[::2], strict=True)
        return float(np.mean([-log_sigma(c - r - m) + center * (c + r) ** 2 for (c, r), m in pairs]))

    found, gradient, metrics = scored(BradleyTerry(center), scores, {"margins": margins})
    assert found == pytest.approx(reference(scores), rel=1e-12)
    np.testing.assert_allclose(gradient, slopes(reference, scores), atol=1e-8)
    ordered = scores.reshape(-1, 2)
    assert metrics["preference/accuracy"] == (ordered[:, 0] > ordered[:, 1]).mean()
    assert metrics["preference/margin"] == pytest.approx((ordered[:, 0] - ordered[:, 1]).mean())


def test_the_loss_of_labeled_scores_equals_the_formula():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=7), np.array([1.0, 0, 0, 1, 1, 0, 1])

    def reference(s: np.ndarray) -> float:
        return float(np.mean([-log_sigma(x if label else -x) for x, label in zip(s, labels, strict=True)]))

    found, gradient, metrics = scored(OutcomeLabels(), scores, {"labels": labels})
    assert found == pytest.approx(reference(scores), rel=1e-12)
    np.testing.assert_allclose(gradient, slopes(reference, scores), atol=1e-8)
    assert metrics["preference/accuracy"] == pytest.approx(((scores > 0) == (labels > 0)).mean())


@pytest.mark.parametrize("kind", [DPO, IPO, KTO, ORPO, Hinge, SimPO])
@pytest.mark.parametrize("beta", [0.0, -0.1, float("nan")])
def test_a_beta_of_0_or_less_is_refused(kind, beta):
    with pytest.raises(ValueError, match=r"beta=.*: must be greater than 0"):
        kind(beta=beta)


@pytest.mark.parametrize("fraction", [-0.1, 0.5, 1.0])
def test_a_label_smoothing_that_reverses_the_pairs_is_refused(fraction):
    with pytest.raises(ValueError, match=rf"label_smoothing={fraction}: expected a fraction of pairs in \[0, 0.5\)"):
        DPO(label_smoothing=fraction)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12),
    repeated=st.booleans(),
    share=st.booleans(),
    budget=st.integers(5, 80),
    layout=st.sampled_from([{}, dict(dp=2), dict(dp=3), dict(pp=2), dict(pp=2, vpp=2, dp=2)]),
)
def test_both_responses_of_a_pair_are_neighbors_in_one_micro_batch(lengths, repeated, share, budget, layout):
    prompts = np.repeat([prompt for prompt, *_ in lengths], 2)
    responses = np.array([length for _, *pair in lengths for length in pair])
    groups = np.arange(len(responses)) // 2
    rows = np.concatenate([np.arange(len(responses)), np.arange(2) if repeated else np.empty(0)]).astype(np.int64)
    batch = TrainBatch(None, prompts, responses, responses, groups, rows, rows, whole_groups=True)
    packing = Packing(budget, share, CostModel(1.0, 0.1))
    partition = partition_step(batch, ParallelDims(**layout), packing, TokenWeighting(sequence_mean))
    micros = [micro.reshape(-1, 2) for each in partition.replica_batches for micro in each.micro_batches]
    found = np.concatenate(micros)
    assert (found[:, 0] % 2 == 0).all() and (found[:, 1] == found[:, 0] + 1).all()
    assert sorted(found.ravel()) == sorted(rows)
    tokens = [int(responses[pair].sum() + prompts[pair[0]] * (1 if share else 2)) for pair in found]
    largest = max(tokens)
    sizes = [
        int(responses[micro.ravel()].sum() + prompts[micro[:, 0] if share else micro.ravel()].sum()) for micro in micros
    ]
    assert max(sizes) <= max(budget, largest), "only a single pair may exceed the budget"
