"""A run whose roles share their devices by turns is, number by number, the run in which each has its own."""

import pytest
from safetensors.numpy import load_file

OWN = ["algorithm=ppo", "trainer.max_steps=3", "checkpoint.every=2", "parallel.dp=2"]


@pytest.fixture(scope="module")
def runs(start_mrl, quickstart):
    """(each role on its own devices, policy and critic on theirs, all on the same)."""
    found = []
    for placement in ("disaggregated", "mixed", "colocated"):
        found.append(start_mrl("train", *quickstart, *OWN, f"placement={placement}").finish(400))
        assert found[-1].process.returncode == 0, found[-1].output()
    return found


def numbers(run) -> list[dict]:
    """What does not depend on time or on who shares."""
    kept = [{n: value for n, value in step.items() if n.split("/")[0] not in TIMES} for step in run.metrics()]
    assert all("loss/policy" in step and "critic/loss" in step for step in kept)
    return kept


TIMES = {"time", "spent", "throughput", "placement", "mismatch"}


@pytest.mark.parametrize("place", [1, 2], ids=["mixed", "colocated"])
def test_every_number_and_every_weight_is_the_same(runs, place):
    apart, together = runs[0], runs[place]
    assert numbers(together) == numbers(apart)
    assert (together.folder / "eval.jsonl").read_text() == (apart.folder / "eval.jsonl").read_text()
    found, expected = (load_file(run.folder / "hf/model.safetensors") for run in (together, apart))
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


def test_turns_are_taken_and_counted(runs):
    apart, mixed, together = runs
    for run, least in ((mixed, 2), (together, 4)):
        for step in run.metrics():
            assert step["placement/switches"] >= least and step["placement/switch_s"] > 0
            assert step["placement/residual_bytes"] == 0
    assert not any(name.startswith("placement/") for step in apart.metrics() for name in step)
    assert together.leftovers() == []
