"""Responses of several turns: under every layout, tool results are context and not targets."""

import numpy as np
import pytest
from models_for_layouts import VOCAB, make
from numpy.typing import NDArray

from models.architecture import ModelSpec
from mrl.algorithms.losses import CrossEntropy, PPOClip
from mrl.core.types import TokenBlock, TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.trace_comparison import TOLERANCES, StepTrace, compare_traces
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

ONE = ParallelDims()
LAYOUTS = [
    *(ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(cp=2), ParallelDims(dp=2)),
    *(ParallelDims(tp=2, cp=2), ParallelDims(pp=2, dp=2), ParallelDims(cp=2, dp=2)),
]
PLAIN = Packing(10_000, False, CostModel(1.0, 0.01))
PACKED = Packing(60, True, CostModel(1.0, 0.01))
PPO = PPOClip(clip_low=0.99, clip_high=50.0)  # wide clipping range: nearly all tokens keep their gradient


def conversations(num_groups: int = 4, size: int = 3) -> tuple[TokenBlock, NDArray]:
    """Return (block of responses with tool results at random positions, one without sampled tokens; groups [B])."""
    rng = np.random.default_rng(3)
    prompts, responses, sampled, logprobs = [], [], [], []
    for _ in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 9)).tolist()
        for _ in range(size):
            lengths = rng.integers(1, 6, rng.choice([1, 3, 5]))
            marks = [place % 2 == 0 for place, length in enumerate(lengths) for _ in range(length)]
            prompts.append(prompt)
            responses.append(rng.integers(0, VOCAB, len(marks)).tolist())
            sampled.append(marks)
    sampled[4] = [False] * len(sampled[4])
    logprobs = [rng.normal(-3.7, 1.0, sum(marks)).tolist() for marks in sampled]
    block = TokenBlock.from_lists(prompts, responses, logprobs, None, sampled)
    advantages = rng.normal(size=int(block.sampled_lengths.sum())).astype(np.float32)
    return block.with_columns(advantages=advantages), np.repeat(np.arange(num_groups), size)


def trace(rank: int, path, dims: ParallelDims, packing: Packing, loss) -> StepTrace:
    """Run one training step of a fresh actor on the conversations."""
    from mrl.workers.actor_critic import MegatronActor
    from mrl.workers.parity_trace import trace_step

    block, groups = conversations()
    share = partition_step(TrainBatch.of(block, groups), dims, packing).replica_batches[dims.coords(rank).dp]
    # Adam's first step divides each gradient by its magnitude: without eps, round-off would become a full step.
    spec = ModelSpec(
        str(path), dims, "float32", OptimConfig(lr=1e-4, eps=1e-6), {}, share_prompts=packing.share_prompts
    )
    return trace_step(MegatronActor(spec), block, share, loss, 1e-4, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense")
    make("dense", path)
    return path


@pytest.fixture(scope="module")
def alone(run_ranks, folder) -> StepTrace:
    """Return the step of a single process with one pack."""
    (found,) = run_ranks(ONE, trace, folder, ONE, PLAIN, PPO)
    return found


@pytest.mark.extended
@pytest.mark.parametrize("dims", [ONE, *LAYOUTS], ids=str)
def test_a_step_on_conversations_is_the_same_under_layout(run_ranks, folder, alone, dims):
    found = StepTrace.merge(run_ranks(dims, trace, folder, dims, PACKED, PPO))
    block, _ = conversations()
    assert {row: len(output) for row, output in found.outputs.items()} == dict(
        enumerate(block.sampled_lengths.tolist())
    )
    wrong = [line for line in compare_traces(alone, found, TOLERANCES["float32"]) if not line.within]
    assert not wrong, wrong[:5]


def test_loss_and_gradients_equal_those_computed_by_hand(run_ranks, folder):
    """A transformers model computes the expected values: the mean cross-entropy of only the sampled tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    (found,) = run_ranks(ONE, trace, folder, ONE, PACKED, CrossEntropy())
    block, _ = conversations()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = torch.zeros(()), int(block.sampled_lengths.sum())
    for row, (start, end) in enumerate(zip(block.cu_seqlens[:-1], block.cu_seqlens[1:], strict=True)):
        tokens = torch.from_numpy(block.tokens[start:end].astype(np.int64))
        mine = torch.from_numpy(block.sampled[start:end])
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0][mine[1:]]
        assert np.abs(logprobs.detach().numpy() - found.outputs[row]).max(initial=0.0) < 1e-5
        total = total - logprobs.sum()
    (total / count).backward()
    assert found.loss == pytest.approx(total.item() / count, rel=1e-6)
    expected = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    assert expected.keys() == found.gradients.keys()
    for name, gradient in expected.items():
        assert np.abs(gradient - found.gradients[name]).max() < 1e-5 * max(1.0, np.abs(gradient).max()), name


def test_a_tool_result_affects_later_tokens_only(run_ranks, folder, alone):
    """All tokens are context: log-probabilities after a tool result depend on the tool result."""
    import torch
    from transformers import AutoModelForCausalLM

    block, _ = conversations()
    row = int(np.flatnonzero(block.sampled_lengths < block.response_lengths)[0])
    start, end = block.cu_seqlens[row], block.cu_seqlens[row + 1]
    tokens, mine = block.tokens[start:end].astype(np.int64), block.sampled[start:end]
    kept = np.concatenate([tokens[: block.prompt_lengths[row]], tokens[mine]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(kept)[None]).logits[0, :-1].log_softmax(-1)
    without = logits.gather(1, torch.from_numpy(kept)[1:, None])[block.prompt_lengths[row] - 1 :, 0].numpy()
    first = int(
        np.flatnonzero(~mine[block.prompt_lengths[row] :])[0]
    )  # number of sampled tokens before the first tool result
    found = alone.outputs[row]
    assert np.abs(without[:first] - found[:first]).max() < 1e-5 < np.abs(without[first:] - found[first:]).max()
