"""No tokens pass through the driver. The tests count its traffic during a step with short and a step with long responses."""

from dataclasses import replace

import numpy as np
import psutil
import pytest
import ray
from hydra import compose, initialize_config_dir

from benchmarks.controller import SimulatedGroup, SimulatedRanks, layout
from benchmarks.driver_traffic import Traffic
from mrl.config import hydra_entry
from mrl.config.process_schema import ClusterConfig
from mrl.config.validate import from_hydra
from mrl.controller import build
from mrl.controller.plan_train import plan_training
from mrl.core.run_errors import PreemptionHandler
from mrl.core.sample_file import read_samples
from mrl.core.types import TokenBlock, TrainBatch
from mrl.placement.ray_cluster import ray_cluster
from mrl.rollout import rollout_log
from mrl.tracking.timeline import read_timeline
from mrl.workers.dp_partition import Packing
from mrl.workers.worker import TrainWorker

pytestmark = pytest.mark.extended

NUM_PROMPTS, GROUP = 5, 3
LENGTHS = (16, 512)  # tokens of a response


def write_step(folder, step: int, response_length: int) -> TokenBlock:
    """Write recorded rollouts of random tokens. Row lengths differ, so that S, R and B differ too."""
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
        "tracking.backends=[]",
        "tracking.timeline=true",  # neither spans nor samples pass through the driver
        "algorithm.mini_batches=2",  # needs old log-probabilities; the next two lines need those of the reference
        "++algorithm.kl_in_loss.coef=0.01",
        "++algorithm.kl_in_reward.coef=0.01",
    ]
    hydra_entry.register_schema()
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        config = from_hydra(compose("config", [*quickstart, *more]))
    with build.trainer(plan_training(config), PreemptionHandler()) as built:
        yield built, blocks


def test_no_token_passes_through_the_driver(trainer, tmp_path):
    built, blocks = trainer
    counts = []
    for step, block in enumerate(blocks):
        with Traffic(keeps_objects=True) as traffic:
            built.begin_step(step + 1)
            metrics = built.step(step).values
        assert metrics["rollout/tokens"] == block.response_lengths.sum()
        assert len(built.scorers) == 2 and np.isfinite(metrics["policy/kl_ref"]), "old and reference log-probabilities"
        token_columns = {len(block.tokens), len(block.rollout_logprobs)}  # S, R
        assert traffic.arrays(), "the traffic of the control plane is counted"
        token_bytes = sum(array.nbytes for array in traffic.arrays() if len(array) in token_columns)
        assert token_bytes == 0
        assert not any(isinstance(value, TokenBlock) for value in traffic.objects)
        counts.append(traffic)
    short, long = counts
    assert len(blocks[1].tokens) > 20 * len(blocks[0].tokens)
    assert abs(long.bytes - short.bytes) < 200, "bytes through the driver do not grow with the responses"
    assert long.calls == short.calls
    assert [step for step, _ in read_samples(tmp_path / "run")] == [1, 2]
    assert {"driver", "rollout worker", "actor rank 0"} <= {each.process for each in read_timeline(tmp_path / "run")}


@pytest.fixture
def cluster():
    with ray_cluster(ClusterConfig()):
        yield


def test_a_cluster_on_one_machine_has_no_autoscaler_and_no_log_monitor(cluster):
    programs = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert any("raylet" in program for program in programs)
    assert [program for program in programs if "monitor.py" in program] == []


def traffic_of(group: SimulatedGroup, prompts: int, tokens: int) -> Traffic:
    """Count the driver's traffic for log-probabilities and an optimizer step on `prompts` groups. The ranks compute nothing."""
    packing = Packing(max_tokens=4 * GROUP * tokens)
    responses = [[7] * tokens] * prompts * GROUP
    batch = TrainBatch.of(TokenBlock.from_lists([[5]] * len(responses), responses), np.arange(len(responses)) // GROUP)
    batch = replace(batch, block=ray.put(batch.block))
    with Traffic() as traffic:
        group.begin_columns(TrainWorker.compute_columns, batch, packing, temperature=1.0, names=["logprobs"]).result()
        group.update([batch], packing, lrs=[0.1])
    return traffic


def test_calls_grow_only_with_ranks_and_bytes_grow_with_ranks_plus_samples(cluster, tmp_path):
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
        assert abs(long.bytes - short.bytes) < 200, "bytes do not grow with the length of responses"
    bytes_per_rank = 2048  # limit for the two calls to a rank. Columns [B] of `many` would be 49152 bytes in each call
    for prompts in (few, many):
        assert found[128, prompts, 16].bytes - found[16, prompts, 16].bytes < 112 * bytes_per_rank
    bytes_per_sample = 80  # limit for the two calls together
    more_samples = (many - few) * GROUP
    for ranks in (16, 128):
        assert found[ranks, many, 16].bytes - found[ranks, few, 16].bytes < more_samples * bytes_per_sample
