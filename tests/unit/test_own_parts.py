"""Functions of a user as parts of an algorithm: those of the documentation run, and wrong results name file and line."""

import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import own_parts
import pytest
import torch
from loss_cases import loss_inputs, make_case
from sampled_groups import group

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.inputs import LossInputs, ScoredBatch
from mrl.algorithms.losses import PPOClip, ValueLoss
from mrl.algorithms.objective import Objective, check_token_values
from mrl.algorithms.parts import AlgorithmParts, build_algorithm
from mrl.config import hydra_entry
from mrl.core.code_locations import describe_plug_in, plug_in_name
from mrl.rewards.reward_types import Score
from mrl.rollout.worker import RolloutWorker


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """`user_file(name, source)` makes a file that can be imported as the module `name`."""

    def write(name: str, source: str) -> Path:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return tmp_path / f"{name}.py"

    yield write
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def algorithm(*overrides: str) -> AlgorithmParts:
    arguments = hydra_entry.check_overrides(["experiment=quickstart", "run.dir=unused", *overrides])
    return build_algorithm(hydra_entry.compose_config(arguments))


@pytest.fixture
def own(user_file) -> AlgorithmParts:
    """Return the algorithm of the documentation, pickled and unpickled as Ray does it."""
    user_file("my_parts", own_parts.SOURCE)
    return pickle.loads(pickle.dumps(algorithm(*own_parts.overrides())))


@pytest.mark.extended
def test_the_functions_of_the_documentation_are_an_algorithm(own):
    assert own.required_inputs == {"values", "entropies", "rollout_logprobs", "sum_pi_squared"}
    assert not own.objective.zero_at_zero_advantage and not own.objective.uses_entropy
    case, rng = make_case(0), np.random.default_rng(0)
    total, rewards = len(case.old), np.array([1.0, 0.0, 1.0, 0.0, 2.0])
    columns = {
        "values": rng.normal(size=total).astype(np.float32),
        "entropies": rng.random(total).astype(np.float32),
        "sum_pi_squared": rng.random(total).astype(np.float32),
        "rollout_logprobs": case.rollout.astype(np.float32),
    }
    scored = ScoredBatch(rewards, np.array([0, 0, 1, 1, 1]), case.lengths, np.zeros(5, bool))
    found = own.advantage_pipeline(scored, columns, 0.0, [0]).columns
    entropies = columns["entropies"].astype(float)
    expected = (rewards[case.rows] - columns["values"]) * entropies / entropies.mean()
    np.testing.assert_allclose(found["advantages"], expected, rtol=1e-5)
    np.testing.assert_array_equal(found["returns"], rewards[case.rows].astype(np.float32))

    inputs = loss_inputs(replace(case, columns=columns))
    loss, metrics = own.objective(inputs)
    ratio = np.exp(case.logprobs - case.old)
    keep = np.exp(case.rollout) >= 0.001 * columns["sum_pi_squared"]
    np.testing.assert_allclose(loss.numpy(), -np.minimum(ratio, 1.5) * case.advantages * keep, rtol=1e-6)
    assert (ratio > 1.5).any(), "the argument of the config is used"
    np.testing.assert_allclose(metrics["ratio"].numpy(), ratio, rtol=1e-9)

    weights = own.weighting(np.array([4, 2, 3]), np.array([7, 7, 9]))
    assert weights.tolist() == [1 / 12, 1 / 12, 1 / 6]
    errors = torch.tensor([0.1, 2.0])
    assert own.value_loss(errors, torch.zeros(2), errors).tolist() == pytest.approx([0.1**2 / 2, 0.5 * (2.0 - 0.25)])
    assert own.rollout_filter(np.array([0.0, 1.0])) and not own.rollout_filter(np.array([1.0, 1.0]))


def test_a_token_without_an_engine_log_probability_has_loss_0_if_the_loss_reads_it():
    def loss(inputs: LossInputs):
        return (inputs.logprobs - inputs.rollout_logprobs).exp(), {}

    case = make_case(0)
    case.rollout[3] = np.nan
    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    loss.required_inputs = {"rollout_logprobs"}
    found, _ = Objective(loss)(loss_inputs(case, logprobs))
    found.sum().backward()
    assert torch.isfinite(logprobs.grad).all() and found[3] == logprobs.grad[3] == 0 and found[2] != 0


