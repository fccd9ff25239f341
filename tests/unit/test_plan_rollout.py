"""`mrl plan rollout`: the scenarios that it compares, its output, and its errors."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from recorded_runs import SPEEDS, STEPS, N, lengths_of, recorded

from mrl.commands import plan
from mrl.commands.plan_rollout import RolloutPlanKeys, simulation_input
from mrl.planner.rollout_simulator import GpuCounts, RolloutSetup, RunSpeeds, compare_scenarios
from mrl.rollout.staleness_buffer import num_extra_groups


def run(capsys, *words):
    assert plan.main(["rollout", *words]) == 0
    return capsys.readouterr().out


def test_each_scenario_changes_one_thing_on_the_same_number_of_gpus():
    base, gpus = RolloutSetup(N, 3, 0, in_order=True), GpuCounts(per_engine=2, trainers=6)
    scenarios = compare_scenarios(lengths_of(0), SPEEDS, base, gpus, 4)
    names = [scenario.name for scenario in scenarios]
    assert names[0] == "as it is" and scenarios[0].setup == base and len(set(names)) == len(names)
    assert "1 engine, 10 GPUs to train" in names
    for scenario in scenarios[1:]:
        setup = scenario.setup
        changed = {name for name, value in vars(setup).items() if value != vars(base)[name]} - {"in_order"}
        assert changed in (
            {"staleness"},
            {"extra_groups"},
            {"num_engines", "train_scale"},
            {"num_engines", "train_scale", "colocated"},
        )
        trainers = 6 / setup.train_scale
        assert (trainers if setup.colocated else setup.num_engines * 2 + trainers) == pytest.approx(12)
        assert not setup.extra_groups or not setup.in_order


def test_staleness_hides_the_time_of_slow_engines():
    """With staleness a step takes only the time of training and of the push."""
    slow = RunSpeeds(SPEEDS.engine, 50.0, 0.0, 1.0)
    scenarios = {
        scenario.name: scenario
        for scenario in compare_scenarios(
            lengths_of(1), slow, RolloutSetup(N, 1, 0, in_order=True), GpuCounts(1, 1), 24
        )
    }
    assert (
        scenarios["staleness 4"].seconds == pytest.approx(51.0) and scenarios["staleness 4"].bound_over_predicted > 0.99
    )
    assert (
        scenarios["as it is"].seconds > 51.5
        and max(scenario.bound_over_predicted for scenario in scenarios.values()) <= 1
    )


@pytest.mark.extended
def test_a_recorded_run_is_fitted_compared_and_drawn(tmp_path, capsys):
    found = recorded(tmp_path / "run", lengths_of(2), RolloutSetup(N, 2, 0, in_order=True))
    out = run(capsys, f"run.dir={tmp_path / 'run'}", f"steps={STEPS}", f"picture={tmp_path / 'p.png'}")
    assert "20 ms + 0.3 ms for each running request (at most 8); the prefill of a token takes 0.1 ms" in out
    assert "fitted to the run; errors: 0.0%" in out
    first = next(line for line in out.splitlines() if "as it is" in line)
    assert f"{found.seconds(STEPS // 2):.4g}" in first and (tmp_path / "p.png").stat().st_size > 10_000


def test_given_values_replace_recorded_ones(tmp_path):
    recorded(tmp_path, lengths_of(3), RolloutSetup(N, 2, 0, in_order=True))
    plain = simulation_input(RolloutPlanKeys.of([f"run.dir={tmp_path}"]))
    simulated = simulation_input(
        RolloutPlanKeys.of(
            [f"run.dir={tmp_path}", "decode_step_ms=7", "num_engines=5", "trainer_gpus=12", "staleness=3", "push_s=9"]
        )
    )
    assert (
        simulated.speeds.engine.fixed_step_s == 0.007
        and simulated.speeds.engine.request_s == plain.speeds.engine.request_s
    )
    assert simulated.speeds == replace(plain.speeds, engine=simulated.speeds.engine, push_s=9.0)
    assert simulated.setup == RolloutSetup(N, 5, 3, train_scale=0.5) and simulated.gpus == GpuCounts(2, 12)


def test_an_asynchronous_run_needs_given_engine_speeds(tmp_path):
    recorded(tmp_path, lengths_of(4), RolloutSetup(N, 2, 2), mode="async")
    with pytest.raises(ValueError, match=r"rollout\.mode=sync"):
        simulation_input(RolloutPlanKeys.of([f"run.dir={tmp_path}"]))
    simulated = simulation_input(
        RolloutPlanKeys.of([f"run.dir={tmp_path}", "decode_step_ms=20", "decode_request_ms=0.3", "prefill_ms=0.1"])
    )
    assert simulated.fit is None and simulated.speeds.engine == SPEEDS.engine


@pytest.mark.parametrize("pools", [{"all": ["actor", "engines"]}, {"all": {"roles": ["engines", "critic", "actor"]}}])
def test_a_colocated_run_is_compared_with_divisions_of_the_same_gpus(tmp_path, pools):
    setup = RolloutSetup(N, 3, 0, in_order=True, colocated=True)
    recorded(tmp_path, lengths_of(6), setup, pools=pools)
    simulated = simulation_input(RolloutPlanKeys.of([f"run.dir={tmp_path}"]))
    assert simulated.setup == setup and simulated.gpus == GpuCounts(2, 6)
    scenarios = compare_scenarios(simulated.groups, simulated.speeds, simulated.setup, simulated.gpus, 4)
    assert not any(scenario.setup.staleness for scenario in scenarios)
    splits = [scenario.setup for scenario in scenarios if not scenario.setup.colocated]
    assert [setup.num_engines for setup in splits] == [1, 2]
    assert all(setup.num_engines * 2 + 6 / setup.train_scale == pytest.approx(6) for setup in splits)


def test_over_sampling_adds_as_many_groups_as_a_run():
    keys = RolloutPlanKeys.of(["median=3", "prompts_per_step=10", "over_sample_rate=0.25"])
    setup = simulation_input(keys).setup
    assert setup.extra_groups == num_extra_groups(0.25, 10) == 3
    scenarios = compare_scenarios(lengths_of(0), SPEEDS, replace(setup, extra_groups=0), GpuCounts(1, 1), 2)
    extra = {scenario.name: scenario.setup.extra_groups for scenario in scenarios if scenario.setup.extra_groups}
    assert extra == {"over-sampling 0.25": 3, "over-sampling 0.5": 5}


def test_log_normal_lengths_have_the_given_median_and_maximum():
    groups = simulation_input(
        RolloutPlanKeys.of(["median=100", "sigma=0.5", "longest=150", "responses_per_prompt=4"])
    ).groups
    assert groups.responses.shape[1] == 4 and groups.responses.max() == 150
    assert np.median(groups.responses) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "exactly one of run.dir=FOLDER, lengths=FILE.jsonl and median=TOKENS"),
        (["median=3", "lengths=x"], "exactly one of run.dir"),
        (["medina=3"], "did you mean median"),
        (["median"], "expected KEY=VALUE"),
        (["median=x"], "median=x: expected a number"),
        (["median=3", "num_engines=0"], "num_engines=0: expected 1 or more"),
        (["median=3", "steps=2.5"], "expected an integer"),
        (["median=3", "push_s=-1"], "push_s=-1: expected 0 or more"),
        (["median=3", "colocated=yes"], "expected true or false"),
        (["lengths=/no/such/file"], "expected a JSON Lines file"),
    ],
)
def test_an_invalid_argument_is_an_error(words, message):
    with pytest.raises(ValueError, match=message):
        simulation_input(RolloutPlanKeys.of(words))


@pytest.mark.extended
def test_the_command_prints_errors_and_imports_neither_ray_nor_torch(capsys):
    with pytest.raises(SystemExit) as ended:
        plan.main(["rollout", "medina=3"])
    assert ended.value.code == 2 and "did you mean median?" in capsys.readouterr().err
    assert plan.main(["rollout"]) == 2 and plan.main(["rollout", "--help"]) == 0
    code = "import sys, mrl.planner.rollout_simulator; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
