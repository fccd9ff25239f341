"""The driver moves no tokens: what it sends and receives is counted while one step of short and one of long responses run."""

from dataclasses import replace

import numpy as np
import pytest
import ray
from hydra import compose, initialize_config_dir

from benchmarks.controller import SimulatedGroup, SimulatedRanks, layout
from benchmarks.driver_traffic import Traffic
from mrl.config import hydra_entry
from mrl.config.validate import from_hydra
from mrl.controller import build
from mrl.controller.plan_train import plan_training
from mrl.core.run_errors import PreemptionHandler
from mrl.core.types import TokenBlock, TrainBatch
from mrl.placement.ray_cluster import ray_cluster
from mrl.rollout import rollout_log
from mrl.workers.dp_partition import Packing

pytestmark = pytest.mark.extended

NUM_PROMPTS, GROUP = 5, 3
LENGTHS = (16, 512)  # tokens of a response


def write_step(folder, step: int, response_length: int) -> TokenBlock:
    """Recorded rollouts of random tokens; lengths differ from row to row, so that S, R and B are all different."""
    rng = np.random.default_rng(step)
    rows = np.repeat(np.arange(NUM_PROMPTS), GROUP)
    prompts = [prompt for _ in range(NUM_PROMPTS) for prompt in [rng.integers(4, 14, 7).tolist()] * GROUP]
    responses = [rng.integers(4, 14, response_length + i % 3).tolist() for i in range(len(rows))]
    block = TokenBlock.from_lists(prompts, responses, [[-1.0] * len(r) for r in responses])
    columns = dict(truncated=np.zeros(len(rows), bool), weight_versions=np.zeros(len(rows), np.int64))
    rollout_log.write_recording(
        folder, step, block, rows=rows, groups=np.repeat(np.arange(NUM_PROMPTS), GROUP), **columns
    )
    return block


@pytest.fixture
def trainer(quickstart, tmp_path):
    blocks = [write_step(tmp_path / "rollouts", step, length) for step, length in enumerate(LENGTHS)]
    more = [
        f"run.dir={tmp_path / 'run'}",
        f"rollout.replay={tmp_path / 'rollouts'}",
        f"rollout.prompts_per_step={NUM_PROMPTS}",
        f"rollout.responses_per_prompt={GROUP}",
        "trainer.max_steps=2",
        "tracking.wandb=false",
        "algorithm.mini_batches=2",  # with the columns of old and reference log-probabilities
        "++algorithm.kl_in_loss.coef=0.01",
        "++algorithm.kl_in_reward.coef=0.01",
    ]
    hydra_entry.register_schema()
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        config = from_hydra(compose("config", [*quickstart, *more]))
    with build.trainer(plan_training(config), PreemptionHandler()) as built:
        yield built, blocks


def test_no_token_passes_through_the_driver(trainer):
    built, blocks = trainer
    counts = []
    for step, block in enumerate(blocks):
        with Traffic(keeps_objects=True) as traffic:
            metrics = built.step(step).values
        assert metrics["rollout/tokens"] == block.response_lengths.sum()
        assert set(built.scorers) == {"old_logprobs", "ref_logprobs"} and np.isfinite(metrics["policy/kl_ref"])
        token_columns = {len(block.tokens), len(block.rollout_logprobs)}  # S, R
        assert traffic.arrays(), "the control plane is seen"
        token_bytes = sum(array.nbytes for array in traffic.arrays() if len(array) in token_columns)
        assert token_bytes == 0
        assert not any(isinstance(value, TokenBlock) for value in traffic.objects)
        counts.append(traffic)
    short, long = counts
    assert len(blocks[1].tokens) > 20 * len(blocks[0].tokens)
    assert abs(long.bytes - short.bytes) < 200, "bytes through the driver do not grow with the responses"
    assert long.calls == short.calls


@pytest.fixture
def cluster():
    with ray_cluster(None):
        yield


def traffic_of(group: SimulatedGroup, prompts: int, tokens: int) -> Traffic:
    """What log-probabilities and an optimizer step of so many groups cost the driver, with ranks that compute nothing."""
    packing = Packing(max_tokens=4 * GROUP * tokens)
    responses = [[7] * tokens] * prompts * GROUP
    batch = TrainBatch.of(TokenBlock.from_lists([[5]] * len(responses), responses), np.arange(len(responses)) // GROUP)
    batch = replace(batch, block=ray.put(batch.block))
    with Traffic() as traffic:
        group.compute_logprobs(batch, packing, temperature=1.0)
        group.update([batch], packing, aggregation="token_mean", lrs=[0.1])
    return traffic


def test_calls_grow_with_ranks_only_and_bytes_with_ranks_and_samples_apart(cluster, tmp_path):
    few, many = 64, 1024  # prompts
    actors = {ranks: ray.remote(SimulatedRanks).options(num_cpus=0).remote(layout(ranks), []) for ranks in (16, 128)}
    groups = {ranks: SimulatedGroup(layout(ranks), str(tmp_path), actor) for ranks, actor in actors.items()}
    found = {
        (ranks, prompts, tokens): traffic_of(group, prompts, tokens)
        for ranks, group in groups.items()
        for prompts, tokens in ((few, 16), (many, 16), (many, 64))
    }
    assert {key[0]: traffic.calls for key, traffic in found.items()} == {16: 2 * 16, 128: 2 * 128}
    assert len({(key[0], traffic.calls) for key, traffic in found.items()}) == 2
    for ranks in (16, 128):
        short, long = found[ranks, many, 16], found[ranks, many, 64]
        assert abs(long.bytes - short.bytes) < 200, "nothing grows with the responses"
    a_rank = 2048  # bytes of its two calls; columns [B] of `many` would be 49152 in each
    for prompts in (few, many):
        assert found[128, prompts, 16].bytes - found[16, prompts, 16].bytes < 112 * a_rank
    a_sample = 80  # bytes, of the two calls together
    more = (many - few) * GROUP
    for ranks in (16, 128):
        assert found[ranks, many, 16].bytes - found[ranks, few, 16].bytes < more * a_sample
