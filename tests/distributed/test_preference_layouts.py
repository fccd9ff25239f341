"""Preference losses and reward models: one process gives transformers' results, and every layout and packing gives the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models_for_layouts import VOCAB, make

from models.architecture import ModelSpec
from mrl.algorithms.objective import TokenWeighting, sequence_mean
from mrl.algorithms.preference import DPO, IPO, KTO, ORPO, BradleyTerry, OutcomeLabels, SimPO
from mrl.core.types import TokenBlock, TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.trace_comparison import TOLERANCES, StepTrace, compare_traces
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

ONE = ParallelDims()
LAYOUTS = [
    *(ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(cp=2), ParallelDims(dp=2)),
    *(ParallelDims(tp=2, pp=2), ParallelDims(cp=2, dp=2), ParallelDims(pp=2, vpp=2, dp=2)),
    ParallelDims(tp=2, sp=False),
]
EXPERT_LAYOUTS = [
    *(ParallelDims(dp=2, ep=2), ParallelDims(dp=2, etp=2), ParallelDims(tp=2, ep=2, etp=1)),
    ParallelDims(pp=2, dp=2, ep=2),
]
ALONE = Packing(10_000, False, CostModel(1.0, 0.01))  # one pack, no shared prompts
PACKED = Packing(40, True, CostModel(1.0, 0.01))  # less than the tokens of the longest pair
LOSSES = {
    "dpo": DPO(beta=0.5, label_smoothing=0.1, nll_coef=0.2),
    "ipo": IPO(beta=0.5),
    "orpo": ORPO(beta=0.5),
    "simpo": SimPO(beta=2.0, gamma=0.5),
    "kto": KTO(beta=0.5, desirable_weight=1.3, reference_point=0.1),
}
SCORE_LOSSES = {"bradley terry": BradleyTerry(center_coef=0.1), "labels": OutcomeLabels()}


def pairs(num: int = 5, for_reward_model: bool = False) -> TokenBlock:
    """Return a block of pairs with unequal lengths, one of a single token and one longer than the token budget of PACKED.

    With `for_reward_model`, an end mark that is never read follows each sequence.
    """
    rng = np.random.default_rng(4)
    prompts, responses = [], []
    for index in range(num):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 9)).tolist()
        sizes = (1, 7) if index == 0 else (25, 22) if index == 1 else rng.integers(1, 12, 2)
        prompts += [prompt, prompt]
        responses += [rng.integers(0, VOCAB, size).tolist() for size in sizes]
    masks = None
    if for_reward_model:
        responses = [[*response, 0] for response in responses]
        masks = [[False] * (len(response) - 1) + [True] for response in responses]
    block = TokenBlock.from_lists(prompts, responses, sampled=masks)
    labels = np.array([1, 0, 0, 1, 1, 1, 0, 0, 1, 0] * 5, np.float32)[: 2 * num]
    margins = np.repeat(rng.random(num).astype(np.float32), 2)
    columns = dict(labels=labels, margins=margins)
    columns = {name: values.repeat(block.sampled_lengths) for name, values in columns.items()}
    if not for_reward_model:
        columns["ref_logprobs"] = rng.normal(-3.7, 0.3, int(block.sampled_lengths.sum())).astype(np.float32)
    return block.with_columns(**columns)


def batch_of(block: TokenBlock) -> TrainBatch:
    return replace(TrainBatch.of(block, np.arange(len(block.lengths)) // 2), whole_groups=True)


def make_model(path, dims: ParallelDims, loss, share_prompts: bool = True):
    from mrl.workers.actor_critic import MegatronActor, MegatronRewardModel

    # Adam's first step divides each gradient by its magnitude: without eps, round-off would become a full step.
    spec = ModelSpec(str(path), dims, "float32", OptimConfig(lr=1e-4, eps=1e-6), {}, share_prompts=share_prompts)
    return MegatronRewardModel(spec) if loss in SCORE_LOSSES.values() else MegatronActor(spec)


def traces(rank: int, path, dims: ParallelDims, packing: Packing, losses: dict, num: int = 5) -> dict[str, StepTrace]:
    """Run a step with each loss on a fresh model."""
    from mrl.workers.parity_trace import trace_step

    found = {}
    for name, loss in losses.items():
        block = pairs(num, for_reward_model=loss in SCORE_LOSSES.values())
        batch = partition_step(batch_of(block), dims, packing, TokenWeighting(sequence_mean)).replica_batches[
            dims.coords(rank).dp
        ]
        model = make_model(path, dims, loss, packing.share_prompts)
        found[name] = trace_step(model, block, batch, loss, 1e-4, 1.0)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    make("dense", path)
    return path


def steps_alone(run_ranks, folder) -> dict[str, StepTrace]:
    """Return the steps of a single process with one pack."""
    (found,) = run_ranks(ONE, traces, folder, ONE, ALONE, LOSSES | SCORE_LOSSES)
    assert all(np.isfinite(trace.loss) and trace.grad_norm > 1e-3 for trace in found.values())
    return found


@pytest.fixture(scope="module")
def alone(run_ranks, folder) -> dict[str, StepTrace]:
    """Return the steps of the dense model in a single process."""
    return steps_alone(run_ranks, folder)


@pytest.fixture(scope="module")
def with_experts(run_ranks, tmp_path_factory) -> tuple[Path, dict[str, StepTrace]]:
    """Return the folder of a model with experts, and its steps in a single process."""
    path = tmp_path_factory.mktemp("moe")
    make("moe", path)
    return path, steps_alone(run_ranks, path)


def check_steps(run_ranks, folder, alone: dict[str, StepTrace], dims: ParallelDims) -> None:
    """Check that the step with each loss is the same under a layout as in a single process."""
    ranks = run_ranks(dims, traces, folder, dims, PACKED, LOSSES | SCORE_LOSSES, timeout_s=240)
    for name, expected in alone.items():
        found = StepTrace.merge([rank[name] for rank in ranks])
        assert len(found.outputs) == 10
        wrong = [line for line in compare_traces(expected, found, TOLERANCES["float32"]) if not line.within]
        assert not wrong, (name, wrong[:3])


@pytest.mark.extended
@pytest.mark.parametrize("dims", [ONE, *LAYOUTS], ids=str)
def test_a_step_is_the_same_under_layout(run_ranks, folder, alone, dims):
    check_steps(run_ranks, folder, alone, dims)


@pytest.mark.extended
@pytest.mark.parametrize("dims", EXPERT_LAYOUTS, ids=str)
def test_a_step_of_a_model_with_experts_is_the_same_under_layout(run_ranks, with_experts, dims):
    check_steps(run_ranks, *with_experts, dims)


@pytest.mark.extended
def test_a_single_pair_trains_on_two_replicas(run_ranks, folder):
    """One replica has no rows."""
    losses, dims = {"dpo": LOSSES["dpo"]}, ParallelDims(dp=2)
    (expected,) = run_ranks(ONE, traces, folder, ONE, ALONE, losses, 1)
    found = StepTrace.merge([rank["dpo"] for rank in run_ranks(dims, traces, folder, dims, PACKED, losses, 1)])
    assert not [line for line in compare_traces(expected["dpo"], found, TOLERANCES["float32"]) if not line.within]


def evaluated(rank: int, path, dims: ParallelDims) -> dict[str, float]:
    """Return this rank's part of each loss, computed without gradients."""
    from parallel import groups

    found = {}
    for name, loss in (LOSSES | SCORE_LOSSES).items():
        block = pairs(for_reward_model=loss in SCORE_LOSSES.values())
        batch = partition_step(batch_of(block), dims, PACKED, TokenWeighting(sequence_mean)).replica_batches[
            dims.coords(rank).dp
        ]
        sums = make_model(path, dims, loss).evaluate(block, batch, loss).sums
        found[name] = sums.get("loss", 0.0) if groups.tp_group().rank() == 0 else 0.0
    return found


