"""A run whose models share their devices gives the same numbers and weights as a run in which each model has its own."""

import pytest
from safetensors.numpy import load_file

OPTIONS = ["algorithm=ppo", "trainer.max_steps=3", "checkpoint.every=2", "parallel.dp=2"]
TIMING = {"time", "spent", "throughput", "placement", "mismatch"}


@pytest.fixture(scope="module")
def run_placed(start_mrl, quickstart):
    """`run_placed(placement)`: the finished run under a placement; each placement runs once."""
    finished = {}

    def run(placement: str):
        if placement not in finished:
            finished[placement] = start_mrl("train", *quickstart, *OPTIONS, f"placement={placement}").finish(400)
            assert finished[placement].process.returncode == 0, finished[placement].output()
        return finished[placement]

    return run


def learning_metrics(run) -> list[dict]:
    """The metrics that depend neither on time nor on the placement."""
    kept = [{n: value for n, value in step.items() if n.split("/")[0] not in TIMING} for step in run.metrics()]
    assert all("loss/policy" in step and "critic/loss" in step for step in kept)
    return kept


@pytest.mark.extended_except("colocated")
@pytest.mark.parametrize("placement", ["mixed", "colocated"])
def test_a_shared_placement_gives_the_same_metrics_and_weights(run_placed, placement):
    apart, shared = run_placed("disaggregated"), run_placed(placement)
    assert learning_metrics(shared) == learning_metrics(apart)
    assert (shared.folder / "eval.jsonl").read_text() == (apart.folder / "eval.jsonl").read_text()
    found, expected = (load_file(run.folder / "hf/model.safetensors") for run in (shared, apart))
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


@pytest.mark.extended_except("colocated-4")
@pytest.mark.parametrize(("placement", "least"), [("mixed", 2), ("colocated", 4)])
def test_a_shared_placement_counts_its_switches(run_placed, placement, least):
    run = run_placed(placement)
    for step in run.metrics():
        assert step["placement/switches"] >= least and step["placement/switch_s"] > 0
        assert step["placement/residual_bytes"] == 0
    assert run.leftovers() == []


def test_a_disaggregated_run_has_no_placement_metrics(run_placed):
    assert not any(name.startswith("placement/") for step in run_placed("disaggregated").metrics() for name in step)