def test_the_definition_of_a_plug_in_is_named(user_file):
    path = user_file(
        "named", "class Part:\n    def __call__(self, inputs):\n        pass\n\n\ndef part(inputs, x=1):\n    pass\n"
    )
    parts = algorithm(
        "algorithm.loss._target_=named.part", "+algorithm.loss.x=2", "algorithm.advantage._target_=named.Part"
    )
    loss, advantage = parts.objective.policy, parts.advantage_pipeline.advantage
    assert describe_plug_in(loss) == f"part ({path}:6)" and plug_in_name(loss) == "part"
    assert describe_plug_in(advantage) == f"Part ({path}:2)" and plug_in_name(advantage) == "Part"
    assert describe_plug_in(PPOClip()) == "PPOClip" == plug_in_name(PPOClip())


WRONG_CALLS = {
    "a loss of three arguments": ("algorithm.loss", "a, b, c", r"takes \(a, b, c\), but mrl calls it with \(inputs\)"),
    "an advantage without arguments": ("algorithm.advantage", "", r"mrl calls it with \(inputs\): too many"),
    "a correction with a missing argument": (
        "algorithm.correction",
        "inputs, low",
        "missing a required argument: 'low'",
    ),
    "an aggregation without arguments": ("algorithm.aggregation", "", "too many positional"),
    "a value loss of two arguments": ("critic.loss", "a, b", r"mrl calls it with \(values, returns, old_values\)"),
    "a filter of two arguments": ("rollout.filter", "a, b", r"mrl calls it with \(rewards\)"),
}


@pytest.mark.extended_after(2)
@pytest.mark.parametrize(("key", "arguments", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_function_with_other_arguments_is_refused_before_the_start(user_file, key, arguments, message):
    path = user_file("wrong_call", f"\n\ndef part({arguments}):\n    pass\n")
    with pytest.raises(ValueError, match=f"{key}: part \\({path}:3\\) .*{message}"):
        algorithm(f"++{key}._target_=wrong_call.part")


def test_a_text_as_needs_is_refused(user_file):
    user_file("text_needs", "def part(inputs):\n    pass\n\n\npart.required_inputs = 'values'\n")
    with pytest.raises(
        ValueError, match=r"part \(.*text_needs.py:1\): required_inputs='values': expected a set of names"
    ):
        algorithm("algorithm.advantage._target_=text_needs.part")


SCORED = ScoredBatch(np.array([1.0, 0.0]), np.zeros(2, int), np.array([2, 3]), np.zeros(2, bool))
WRONG_ADVANTAGES = {
    "of another shape": (
        "np.ones(3)",
        r"returned an array of shape \(3,\); expected one number for each of the 2 resp",
    ),
    "with a NaN": ("np.array([0.0, np.nan])", "returned nan at index 1, and 1 of 2 values are not finite"),
    "that are texts": ("['a', 'b']", "returned a list of <U1; expected an array of numbers"),
    "of different lengths": ("[[1.0], [1.0, 2.0]]", "returned a list that is no array"),
    "without a result": ("None", "returned a NoneType of object; expected an array of numbers"),
    "with returns of responses": ("Advantages(np.ones(2), np.ones(2))", r"returned returns of shape \(2,\)"),
    "with an infinite return": ("Advantages(np.ones(2), np.full(5, np.inf))", r"\(returns\) returned inf at index 0"),
}


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(("result", "message"), WRONG_ADVANTAGES.values(), ids=WRONG_ADVANTAGES)
def test_wrong_advantages_name_the_function(user_file, result, message):
    source = f"import numpy as np\nfrom mrl.algorithms.inputs import Advantages\n\n\ndef mine(inputs):\n    return {result}\n"
    path = user_file("wrong_advantages", source)
    pipeline = algorithm("algorithm.advantage._target_=wrong_advantages.mine").advantage_pipeline
    with pytest.raises(ValueError, match=f"algorithm.advantage: mine \\({path}:5\\) .*{message}"):
        pipeline(SCORED, {}, 0.0, [0])


def test_an_advantage_that_needs_values_must_return_returns(user_file):
    user_file("no_returns", "def mine(inputs):\n    return inputs.rewards\n\n\nmine.required_inputs = {'values'}\n")
    pipeline = algorithm("algorithm.advantage._target_=no_returns.mine").advantage_pipeline
    with pytest.raises(ValueError, match=r"mine \(.*:1\) needs values, but returned no returns: return Advantages"):
        pipeline(SCORED, {"values": np.zeros(5, np.float32)}, 0.0, [0])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"mine": np.ones(4)}, r"precomputed_columns of PPOClip \(mine\) returned an array of shape \(4,\)"),
        ({"mine": ["a"] * 5}, "expected an array of numbers"),
        ({"advantages": np.ones(5)}, "returned 'advantages', but another column has this name"),
    ],
)
def test_wrong_precomputed_columns_are_refused(columns, message):
    loss = PPOClip()
    object.__setattr__(loss, "precomputed_columns", lambda batch, advantages, rng: columns)
    pipeline = AdvantagePipeline(lambda inputs: inputs.rewards, Objective(loss))
    with pytest.raises(ValueError, match=message):
        pipeline(SCORED, {}, 0.0, [0])


