"""A run whose roles share their devices by turns is, number by number, the run in which each has its own."""

import pytest
from safetensors.numpy import load_file

SHARING = '''
"""The quickstart's inputs, and all roles in one place."""

from mrl.data.arithmetic import make_inputs
from mrl.plan import Plan

Plan.shared = property(lambda plan: frozenset([frozenset(["actor", "critic", "engines"])]))
'''

OWN = ["algorithm=ppo", "trainer.max_steps=3", "checkpoint.every=2", "parallel.dp=2"]


@pytest.fixture(scope="module")
def runs(start_mrl, quickstart, tmp_path_factory):
    """(each role on its own devices, all on the same)."""
    folder = tmp_path_factory.mktemp("sharing")
    (folder / "sharing.py").write_text(SHARING)
    apart = start_mrl("train", *quickstart, *OWN).finish(400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        together = start_mrl("train", *quickstart, *OWN, "data.inputs._target_=sharing.make_inputs").finish(400)
    for run in (apart, together):
        assert run.process.returncode == 0, run.output()
    return apart, together


def numbers(run) -> list[dict]:
    """What does not depend on time or on who shares."""
    kept = [{n: value for n, value in step.items() if n.split("/")[0] not in TIMES} for step in run.metrics()]
    assert all("loss/policy" in step and "critic/loss" in step for step in kept)
    return kept


TIMES = {"time", "spent", "throughput", "placement"}


def test_every_number_and_every_weight_is_the_same(runs):
    apart, together = runs
    assert numbers(together) == numbers(apart)
    assert (together.folder / "eval.jsonl").read_text() == (apart.folder / "eval.jsonl").read_text()
    found, expected = (load_file(run.folder / "hf/model.safetensors") for run in (together, apart))
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


def test_turns_are_taken_and_counted(runs):
    apart, together = runs
    for step in together.metrics():
        assert step["placement/switches"] >= 4 and step["placement/switch_s"] > 0
        assert step["placement/residual_bytes"] == 0
    assert not any(name.startswith("placement/") for step in apart.metrics() for name in step)
    assert together.leftovers() == []
