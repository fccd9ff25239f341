"""Every algorithm in conf/algorithm raises the quickstart's reward. Run the tests with `-m learning`; each takes minutes.

The tests write the reward curves and a table to outputs/learning. docs/concepts/algorithms.md shows an example.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from mrl.config import hydra_entry

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1200)]

OUTPUT = hydra_entry.CONF.parent / "outputs/learning"
ALGORITHMS = sorted(path.stem for path in (hydra_entry.CONF / "algorithm").glob("*.yaml"))
LAYOUTS = {"ppo": ["parallel.tp=2"], "gspo": ["parallel.pp=2"], "cispo": ["parallel.cp=2"]}
GOAL, MAX_STEPS, SEED = 0.6, 80, 0  # mean reward; about 0.06 after the warm start


@pytest.fixture(scope="module")
def teacher(start_mrl, inputs, warm) -> Path:
    """A model that was trained to a mean reward of 0.9."""
    run = start_mrl(
        "train", *common_overrides(inputs, warm), "trainer.stop_reward=0.9", "trainer.max_steps=150"
    ).finish(600)
    assert run.process.returncode == 0, run.output()
    return run.folder / "hf"


@pytest.fixture(scope="module")
def curves():
    """Algorithm -> metrics of each step of its run. After all runs, the fixture writes the table and the curves."""
    metrics: dict[str, list[dict]] = {}
    yield metrics
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "table.md").write_text(table(metrics))
    draw_curves(metrics, OUTPUT / "curves.png")


def common_overrides(inputs: Path, warm: Path) -> list[str]:
    return [
        *["experiment=quickstart", f"data.inputs.folder={inputs}", "sft.train=null", f"model.path={warm}"],
        *[f"run.seed={SEED}", "trainer.eval_rows=128"],
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_raises_the_reward(start_mrl, inputs, warm, request, curves, algorithm):
    own = LAYOUTS.get(algorithm, [])
    if algorithm.startswith("distill"):
        own = [f"roles.teacher.path={request.getfixturevalue('teacher')}"]
    goal = [f"trainer.stop_reward={GOAL}", f"trainer.max_steps={MAX_STEPS}", "trainer.save=false"]
    run = start_mrl("train", *common_overrides(inputs, warm), f"algorithm={algorithm}", *own, *goal).finish(1000)
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    curves[algorithm] = steps
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / f"{algorithm}.json").write_text(json.dumps([step["reward/mean"] for step in steps]))
    first, last = (np.mean([step["reward/mean"] for step in part]) for part in (steps[:3], steps[-5:]))
    assert first < 0.2 and last >= GOAL, f"{algorithm}: {first:.3f} -> {last:.3f} in {len(steps)} steps"
    gaps = [step["mismatch/logprob_abs_max"] for step in steps if "mismatch/logprob_abs_max" in step]
    assert max(gaps) <= 1e-4, "engines have the trained weights"


def table(curves: dict[str, list[dict]]) -> str:
    """Return a Markdown table: mean rewards of the first 3 steps, around steps 20 and 40, and of the last 5; times."""
    lines = [
        "| algorithm | layout | first 3 | step 20 | step 40 | last 5 | steps | s per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, steps in sorted(curves.items()):
        rewards = [step["reward/mean"] for step in steps]

        def around(step: int, rewards: list[float] = rewards) -> str:
            return f"{np.mean(rewards[step - 3 : step + 2]):.2f}" if len(rewards) >= step + 2 else ""

        seconds = np.median([step["time/step_s"] for step in steps])
        layout = " ".join(LAYOUTS.get(name, ["one process"])).replace("parallel.", "")
        ends = f"{np.mean(rewards[:3]):.2f} | {around(20)} | {around(40)} | {np.mean(rewards[-5:]):.2f}"
        lines.append(f"| {name} | {layout} | {ends} | {len(rewards)} | {seconds:.2f} |")
    return "\n".join([*lines, f"\nSeed {SEED}; runs end at a mean reward of {GOAL} over five steps.", ""])


def draw_curves(curves: dict[str, list[dict]], path: Path) -> None:
    """Draw the reward curves of all algorithms in one figure."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for name, steps in sorted(curves.items()):
        axes.plot(range(1, len(steps) + 1), [step["reward/mean"] for step in steps], label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="quickstart, every algorithm")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)
