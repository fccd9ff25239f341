"""A run with actor, critic and engines learns in every placement and every rollout mode. Run the tests with `-m learning`.

The metrics of synchronous runs are bit-equal in all placements, except times and the mismatch of log-probabilities between
trainer and engines. The tests write a table to outputs/learning.
"""

import json

import numpy as np
import pytest
from test_every_algorithm_learns import OUTPUT

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1200)]

MODES = {
    "sync": (["rollout.mode=sync"], 0),
    "one_step_off": (["rollout.mode=one_step_off"], 1),
    "async": (["rollout.mode=async", "rollout.max_staleness=2"], 2),
}
PLACEMENTS = ("disaggregated", "mixed", "colocated")
MODELS = {"dense": [], "experts": ["model=quickstart_moe", "sft.steps=45"]}
GOAL, MAX_STEPS = 0.6, 100  # mean reward; about 0.1 after the warm start
NOT_LEARNING = ("time/", "component_time/", "throughput/", "weight_sync/", "placement/", "rollout/cached", "mismatch/")


@pytest.fixture(scope="module")
def runs():
    """(model, mode, placement) -> metrics of each step. After all runs, the fixture writes the table."""
    metrics: dict[tuple[str, str, str], list[dict]] = {}
    yield metrics
    OUTPUT.mkdir(parents=True, exist_ok=True)
    lines = [
        "| model | mode | placement | first 3 | last 5 | steps | s per step | token age | switch s |",
        "|---" * 9 + "|",
    ]
    (OUTPUT / "placements.md").write_text(
        "\n".join([*lines, *(row(*key, steps) for key, steps in metrics.items())]) + "\n"
    )


def row(model: str, mode: str, placement: str, steps: list[dict]) -> str:
    def mean(name: str, part: list[dict]) -> float:
        return float(np.mean([step.get(name, 0.0) for step in part]))

    numbers = [mean("reward/mean", steps[:3]), mean("reward/mean", steps[-5:]), len(steps)]
    costs = [mean(name, steps) for name in ("time/step_s", "rollout/token_staleness_mean", "placement/switch_s")]
    return f"| {model} | {mode} | {placement} | {' | '.join(f'{number:.4g}' for number in [*numbers, *costs])} |"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_every_placement_and_mode_raises_the_reward(start_mrl, inputs, runs, model, mode, placement):
    folder, (overrides, staleness) = inputs.parent / f"inputs_{model}", MODES[mode]
    short = [
        f"trainer.stop_reward={GOAL}",
        f"trainer.max_steps={MAX_STEPS}",
        "trainer.save=false",
        "trainer.eval_rows=16",
    ]
    task = [
        "experiment=quickstart",
        *MODELS[model],
        "algorithm=ppo",
        "optim.lr=3e-4",
        f"data.inputs.folder={folder}",
    ]
    run = start_mrl("train", *task, *overrides, f"placement={placement}", *short, "tracking.backends=[]").finish(1100)
    assert run.process.returncode == 0, run.output()
    runs[model, mode, placement] = steps = run.metrics()
    first, last = (np.mean([step["reward/mean"] for step in part]) for part in (steps[:3], steps[-5:]))
    assert first < 0.25 and last >= GOAL, f"{first:.3f} -> {last:.3f} in {len(steps)} steps"
    assert max(step["rollout/staleness_max"] for step in steps) <= staleness
    trained = [json.loads(line)["requests"] for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    assert len({request for step in trained for request in step}) == 64 * len(steps), "each group is trained once"
    assert ("placement/switch_s" in steps[0]) == (placement != "disaggregated")
    assert run.leftovers() == []
    if mode == "sync" and (disaggregated := runs.get((model, mode, PLACEMENTS[0]))):
        assert [learning_metrics(step) for step in steps] == [learning_metrics(step) for step in disaggregated]


def learning_metrics(step: dict) -> dict:
    return {name: value for name, value in step.items() if not name.startswith(NOT_LEARNING)}
