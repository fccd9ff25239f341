"""The objective of every algorithm is the same under every layout and every division into micro-batches."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from models_for_layouts import groups_of_responses, make
from numpy.typing import NDArray

from models.architecture import ModelSpec
from mrl.algorithms.inputs import AdvantageInputs
from mrl.algorithms.objective import Objective, TokenWeighting
from mrl.algorithms.parts import build_objective, build_weighting
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.config.validate import from_hydra
from mrl.core.types import ColumnPart, TokenBlock, TrainBatch, assemble_column
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.trace_comparison import StepTrace, compare_traces
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

pytestmark = pytest.mark.extended

WITH_TEACHER = {"distill_vocab", "distill_top_k"}  # test_distillation_layouts.py tests these
ALGORITHMS = sorted({path.stem for path in (hydra_entry.CONF / "algorithm").glob("*.yaml")} - WITH_TEACHER)
REJECTION = "++algorithm.correction={_target_:mrl.algorithms.corrections.Rejection,level:max,kind:k2,high:0.3}"
TERMS = ["++algorithm.kl_in_loss.kind=k3", "algorithm.entropy_coef=0.1"]
CORRECTIONS = sorted({path.stem for path in (hydra_entry.CONF / "correction").glob("*.yaml")} - {"none"})
ONE = ParallelDims()
LAYOUTS = [ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(cp=2), ParallelDims(dp=2)]
Step = tuple[TokenBlock, NDArray, Objective, TokenWeighting]  # block, groups, objective, token weights
SPREAD = 0.3  # standard deviation (nats) of the noise on log-probabilities
SMALL_SPREAD = 5e-4  # small enough that no correction rejects the response


def composed(*overrides: str) -> Config:
    """Return the config of the quickstart with these overrides."""
    hydra_entry.register_schema()
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        return from_hydra(compose("config", ["experiment=quickstart", "run.dir=unused", *overrides]))


def configured(config: Config) -> tuple[Objective, TokenWeighting]:
    """Return (objective, token weights) of a config."""
    return build_objective(config), replace(build_weighting(config), max_response_tokens=20)


def off_policy(
    block: TokenBlock, groups: NDArray, now: NDArray, objective: Objective, spread: float | NDArray = SPREAD
) -> TokenBlock:
    """Add all columns that the objective needs: the log-probabilities `now` [R] with noise.

    `spread`: standard deviation of the noise on the log-probabilities; an array has one number for each of the R tokens.
    """
    rng = np.random.default_rng(5)
    columns = {
        name: (now + rng.normal(scale=spread, size=len(now))).astype(np.float32)
        for name in ("rollout_logprobs", "old_logprobs", *sorted(objective.required_inputs))
    }
    known, advantages = dict(columns), block.columns["advantages"]
    block = replace(block, rollout_logprobs=columns.pop("rollout_logprobs"))
    inputs = AdvantageInputs(advantages.astype(np.float64), groups, block.sampled_lengths, known)
    return block.with_columns(**columns | objective.precomputed_columns(inputs, advantages, np.random.default_rng(6)))


def spec_of(path, dims: ParallelDims, share_prompts: bool = False) -> ModelSpec:
    # Adam's first step divides each gradient by its magnitude: without eps, round-off would become a full step.
    return ModelSpec(str(path), dims, "float32", OptimConfig(lr=1e-4, eps=1e-5), {}, share_prompts=share_prompts)


def logprobs(rank: int, path, block: TokenBlock) -> ColumnPart:
    """Return the log-probabilities that a single process computes."""
    from mrl.workers.actor_critic import MegatronActor

    (batch,) = partition_step(TrainBatch.of(block, None), ONE, Packing(10_000, False)).replica_batches
    actor = MegatronActor(spec_of(path, ONE))
    part = actor.column_part(actor.compute_logprobs(block, batch), batch)
    assert part is not None
    return part


def traces(rank: int, path, dims: ParallelDims, steps: dict[str, Step], packing: Packing) -> dict[str, StepTrace]:
    """Run each step on a fresh model."""
    from mrl.workers.actor_critic import MegatronActor
    from mrl.workers.parity_trace import trace_step

    results = {}
    for name, (block, groups, objective, weighting) in steps.items():
        actor = MegatronActor(spec_of(path, dims, packing.share_prompts))
        batch = partition_step(TrainBatch.of(block, groups), dims, packing, weighting).replica_batches[
            dims.coords(rank).dp
        ]
        results[name] = trace_step(actor, block, batch, objective, 1e-4, 1.0)
    return results


@pytest.fixture(scope="module")
def samples(run_ranks, tmp_path_factory) -> tuple[Path, TokenBlock, NDArray, ColumnPart]:
    """Return (model folder, responses, their groups [B], log-probabilities of the model)."""
    folder = tmp_path_factory.mktemp("dense")
    make("dense", folder)
    block, groups = groups_of_responses()
    (part,) = run_ranks(ONE, logprobs, folder, block)
    return folder, block, groups, part


@pytest.fixture(scope="module")
def steps(run_ranks, samples) -> tuple[Path, dict[str, Step], dict[str, StepTrace], dict[str, Config]]:
    """Return (model folder, one step per algorithm, results of the steps in one process with one pack, configs)."""
    folder, block, groups, part = samples
    # In the order of the pack, which is not that of the block: most ratios are far from 1, so that they reach every clip.
    now = part.values
    overrides_of = {name: [f"algorithm={name}"] for name in ALGORITHMS} | {
        "distill": ["algorithm=distill", "roles.teacher.path=unused"],
        "grpo with every term": ["algorithm=grpo", *TERMS],
        "a rejection": ["algorithm=grpo", REJECTION],
        "normalized weights": [
            "algorithm=grpo",
            "correction=decoupled_seq_is",
            "++algorithm.correction.batch_normalize=true",
        ],
        "the engine as old policy": ["algorithm=grpo", "correction=bypass_pg_is"],
    }
    configs = {name: composed(*overrides) for name, overrides in overrides_of.items()}
    steps = {}
    for name, config in configs.items():
        objective, weighting = configured(config)
        steps[name] = (off_policy(block, groups, now, objective), groups, objective, weighting)
    (references,) = run_ranks(ONE, traces, folder, ONE, steps, Packing(10_000, share_prompts=False))
    return folder, steps, references, configs


@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_every_objective_is_the_same_under_layout(run_ranks, steps, dims):
    folder, steps_by_name, references, _ = steps
    ranks = run_ranks(dims, traces, folder, dims, steps_by_name, Packing(60), timeout_s=240)
    for name, reference in references.items():
        differences = compare_traces(reference, StepTrace.merge([rank[name] for rank in ranks]))
        assert not [difference for difference in differences if not difference.within], name


def test_every_correction_takes_the_same_step_on_one_and_on_two_ranks(run_ranks, samples):
    """Every second response is near the engine's policy, so that no correction rejects all responses."""
    folder, block, groups, part = samples
    now = assemble_column([part], block.sampled_lengths)
    is_near = np.arange(len(block.lengths)) % 2 == 0
    spread = np.where(is_near, SMALL_SPREAD, SPREAD).repeat(block.sampled_lengths)
    steps, dims = {}, ParallelDims(cp=2)
    for name in ("none", *CORRECTIONS):
        objective, weighting = configured(composed("algorithm=grpo", f"correction={name}"))
        steps[name] = off_policy(block, groups, now, objective, spread), groups, objective, weighting
    (alone,) = run_ranks(ONE, traces, folder, ONE, steps, Packing(10_000, share_prompts=False))
    ranks = run_ranks(dims, traces, folder, dims, steps, Packing(60), timeout_s=240)
    for name, expected in alone.items():
        assert expected.grad_norm > 1e-3, name
        assert name == "none" or expected.loss != pytest.approx(alone["none"].loss, rel=1e-3), name
        differences = compare_traces(expected, StepTrace.merge([rank[name] for rank in ranks]))
        assert not [difference for difference in differences if not difference.within], name


EQUAL = [{"gspo", "gspo_token"}]  # equal, because all tokens of a response have the same advantage in these steps


def objective_keys(config: Config) -> list:
    """Return the values of the config keys that decide the objective."""
    names = ("loss", "aggregation", "correction", "old_logprobs", "kl_in_loss", "entropy_coef", "adaptive_entropy")
    return [vars(config.algorithm)[name] for name in names]


def test_objectives_differ_from_each_other(steps):
    """Guards against a config whose loss or aggregation is silently ignored.

    Algorithms that differ only in their advantages have the same objective, because the steps already contain the advantages.
    """
    _, _, references, configs = steps
    assert all(np.isfinite(trace.loss) and trace.grad_norm > 0 for trace in references.values())
    keys = {name: objective_keys(config) for name, config in configs.items()}
    for first, second in combinations(references, 2):
        found = [(references[name].loss, references[name].grad_norm) for name in (first, second)]
        expected = keys[first] == keys[second] or {first, second} in EQUAL
        assert np.allclose(*found, rtol=1e-5, atol=0) == expected, (first, second, found)