@pytest.mark.extended
@pytest.mark.parametrize("dims", [ParallelDims(cp=2), ParallelDims(tp=2, pp=2)], ids=str)
def test_an_evaluation_computes_the_loss_of_a_step(run_ranks, folder, alone, dims):
    ranks = run_ranks(dims, evaluated, folder, dims)
    for name, expected in alone.items():
        assert sum(rank[name] for rank in ranks) == pytest.approx(expected.loss, rel=1e-5), name


def response_logprobs(model, block: TokenBlock) -> list:
    """Return the log-probabilities of each response's tokens. A transformers model computes one sequence at a time."""
    import torch

    found = []
    for row in range(len(block.lengths)):
        tokens = torch.tensor(np.concatenate([block.prompt(row), block.response(row)]).astype(np.int64))
        start = int(block.prompt_lengths[row])
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found.append(logprobs[start - 1 :])
    return found


def test_loss_and_gradients_of_dpo_equal_those_of_transformers(run_ranks, folder):
    import torch
    from transformers import AutoModelForCausalLM

    (found,) = run_ranks(ONE, traces, folder, ONE, PACKED, {"dpo": DPO(beta=0.5)})
    block = pairs()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    reference = np.split(block.columns["ref_logprobs"], np.cumsum(block.sampled_lengths)[:-1])
    sums = [
        own.sum() - float(ref.astype(np.float64).sum())
        for own, ref in zip(response_logprobs(model, block), reference, strict=True)
    ]
    losses = [-torch.nn.functional.logsigmoid(0.5 * (sums[i] - sums[i + 1])) for i in range(0, len(sums), 2)]
    loss = torch.stack(losses).mean()
    loss.backward()
    assert found["dpo"].loss == pytest.approx(loss.item(), rel=1e-5)
    check_gradients(found["dpo"], model)


