"""A run whose models share devices gives the same numbers and weights as a run whose models have devices of their own."""

import pytest
from run_comparison import check_equal_weights

PPO = ["algorithm=ppo", "trainer.max_steps=3", "checkpoint.every=2", "parallel.dp=2"]
TIMING = {"time", "component_time", "throughput", "placement", "mismatch"}


@pytest.fixture(scope="module")
def run_placed(start_mrl, quickstart):
    """`run_placed(placement)`: the finished run under a placement; each placement runs once."""
    finished = {}

    def run(placement: str):
        if placement not in finished:
            finished[placement] = start_mrl("train", *quickstart, *PPO, f"placement={placement}").finish(400)
            assert finished[placement].process.returncode == 0, finished[placement].output()
            assert all("critic/loss" in step for step in finished[placement].metrics())
        return finished[placement]

    return run


def learning_metrics(run) -> list[dict]:
    """Return the metrics that depend neither on time nor on the placement."""
    kept = [{n: value for n, value in step.items() if n.split("/")[0] not in TIMING} for step in run.metrics()]
    assert kept and all("loss/policy" in step for step in kept)
    return kept


def check_same_training(shared, apart) -> None:
    """Check that both runs have the same metrics and, bit for bit, the same weights."""
    assert learning_metrics(shared) == learning_metrics(apart)
    assert (shared.folder / "eval.jsonl").read_text() == (apart.folder / "eval.jsonl").read_text()
    check_equal_weights(shared.folder, apart.folder)


def check_switches(run, least: int) -> None:
    """Check that each step has at least `least` switches, and that an offloaded model leaves no memory on its device."""
    for step in run.metrics():
        assert step["placement/switches"] >= least and step["placement/switch_s"] > 0
        assert step["placement/residual_bytes"] == 0
    assert run.leftovers() == []


@pytest.mark.extended
def test_a_colocated_run_gives_the_same_metrics_and_weights(start_mrl, quickstart, recorded):
    """The checkpoints of the colocated run are completed while the actor is offloaded and its process groups are suspended."""
    options = ["trainer.max_steps=5", "placement=colocated", "checkpoint.every=1"]
    run = start_mrl("train", *quickstart, *options).finish(400)
    assert run.process.returncode == 0, run.output()
    assert {path.name for path in (run.folder / "checkpoints").glob("step_*")} == {"step_000004", "step_000005"}
    check_same_training(run, recorded)
    check_switches(run, 2)


@pytest.mark.extended
@pytest.mark.parametrize(("placement", "least"), [("mixed", 2), ("colocated", 4)])
def test_a_shared_placement_with_a_critic_gives_the_same_metrics_and_weights(run_placed, placement, least):
    check_same_training(run_placed(placement), run_placed("disaggregated"))
    check_switches(run_placed(placement), least)


@pytest.mark.extended
def test_a_disaggregated_run_has_no_placement_metrics(run_placed):
    assert not any(name.startswith("placement/") for step in run_placed("disaggregated").metrics() for name in step)