WRONG_LOSSES = {
    "a mean": (
        "inputs.logprobs.mean(), {}",
        r"tensor of shape \[\]; expected one number for each of the 15 sampled tokens",
    ),
    "no metrics": ("inputs.logprobs", "returned a Tensor; expected a tensor \\[R\\] and a dict of metrics"),
    "an array": ("inputs.logprobs.numpy(), {}", "returned a ndarray; expected a tensor"),
    "integers": ("inputs.logprobs.long(), {}", "returned a tensor of torch.int64; expected floating-point numbers"),
    "a metric of the batch": ("inputs.logprobs, {'own/x': inputs.logprobs.mean()}", r"shape \[\] as metric own/x"),
    "a metric with a wrong name": (
        "inputs.logprobs, {'my ratio': inputs.logprobs}",
        "the name of a metric has letters, digits and _, such as 'my_ratio'",
    ),
}


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("key", ["algorithm.loss", "algorithm.correction"])
@pytest.mark.parametrize(("result", "message"), WRONG_LOSSES.values(), ids=WRONG_LOSSES)
def test_a_wrong_loss_or_correction_names_the_function(user_file, key, result, message):
    path = user_file("wrong_loss", f"def mine(inputs):\n    return {result}\n")
    objective = algorithm(f"++{key}._target_=wrong_loss.mine").objective
    with pytest.raises(ValueError, match=f"{key}: mine \\({path}:1\\) .*{message}"):
        objective(loss_inputs(make_case(0)))


def test_a_correction_with_a_gradient_is_refused():
    case = make_case(0)
    inputs = loss_inputs(case, torch.tensor(case.logprobs, requires_grad=True))
    with pytest.raises(
        ValueError, match=r"<lambda>.* returned weights with a gradient; compute them from .*detach\(\)"
    ):
        Objective(PPOClip(), lambda inputs: (inputs.logprobs.exp(), {}))(inputs)


def test_the_source_of_a_loss_names_all_parts_that_compute_it():
    assert Objective(PPOClip()).source == "algorithm.loss: PPOClip"
    both = Objective(PPOClip(), lambda inputs: (inputs.logprobs, {})).source
    assert re.fullmatch(r"algorithm.loss: PPOClip, algorithm.correction: <lambda> \(.*test_own_parts.py:\d+\)", both)


def test_a_value_loss_is_checked_like_a_policy_loss():
    values = torch.zeros(3)
    check_token_values((ValueLoss()(values, values, values), {}), values, "critic.loss", ValueLoss())
    with pytest.raises(ValueError, match=r"critic.loss: ValueLoss returned a tensor of shape \[\]"):
        check_token_values((values.mean(), {}), values, "critic.loss", ValueLoss())


def test_a_filter_is_called_once_for_each_replayed_group():
    worker, calls, groups = object.__new__(RolloutWorker), [], [group(row, Score(1.0)) for row in range(3)]
    worker.spec = SimpleNamespace(
        replay="outputs/run", rollout_filter=lambda rewards: calls.append(1) or len(calls) == 2
    )
    worker.served, worker._replay = SimpleNamespace(check=lambda: None), lambda step: groups
    assert worker.sample(0, np.arange(3), 0) == 0 and len(calls) == 3
    assert worker._sampled_step.kept == [groups[1]] and worker._sampled_step.filtered == [groups[0], groups[2]]


def test_a_filter_must_return_a_truth_value():
    worker = object.__new__(RolloutWorker)
    worker.spec = SimpleNamespace(rollout_filter=lambda rewards: rewards.mean() > 0.2)
    assert worker._passes_filter(group(0, Score(1.0), Score(0.0))) is True
    worker.spec = SimpleNamespace(rollout_filter=lambda rewards: rewards > 0.2)
    with pytest.raises(
        ValueError, match=r"rollout.filter: <lambda> \(.*:\d+\) returned array\(.*expected True or False"
    ):
        worker._passes_filter(group(0, Score(1.0), Score(0.0)))
