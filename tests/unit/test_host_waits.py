"""No loss, correction or metric makes the host wait for the GPU. tests/host_waits.py finds operations that make it wait."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from host_waits import HostWaits
from hydra import compose, initialize_config_dir
from loss_cases import loss_inputs, make_case

from mrl.algorithms.corrections import IcePop, ImportanceSampling, OffPolicyMask, Product, Rejection, mismatch_sums
from mrl.algorithms.distillation import DIVERGENCE_OUTPUTS
from mrl.algorithms.parts import build_objective
from mrl.config import hydra_entry
from mrl.config.validate import from_hydra
from parallel.device import copy_to_device

CPU = torch.device("cpu")
VALUES, MASK = torch.arange(6.0), torch.arange(6) > 2
WAITS = {
    "item": lambda: VALUES[0].item(),
    "tolist": lambda: VALUES.tolist(),
    "numpy": lambda: VALUES.numpy(),
    "np.asarray": lambda: np.asarray(VALUES),
    "cpu": lambda: VALUES.cpu(),
    "to cpu": lambda: VALUES.to("cpu"),
    "to device": lambda: VALUES.to(device=CPU),
    "cuda": lambda: VALUES.cuda(),
    "int": lambda: int(VALUES[1]),
    "float": lambda: float(VALUES[1]),
    "bool": lambda: bool(MASK.any()),
    "if": lambda: 1 if MASK.all() else 0,
    "max of python": lambda: max(VALUES[0], VALUES[1]),
    "as index": lambda: [0, 1][VALUES[1].long()],
    "as size": lambda: torch.zeros(VALUES[2].long()),
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(MASK),
    "boolean mask": lambda: VALUES[MASK],
    "assignment of a tensor to a mask": lambda: VALUES.clone().__setitem__(MASK, torch.ones(3)),
    "masked_select": lambda: VALUES.masked_select(MASK),
    "unique": lambda: VALUES.unique(),
    "repeat_interleave": lambda: VALUES.repeat_interleave(MASK.long()),
    "bincount": lambda: torch.bincount(MASK.long()),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "allclose": lambda: torch.allclose(VALUES, VALUES),
    "tensor of a list": lambda: torch.tensor([1, 2], device=CPU),
    "as_tensor of a number": lambda: torch.as_tensor(3, device=CPU),
    "new_tensor": lambda: VALUES.new_tensor(3.0),
    "synchronize": lambda: torch.cuda.synchronize(),
    "synchronize of a stream": lambda: torch.cuda.Stream.synchronize(None),
    "synchronize of an event": lambda: torch.cuda.Event.synchronize(None),
}
NO_WAITS = {
    "arithmetic": lambda: (VALUES * 2 + VALUES.sum()).softmax(0),
    "index_select": lambda: VALUES.index_select(0, torch.arange(3)),
    "index of numbers": lambda: VALUES[torch.arange(3)],
    "assignment of a number to a mask": lambda: VALUES.clone().__setitem__(MASK, 1.0),
    "masked_fill": lambda: VALUES.masked_fill(MASK, 0.0),
    "tensor of the host": lambda: torch.tensor([1, 2], device="cpu").tolist(),
    "choice by a mask": lambda: torch.where(MASK, VALUES, 0.0),
    "slices": lambda: VALUES[2:4].clone(),
    "sizes": lambda: [len(VALUES), VALUES.numel(), VALUES.shape[0]],
    "repeat_interleave with its size": lambda: VALUES.repeat_interleave(MASK.long(), output_size=3),
    "repeat_interleave by a number": lambda: VALUES.repeat_interleave(2),
    "full": lambda: VALUES.new_full((), 3.0),
    "other dtype": lambda: VALUES.to(torch.float64),
    "copy from pinned memory": lambda: copy_to_device(np.arange(3), CPU),
}


@pytest.mark.parametrize("name", WAITS)
def test_an_operation_for_which_the_host_waits_is_found(name):
    with HostWaits() as waits:
        WAITS[name]()
    assert len(waits.found) >= 1 and "test_host_waits.py" in waits.found[0]


@pytest.mark.parametrize("name", NO_WAITS)
def test_an_operation_for_which_the_host_does_not_wait_is_not_reported(name):
    with HostWaits() as waits:
        NO_WAITS[name]()
    assert waits.found == []


def test_waits_in_backward_passes_are_found_and_allowed_functions_may_wait():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.max().item()

    def read() -> float:
        return VALUES.sum().item()

    with HostWaits((__file__, "read")) as waits:
        read()
        read()
        assert waits.found == [] and waits.num_allowed == {("_local_scalar_dense", "read"): 2}
        Doubled.apply(VALUES.clone().requires_grad_()).sum().backward()
    assert len(waits.found) == 1 and "_local_scalar_dense" in waits.found[0]


ALGORITHMS = sorted(path.stem for path in (hydra_entry.CONF / "algorithm").glob("*.yaml"))


@pytest.mark.extended_except("clip_cov", "dapo", "ppo")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_objective_waits_for_the_device(name):
    hydra_entry.register_schema()
    overrides = ["experiment=quickstart", "run.dir=unused", f"algorithm={name}", "++algorithm.kl_in_loss.kind=k3"]
    overrides += ["roles.teacher.path=unused"] if name.startswith("distill") else []
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        objective = build_objective(from_hydra(compose("config", overrides)))
    case = make_case(0)
    inputs = loss_inputs(case, torch.tensor(case.logprobs, requires_grad=True))
    required = dict.fromkeys(objective.required_inputs, inputs.old_logprobs)
    inputs = replace(inputs, columns=dict(inputs.columns) | required)
    if objective.distillation:
        inputs = replace(inputs, columns=inputs.columns | dict.fromkeys(DIVERGENCE_OUTPUTS, inputs.logprobs))
    with HostWaits() as waits:
        loss, _ = objective(inputs)
        loss.sum().backward()
    assert waits.found == []


@pytest.mark.parametrize(
    "correction",
    [
        ImportanceSampling(),
        ImportanceSampling(level="sequence", mode="mask", veto=1e-4),
        ImportanceSampling(level="geometric", mode="reject", low=0.9, high=1.1),
        ImportanceSampling(numerator="current"),
        Rejection(0.1, "max", "k2"),
        Rejection(0.1, "mean"),
        OffPolicyMask(),
        Product([IcePop(), ImportanceSampling(level="geometric")]),
    ],
    ids=str,
)
def test_no_correction_waits_for_the_device(correction):
    inputs = loss_inputs(make_case(1))
    with HostWaits() as waits:
        correction(inputs)
    assert waits.found == []


def test_the_mismatch_metrics_do_not_wait_for_the_device():
    rollout = torch.tensor([-1.0, float("nan"), -3.0])
    with HostWaits() as waits:
        mismatch_sums(torch.tensor([-1.5, -2.0, -3.0]), rollout)
    assert waits.found == []
