"""The result of an optimizer step does not depend on the order of rows, the token budget, or the number of replicas."""

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from models_for_layouts import groups_of_responses, make

from models.architecture import ModelSpec
from mrl.algorithms.losses import PPOClip
from mrl.core.types import TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

pytestmark = pytest.mark.extended

COUNT = 20  # rows of `groups_of_responses`
Case = tuple[list[int], int]  # (order of rows, max_tokens)


def traces(rank: int, path, dims: ParallelDims, cases: list[Case]):
    """Run one step of a fresh model for each case; return outputs in the original order of rows."""
    from dataclasses import replace

    from mrl.workers.actor_critic import MegatronActor
    from mrl.workers.parity_trace import trace_step

    results = []
    for order, max_tokens in cases:
        block, groups = groups_of_responses()
        order = np.array(order)
        block, groups = block.select(order), groups[order]
        batch = TrainBatch.of(block, groups)
        step = partition_step(batch, dims, Packing(max_tokens, True, CostModel(1.0, 0.01)))
        actor = MegatronActor(ModelSpec(str(path), dims, "float32", OptimConfig(lr=1e-4, eps=1e-6), {}))
        trace = trace_step(actor, block, step.replica_batches[dims.coords(rank).dp], PPOClip(), 1e-4, temperature=0.7)
        outputs, after = (
            {int(order[row]): column for row, column in columns.items()}
            for columns in (trace.outputs, trace.outputs_after_step)
        )
        results.append(replace(trace, outputs=outputs, outputs_after_step=after))
    return results


@pytest.fixture(scope="session")
def expected(run_ranks, tmp_path_factory):
    """Return (model folder, result of the step with all rows in one pack in the original order)."""
    path = tmp_path_factory.mktemp("dense")
    make("dense", path)
    return path, run_ranks(ParallelDims(), traces, path, ParallelDims(), [(list(range(COUNT)), 10_000)])[0][0]


@pytest.mark.parametrize("dp", [1, 2])
def test_a_step_is_the_same_for_any_row_order_and_any_token_budget(run_ranks, expected, dp):
    from mrl.workers.trace_comparison import StepTrace, compare_traces

    path, reference = expected
    drawn: list[Case] = []

    @seed(dp)
    @settings(max_examples=3, database=None)
    @given(st.permutations(range(COUNT)), st.integers(1, 200))
    def draw(order, max_tokens):
        drawn.append((order, max_tokens))

    draw()
    by_rank = run_ranks(ParallelDims(dp=dp), traces, path, ParallelDims(dp=dp), drawn[-2:])
    for case, of_ranks in zip(drawn[-2:], zip(*by_rank, strict=True), strict=True):
        found = StepTrace.merge(of_ranks)
        assert len(found.outputs) == COUNT and len(found.gradients) == len(reference.gradients) > 0
        wrong = [d for d in compare_traces(reference, found) if not d.within]
        assert not wrong, (case, wrong[:5])
