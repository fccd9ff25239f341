"""`mrl plan rollout`: the shapes it compares, what they say, and what it refuses."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from recorded_runs import SPEEDS, STEPS, N, lengths_of, recorded

from mrl.commands import plan
from mrl.commands.plan_rollout import Keys, case_of
from mrl.planner.rollout_simulator import Gpus, Setup, Speeds, what_if


def run(capsys, *words):
    assert plan.main(["rollout", *words]) == 0
    return capsys.readouterr().out


def test_only_one_thing_changes_in_each_row_and_gpus_are_as_many():
    base, gpus = Setup(N, 3, 0, in_order=True), Gpus(engine=2, trainer=6)
    rows = what_if(lengths_of(0), SPEEDS, base, gpus, 4)
    names = [row.name for row in rows]
    assert names[0] == "as it is" and rows[0].setup == base and len(set(names)) == len(names)
    for row in rows[1:]:
        shape = row.setup
        changed = {name for name, value in vars(shape).items() if value != vars(base)[name]} - {"in_order"}
        assert changed in (
            {"staleness"},
            {"extra"},
            {"num_engines", "train_scale"},
            {"num_engines", "train_scale", "colocated"},
        )
        trainers = 6 / shape.train_scale
        assert (trainers if shape.colocated else shape.num_engines * 2 + trainers) == pytest.approx(12)
        assert not shape.extra or not shape.in_order


def test_a_shape_that_trains_faster_says_so():
    """Engines that are always waited for: with staleness their time is hidden, and what is left is training and pushes."""
    slow = Speeds(SPEEDS.engine, 50.0, 0.0, 1.0)
    rows = {row.name: row for row in what_if(lengths_of(1), slow, Setup(N, 1, 0, in_order=True), Gpus(1, 1), 24)}
    assert rows["staleness 4"].seconds == pytest.approx(51.0) and rows["staleness 4"].of_best > 0.99
    assert rows["as it is"].seconds > 51.5 and max(row.of_best for row in rows.values()) <= 1


def test_a_recorded_run_is_fitted_compared_and_drawn(tmp_path, capsys):
    found = recorded(tmp_path / "run", lengths_of(2), Setup(N, 2, 0, in_order=True))
    out = run(capsys, f"run_dir={tmp_path / 'run'}", f"steps={STEPS}", f"picture={tmp_path / 'p.png'}")
    assert "20 ms a decoding step + 0.3 ms a running request (8 at most), 0.1 ms a prefilled token" in out
    assert "fitted; errors 0.0%" in out
    first = next(line for line in out.splitlines() if "as it is" in line)
    assert f"{found.seconds(STEPS // 2):.4g}" in first and (tmp_path / "p.png").stat().st_size > 10_000


def test_what_is_given_counts_more_than_what_was_recorded(tmp_path):
    recorded(tmp_path, lengths_of(3), Setup(N, 2, 0, in_order=True))
    plain = case_of(Keys.of([f"run_dir={tmp_path}"]))
    case = case_of(
        Keys.of([f"run_dir={tmp_path}", "step_ms=7", "num_engines=5", "trainer_gpus=12", "staleness=3", "push_s=9"])
    )
    assert case.speeds.engine.step_s == 0.007 and case.speeds.engine.request_s == plain.speeds.engine.request_s
    assert case.speeds == replace(plain.speeds, engine=case.speeds.engine, push_s=9.0)
    assert case.setup == Setup(N, 5, 3, train_scale=0.5) and case.gpus == Gpus(2, 12)


def test_an_asynchronous_run_needs_the_speeds_of_its_engines(tmp_path):
    recorded(tmp_path, lengths_of(4), Setup(N, 2, 2), mode="async")
    with pytest.raises(ValueError, match=r"rollout\.mode=sync"):
        case_of(Keys.of([f"run_dir={tmp_path}"]))
    case = case_of(Keys.of([f"run_dir={tmp_path}", "step_ms=20", "request_ms=0.3", "prefill_ms=0.1"]))
    assert case.fit is None and case.speeds.engine == SPEEDS.engine


@pytest.mark.parametrize("pools", [{"all": ["actor", "engines"]}, {"all": {"roles": ["engines", "critic", "actor"]}}])
def test_a_run_whose_engines_have_the_trainers_gpus_is_compared_with_shares_of_as_many(tmp_path, pools):
    shape = Setup(N, 3, 0, in_order=True, colocated=True)
    recorded(tmp_path, lengths_of(6), shape, pools=pools)
    case = case_of(Keys.of([f"run_dir={tmp_path}"]))
    assert case.setup == shape and case.gpus == Gpus(2, 6)
    rows = what_if(case.groups, case.speeds, case.setup, case.gpus, 4)
    assert not any(row.setup.staleness for row in rows)
    splits = [row.setup for row in rows if not row.setup.colocated]
    assert [shape.num_engines for shape in splits] == [1, 2]
    assert all(shape.num_engines * 2 + 6 / shape.train_scale == pytest.approx(6) for shape in splits)


def test_log_normal_lengths_are_as_they_are_said_to_be():
    groups = case_of(Keys.of(["median=100", "sigma=0.5", "longest=150", "responses_per_prompt=4"])).groups
    assert groups.responses.shape[1] == 4 and groups.responses.max() == 150
    assert np.median(groups.responses) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected one of run_dir=FOLDER, lengths=FILE.jsonl and median=TOKENS"),
        (["median=3", "lengths=x"], "expected one of run_dir"),
        (["medina=3"], "did you mean median"),
        (["median"], "expected KEY=VALUE"),
        (["median=x"], "median=x: expected a number"),
        (["median=3", "num_engines=0"], "num_engines=0: expected 1 or more"),
        (["median=3", "steps=2.5"], "expected a whole number"),
        (["median=3", "push_s=-1"], "push_s=-1: expected 0 or more"),
        (["median=3", "colocated=yes"], "expected true or false"),
        (["lengths=/no/such/file"], "expected a jsonl file"),
    ],
)
def test_mistakes_are_refused_in_words(words, message):
    with pytest.raises(ValueError, match=message):
        case_of(Keys.of(words))


def test_the_command_ends_with_the_message_and_starts_nothing(capsys):
    with pytest.raises(SystemExit) as ended:
        plan.main(["rollout", "medina=3"])
    assert ended.value.code == 2 and "did you mean median?" in capsys.readouterr().err
    assert plan.main(["rollout"]) == 2 and plan.main(["rollout", "--help"]) == 0
    code = "import sys, mrl.planner.rollout_simulator; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
