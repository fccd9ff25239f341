"""Losses over preferences equal those of TRL's own code on the same log-probabilities or scores.

TRL needs packages that mrl does not have, so this process cannot import TRL's modules. The tests compile single methods of its
trainers from the unchanged source, and call them with tensors in place of a model and of a distributed run.
"""

import __future__

import ast
import contextlib
import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import Case, loss_and_gradient, make_case
from peer_functions import PEERS, missing_packages

from mrl.algorithms.inputs import Responses
from mrl.algorithms.objective import TokenWeighting, sequence_mean
from mrl.algorithms.preference import DPO, IPO, KTO, ORPO, BradleyTerry, Hinge, SimPO

TRL = PEERS / "trl"
MISSING = missing_packages()
pytestmark = [pytest.mark.extended, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
LENGTHS = (3, 1, 5, 2, 4, 4, 1, 9)


@cache
def method(file: str, trainer: str, name: str) -> Callable:
    """Return a method of a class in a file of TRL, as a function."""
    tree = ast.parse((TRL / file).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "log1mexp"]
    wanted = next(node for node in classes[trainer].body if isinstance(node, ast.FunctionDef) and node.name == name)
    wanted.decorator_list = []
    names = dict(torch=torch, nn=torch.nn, F=torch.nn.functional, math=math, warnings=warnings)
    names |= dict(contextlib=contextlib, disable_gradient_checkpointing=contextlib.nullcontext)
    module = ast.Module([*functions, wanted], [])
    exec(compile(module, file, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True), names)
    return names[name]


def trainer(**attributes: Any) -> SimpleNamespace:
    """Return a stand-in for a trainer in a run with one process."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    common = dict(accelerator=accelerator, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0)
    common |= dict(model=SimpleNamespace(training=True), aux_loss_enabled=False, _tp_size=1, precompute_ref_logps=True)
    return SimpleNamespace(**common | attributes)


class Padded:
    """The responses of a case in TRL's layout: padded rows, first all chosen and then all rejected responses."""

    def __init__(self, case: Case, order: list[int]) -> None:
        longest = int(case.lengths.max())
        self.case, self.order = case, order
        self.logprobs = torch.tensor(case.logprobs, requires_grad=True)
        rows = [self.logprobs[case.spans()[row]] for row in order]
        self.log_probs = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])
        # The prompt of each sequence is one token.
        masks = [[0] + [1] * len(row) + [0] * (longest - len(row)) for row in rows]
        self.completion_mask = torch.tensor(masks)
        reference = [case.columns["ref_logprobs"][case.spans()[row]].sum() for row in order]
        self.reference = torch.tensor(np.array(reference))

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        mask = self.completion_mask
        return dict(input_ids=torch.ones_like(mask), attention_mask=torch.ones_like(mask), completion_mask=mask)

    def outputs(self, **inputs: object) -> SimpleNamespace:
        zeros = torch.zeros_like(self.log_probs)
        found = dict(entropy=zeros, mean_logits=zeros, is_top1=zeros > 0, log_sum_sq_probs=zeros)
        return SimpleNamespace(log_probs=self.log_probs, **found)

    def gradient(self, loss: torch.Tensor) -> np.ndarray:
        loss.backward()
        return self.logprobs.grad.numpy()

    def sums(self, mean: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums, or with `mean` the means, of the log-probabilities of chosen and of rejected responses."""
        sums = self.log_probs.sum(1)
        sums = sums / self.completion_mask.sum(1) if mean else sums
        return sums.chunk(2)


def case_of(seed: int) -> Case:
    case = make_case(seed, LENGTHS)
    return Case(**vars(case) | dict(logprobs=-np.abs(case.logprobs) - 0.01))


def pair_order(case: Case) -> list[int]:
    count = len(case.lengths)
    return [*range(0, count, 2), *range(1, count, 2)]


def check(loss: Any, case: Case, expected: torch.Tensor, padded: Padded) -> None:
    """Check that the loss and its gradient equal those of TRL."""
    weights = TokenWeighting(sequence_mean)(case.lengths, np.arange(len(case.lengths))).repeat(case.lengths)
    found, gradient = loss_and_gradient(loss, case, weights)
    assert found == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(gradient, padded.gradient(expected), rtol=1e-6, atol=1e-9)
    assert np.abs(gradient).max() > 1e-4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss", "loss_type"), [(DPO(beta=0.3), "sigmoid"), (IPO(beta=0.3), "ipo"), (Hinge(beta=0.8), "hinge")]
)
def test_losses_of_the_dpo_trainer(loss, loss_type, seed):
    case = case_of(seed)
    padded = Padded(case, pair_order(case))
    chosen, rejected = padded.reference.chunk(2)
    settings = dict(ld_alpha=None, f_divergence_type="reverse_kl", beta=loss.beta, label_smoothing=0.0)
    fake = trainer(loss_types=[loss_type], loss_weights=[1.0], use_weighting=False, **settings)
    inputs = padded.inputs | dict(ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    expected = method("trainer/dpo_trainer.py", "DPOTrainer", "_compute_loss")(fake, padded.outputs, inputs, False)
    check(loss, case, expected, padded)


@pytest.mark.parametrize("seed", range(3))
def test_dpo_with_the_likelihood_of_the_chosen_response(seed):
    """TRL averages over the tokens of all chosen responses, mrl over responses. Here, all chosen responses are equally long."""
    case = make_case(seed, (4, 3, 4, 2, 4, 7))
    padded = Padded(case, pair_order(case))
    chosen, rejected = padded.reference.chunk(2)
    settings = dict(ld_alpha=None, f_divergence_type="reverse_kl", beta=0.3, label_smoothing=0.0)
    fake = trainer(loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.7], use_weighting=False, **settings)
    inputs = padded.inputs | dict(ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    expected = method("trainer/dpo_trainer.py", "DPOTrainer", "_compute_loss")(fake, padded.outputs, inputs, False)
    check(DPO(beta=0.3, nll_coef=0.7), case, expected, padded)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_of_the_kto_trainer(seed):
    case = case_of(seed)
    labels = np.arange(len(LENGTHS)) % 3 == 0
    padded = Padded(case, list(range(len(LENGTHS))))
    case.columns["labels"] = labels.repeat(case.lengths).astype(float)
    kl, reference_kl = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 2.1], dtype=torch.float64)
    weights = dict(desirable_weight=1.5, undesirable_weight=0.5)
    fake = trainer(calculate_KL=True, loss_type="kto", beta=0.3, _compute_kl_logps=lambda *_: kl, **weights)
    inputs = padded.inputs | dict(label=torch.tensor(labels), ref_logps=padded.reference, ref_KL_logps=reference_kl)
    expected = method("trainer/kto_trainer.py", "KTOTrainer", "_compute_loss")(fake, padded.outputs, inputs, False)
    loss = KTO(beta=0.3, **weights).with_reference_point(float((kl - reference_kl).mean()))
    check(loss, case, expected, padded)


@pytest.mark.parametrize("seed", range(3))
def test_the_odds_ratio_loss_of_the_orpo_trainer(seed):
    """TRL's other term is not tested: it is the cross-entropy of prompt and chosen response, in mrl only of the response."""
    case = case_of(seed)
    padded = Padded(case, pair_order(case))
    chosen, rejected = padded.sums(mean=True)
    # TRL converts the log-probabilities to float32. The test replaces `float`, so that the method computes in float64.
    compute = method("experimental/orpo/orpo_trainer.py", "ORPOTrainer", "odds_ratio_loss")
    in_float64 = [keeping_float64(x) for x in (chosen, rejected)]
    losses, *_ = compute(trainer(beta=0.4), *in_float64)
    expected = -chosen.mean() - losses.mean()
    check(ORPO(beta=0.4), case, expected, padded)


def keeping_float64(values: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a method `float` that keeps float64."""
    kept = values * 1.0
    kept.float = lambda: kept  # type: ignore[method-assign]
    return kept


@pytest.mark.parametrize("seed", range(3))
def test_the_simpo_loss_of_the_cpo_trainer(seed):
    case = case_of(seed)
    padded = Padded(case, pair_order(case))
    fake = trainer(beta=2.0, simpo_gamma=0.6, alpha=0.0, label_smoothing=0.0, loss_type="simpo")
    losses, *_ = method("experimental/cpo/cpo_trainer.py", "CPOTrainer", "cpo_loss")(fake, *padded.sums(mean=True))
    check(SimPO(beta=2.0, gamma=0.6), case, losses.mean(), padded)


@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize("center", [None, 0.05])
def test_the_loss_of_the_reward_trainer(center, with_margin):
    rng = np.random.default_rng(0)
    scores, margins = rng.normal(size=8), rng.random(4) * with_margin
    theirs = torch.tensor(np.concatenate([scores[::2], scores[1::2]])[:, None], requires_grad=True)
    inputs = dict(attention_mask=torch.ones(8, 1)) | (dict(margin=torch.tensor(margins)) if with_margin else {})
    fake = trainer(args=SimpleNamespace(center_rewards_coefficient=center))
    compute = method("trainer/reward_trainer.py", "RewardTrainer", "compute_loss")
    expected = compute(fake, lambda **_: SimpleNamespace(logits=theirs), inputs)
    expected.backward()
    ours = torch.tensor(scores, requires_grad=True)
    responses = Responses(torch.arange(8), torch.ones(8, dtype=torch.int64))
    found, metrics = BradleyTerry(center or 0.0)(ours, responses, {"margins": torch.tensor(margins.repeat(2))})
    found.mean().backward()
    assert found.mean().item() == pytest.approx(expected.item(), rel=1e-9)
    gradient = theirs.grad[:, 0].numpy()
    np.testing.assert_allclose(ours.grad.numpy().reshape(-1, 2).T.ravel(), gradient, rtol=1e-9)
    assert float(metrics["preference/accuracy"].mean()) == fake._metrics["train"]["accuracy"][0]
