"""A colocated run on two nodes with two GPUs each. The GPUs are simulated, so GPU kernels do not run (tests/gpu_stand_in.py).

The run uses Transformer Engine's modules and optimizer. Actor and engines share every GPU. Each engine rank gets its weights from
the trainer rank on the same GPU, and cannot open memory of another GPU. Checkpoints are written while the actor is offloaded.
"""

import json
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from gpu_stand_in import HOST, python_path
from mrl_runs import wait_until
from run_comparison import reproducible_metrics
from te_process import missing_python

pytestmark = [pytest.mark.extended, pytest.mark.skipif(bool(missing_python()), reason=missing_python())]
LAYOUT = ["placement=colocated", "parallel.tp=2", "parallel.dp=2", "rollout.num_engines=2", "rollout.engine_tp=2"]
LAYOUT += ["weight_sync.bucket_bytes=65536", "++algorithm.kl_in_loss.coef=0.01"]

KILLING_FILTER = '''
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
from mrl_runs import select_processes, signal_all
from test_simulated_gpus import engines_of

GROUP_OF_THE_KILL = 26  # the second group of step 5
groups = []


@dataclass(frozen=True)
class Killing:
    """Accepts all groups. In step 5 it records the metrics and the engines so far, and kills the driver of the run, once."""

    run: str

    def __call__(self, rewards):
        groups.append(1)
        seen = Path(self.run) / "seen.json"
        if len(groups) == GROUP_OF_THE_KILL and not seen.exists():
            shutil.copy(Path(self.run) / "metrics.jsonl", Path(self.run) / "killed.jsonl")
            seen.write_text(json.dumps(engines_of(Path(self.run))))
            driver = {"mrl.commands.train_process", f"run.dir={self.run}"}
            signal_all(select_processes(psutil.process_iter(), lambda process: driver <= set(process.cmdline())))
        return True
'''


def engines_of(folder: Path) -> list[list[str]]:
    """Return [host, visible GPUs, name] of each engine of a run."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if "mrl.rollout.engines.launch_sglang" in process.cmdline() and str(folder) in environment.get(
                "MRL_PROCESS_REGISTRY", ""
            ):
                found.add((environment[HOST], environment["CUDA_VISIBLE_DEVICES"], environment["MRL_PROCESS_NAME"]))
    return sorted(map(list, found))


def learned(path: Path) -> list[dict]:
    """Return, for each step, the metrics that depend neither on time nor on faults nor on the placement."""
    lines = reproducible_metrics(path)
    return [{name: value for name, value in line.items() if not name.startswith("placement/")} for line in lines]


@pytest.fixture
def cluster():
    """A Ray cluster with a head without GPUs, and two nodes with two simulated GPUs each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, num_gpus=0, include_dashboard=False))
    for host in ("a", "b"):
        made.add_node(num_cpus=2, num_gpus=2, env_vars={HOST: host})
    yield made
    made.shutdown()


def test_a_killed_colocated_run_on_two_nodes_of_gpus_continues_bit_exactly(
    start_mrl, quickstart, cluster, tmp_path, monkeypatch
):
    """The driver is killed in step 5. Steps 3 and 4 are repeated from the checkpoint of step 2, with the same numbers."""
    (tmp_path / "killing_filter.py").write_text(KILLING_FILTER)
    monkeypatch.setenv("PYTHONPATH", python_path(str(tmp_path), str(Path(__file__).parent)))
    (folder := tmp_path / "run").mkdir()
    kill = ["rollout.filter._target_=killing_filter.Killing", f"++rollout.filter.run={folder}"]
    steps = [f"cluster.address={cluster.address}", "trainer.max_steps=5", "checkpoint.every=2"]
    run = start_mrl("train", *quickstart, *LAYOUT, *kill, *steps, folder=folder).finish(600)
    assert run.process.returncode == 0 and "restart 1 of 5" in run.output(), run.output()
    assert "step 2 restored" in run.output()

    log = (folder / "logs" / "trainer_0.log").read_text()
    assert log.count("CUDA: Transformer Engine layers, Transformer Engine's fused Adam") == 2, (
        "before and after the kill"
    )
    assert log.count("weight sync by cuda_ipc") >= 2
    servers = [["a", "0,1"], ["b", "0,1"]]
    assert sorted(server[:2] for server in json.loads((folder / "seen.json").read_text())) == servers
    found, before = (learned(folder / name) for name in ("metrics.jsonl", "killed.jsonl"))
    assert [line["step"] for line in before] == [1, 2, 3, 4] and [line["step"] for line in found] == [1, 2, 3, 4, 5]
    assert found[:4] == before, "steps 3 and 4 were trained twice"
    assert all(line["optim/grad_norm"] > 0 for line in found)
    for line in run.metrics():
        assert line["placement/switches"] >= 2 and line["placement/residual_bytes"] == 0
        assert line["weight_sync/senders"] == 4 and line["weight_sync/attempts"] == 1
    wait_until(lambda: not engines_of(folder), 60)
    assert run.leftovers() == []
