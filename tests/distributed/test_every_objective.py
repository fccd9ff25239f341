"""What any algorithm minimises is the same under every layout and every cut into micro-batches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from models_for_layouts import groups_of_responses, make
from numpy.typing import NDArray

from mrl.algorithms.inputs import AdvantageInputs
from mrl.algorithms.objective import Objective
from mrl.algorithms.parts import build_objective
from mrl.config import hydra_entry
from mrl.config.validate import from_hydra
from mrl.core.types import TokenBlock, TrainBatch
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.model_spec import ModelSpec
from mrl.workers.trace_comparison import StepTrace, compare_traces
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

pytestmark = pytest.mark.extended

ALGORITHMS = sorted(path.stem for path in (hydra_entry.CONF / "algorithm").glob("*.yaml"))
TERMS = ["++algorithm.kl_in_loss.kind=k3", "algorithm.entropy_coef=0.1"]
ONE = ParallelDims()
LAYOUTS = [ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(cp=2), ParallelDims(dp=2)]
Step = tuple[TokenBlock, NDArray, Objective, str]  # block, groups, what is minimised, aggregation
NEAR = 0.3  # nats between the old policy and all others: ratios reach every clip


def configured(*overrides: str) -> tuple[Objective, str]:
    """(objective, aggregation) of a config."""
    hydra_entry.register_schema()
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        config = from_hydra(compose("config", ["experiment=quickstart", "run.dir=unused", *overrides]))
    return build_objective(config), config.algorithm.aggregation


def off_policy(block: TokenBlock, groups: NDArray, now: NDArray, objective: Objective) -> TokenBlock:
    """The block with every column that the objective needs, near the model's log-probabilities, and those that it makes."""
    rng = np.random.default_rng(5)
    columns = {
        name: (now + rng.normal(scale=NEAR, size=len(now))).astype(np.float32)
        for name in ("rollout_logprobs", "old_logprobs", *sorted(objective.needs))
    }
    block, advantages = replace(block, rollout_logprobs=columns.pop("rollout_logprobs")), block.columns["advantages"]
    inputs = AdvantageInputs(advantages.astype(np.float64), groups, block.sampled_lengths, columns)
    return block.with_columns(**columns | objective.extra_columns(inputs, advantages, np.random.default_rng(6)))


def spec_of(path, dims: ParallelDims, share_prompts: bool = False) -> ModelSpec:
    # Adam's first step divides each gradient by itself: round-off below eps would become whole steps.
    return ModelSpec(str(path), dims, "float32", OptimConfig(lr=1e-4, eps=1e-6), {}, share_prompts=share_prompts)


def logprobs(rank: int, path, block: TokenBlock) -> NDArray:
    """[R] in one process."""
    from mrl.workers.actor import MegatronActor

    (share,) = partition_step(TrainBatch.of(block, None), ONE, Packing(10_000, False), "token_mean").rank_batches
    actor = MegatronActor(spec_of(path, ONE))
    part = actor.column_part(actor.compute_logprobs(block, share), share)
    assert part is not None
    return part.values


def traces(rank: int, path, dims: ParallelDims, steps: dict[str, Step], packing: Packing) -> dict[str, StepTrace]:
    """Each step on a fresh model."""
    from mrl.workers.actor import MegatronActor
    from mrl.workers.parity_trace import trace_step

    found = {}
    for name, (block, groups, objective, aggregation) in steps.items():
        actor = MegatronActor(spec_of(path, dims, packing.share_prompts))
        share = partition_step(TrainBatch.of(block, groups), dims, packing, aggregation, 20).rank_batches[
            dims.coords(rank).dp
        ]
        found[name] = trace_step(actor, block, share, objective, 1e-4, 1.0)
    return found


@pytest.fixture(scope="module")
def steps(run_ranks, tmp_path_factory) -> tuple[Path, dict[str, Step], dict[str, StepTrace]]:
    """(folder of the model, a step of every algorithm, the same in one process and one plain pack)."""
    folder = tmp_path_factory.mktemp("dense")
    make("dense", folder)
    block, groups = groups_of_responses()
    (now,) = run_ranks(ONE, logprobs, folder, block)
    named = {name: [f"algorithm={name}"] for name in ALGORITHMS} | {"grpo with every term": ["algorithm=grpo", *TERMS]}
    made = {}
    for name, overrides in named.items():
        objective, aggregation = configured(*overrides)
        made[name] = (off_policy(block, groups, now, objective), groups, objective, aggregation)
    (alone,) = run_ranks(ONE, traces, folder, ONE, made, Packing(10_000, share_prompts=False))
    return folder, made, alone


@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_every_objective_is_the_same_under(run_ranks, steps, dims):
    folder, made, alone = steps
    ranks = run_ranks(dims, traces, folder, dims, made, Packing(60), timeout_s=240)
    for name, reference in alone.items():
        found = compare_traces(reference, StepTrace.merge([rank[name] for rank in ranks]))
        assert not [line for line in found if not line.within], name


def test_objectives_differ_from_each_other(steps):
    """Each says something of its own; a config that lost its loss on the way would not."""
    _, _, alone = steps
    assert all(np.isfinite(trace.loss) and trace.grad_norm > 0 for trace in alone.values())
    assert alone["grpo"].loss != alone["grpo with every term"].loss