def check_gradients(trace: StepTrace, model) -> None:
    expected = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    assert expected.keys() == trace.gradients.keys()
    for name, gradient in expected.items():
        assert np.abs(gradient - trace.gradients[name]).max() < 2e-5 * max(1.0, np.abs(gradient).max()), name


def trained_and_exported(rank: int, path, dims: ParallelDims, output) -> tuple[StepTrace, dict[int, float]]:
    """Train a step of a fresh reward model, and export it. Returns the trace and the scores of the exported weights."""
    from mrl.workers.parity_trace import forward_outputs, trace_step

    block, loss = pairs(for_reward_model=True), SCORE_LOSSES["bradley terry"]
    batch = partition_step(batch_of(block), dims, PACKED, TokenWeighting(sequence_mean)).replica_batches[
        dims.coords(rank).dp
    ]
    model = make_model(path, dims, loss)
    trace = trace_step(model, block, batch, loss, 1e-2, 1.0)
    model.export_hf(output, {"note.txt": "hello"})
    return trace, {row: float(values[0]) for row, values in forward_outputs(model, block, batch, 1.0).items()}


def classifier_scores(folder) -> tuple:
    """Return transformers' sequence classifier, and its scores for the sequences of `pairs` without end marks."""
    import torch
    from transformers import AutoModelForSequenceClassification

    block = pairs(for_reward_model=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.config.pad_token_id = None  # otherwise it takes tokens with this id for padding
    rows = [
        block.tokens[start : end - 1] for start, end in zip(block.cu_seqlens[:-1], block.cu_seqlens[1:], strict=True)
    ]
    return model, [model(torch.tensor(row.astype(np.int64))[None]).logits[0, 0] for row in rows]


@pytest.mark.extended_except("dense")
@pytest.mark.parametrize("kind", ["dense", "tied", "biased", "qkv_biased"])
def test_transformers_loads_an_exported_reward_model_with_equal_scores(run_ranks, tmp_path, kind):
    import torch

    make(kind, tmp_path / "model")
    dims = ParallelDims(tp=2, pp=2) if kind == "tied" else ONE
    ranks = run_ranks(dims, trained_and_exported, tmp_path / "model", dims, tmp_path / "reward")
    scores = {row: score for _, found in ranks for row, score in found.items()}
    with torch.no_grad():
        _, expected = classifier_scores(tmp_path / "reward")
    assert len(scores) == len(expected) and np.ptp(expected) > 0.1, "equal scores would prove nothing"
    np.testing.assert_allclose([scores[row] for row in range(len(expected))], [float(x) for x in expected], atol=1e-5)


@pytest.mark.extended
def test_a_reward_model_starts_again_from_its_export(run_ranks, folder, tmp_path):
    """The second run begins with the scores with which the first run ended, and its gradients equal those of transformers."""
    import torch

    (first,) = run_ranks(ONE, trained_and_exported, folder, ONE, tmp_path / "first")
    (second,) = run_ranks(ONE, trained_and_exported, tmp_path / "first", ONE, tmp_path / "second")
    before = {row: float(values[0]) for row, values in second[0].outputs.items()}
    assert before == pytest.approx(first[1], abs=1e-6)
    model, scores = classifier_scores(tmp_path / "first")
    margins = pairs(for_reward_model=True).columns["margins"][::2]
    losses = [
        -torch.nn.functional.logsigmoid(scores[2 * i] - scores[2 * i + 1] - float(margin))
        + 0.1 * (scores[2 * i] + scores[2 * i + 1]) ** 2
        for i, margin in enumerate(margins)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    assert second[0].loss == pytest.approx(loss.item(), rel=1e-5)
    check_gradients(second[0], model)


def value_heads(rank: int, path) -> tuple[np.ndarray, float]:
    from mrl.workers.actor_critic import MegatronCritic

    critic = MegatronCritic(ModelSpec(str(path), ONE, "float32", OptimConfig(), {}))
    head = critic.chunks[0].module.output_layer
    return head.weight.detach().numpy(), head.bias.item()


@pytest.mark.extended
def test_a_critic_that_starts_from_a_reward_model_has_its_scores(run_ranks, folder, tmp_path):
    from safetensors.numpy import load_file

    run_ranks(ONE, trained_and_exported, folder, ONE, tmp_path / "reward")
    ((weight, bias),) = run_ranks(ONE, value_heads, tmp_path / "reward")
    tensors = load_file(tmp_path / "reward/model.safetensors")
    np.testing.assert_array_equal(weight, tensors["score.weight"])
    assert bias == 0 and tensors["score.bias"] == 0 and "lm_head.weight" not in tensors
