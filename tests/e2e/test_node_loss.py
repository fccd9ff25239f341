"""A cluster loses a node that a run uses: the ranks of the lost node are started on another node, and the run continues."""

import psutil
import pytest
from mrl_runs import select_processes, wait_until

pytestmark = pytest.mark.extended


@pytest.fixture
def cluster():
    """A head without GPUs and three nodes with one GPU each: one for the trainer rank, one for the engine, and a spare node."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, num_gpus=0, include_dashboard=False))
    yield made, [made.add_node(num_cpus=1, num_gpus=1) for _ in range(3)]
    made.shutdown()


def test_ranks_of_a_lost_node_are_started_on_another(start_mrl, quickstart, cluster):
    made, nodes = cluster
    run = start_mrl(
        "train", *quickstart, f"cluster.address={made.address}", "trainer.max_steps=40", "checkpoint.every=5"
    )
    wait_until(
        lambda: run.process.poll() is not None or ((run.folder / "metrics.jsonl").exists() and len(run.metrics()) > 6),
        timeout_s=300,
    )
    assert run.process.poll() is None, run.output()
    node_of_raylet = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
    # A rank is a child of a raylet. The process that writes a checkpoint has the title of the rank that forked it.
    (rank,) = select_processes(
        psutil.Process().children(recursive=True),
        lambda process: process.ppid() in node_of_raylet and " ".join(process.cmdline()).startswith("ray::TrainWorker"),
    )
    lost = node_of_raylet[rank.ppid()]
    made.remove_node(lost, allow_graceful=False)
    assert run.finish(300).process.returncode == 0, run.output()
    assert [line["step"] for line in run.metrics()] == list(range(1, 41))
    assert "restart 1 of at most 5" in run.output()
