"""`make bench` calls a measurement worse only beyond its noise, reports a real slowdown, and ends programs at their deadline."""

import random
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from benchmarks import balance, run
from benchmarks.measurements import FLOORS, Measurement, mean_of, of_repeats, paired_ratio, read, worse, write

ROOT = Path(__file__).resolve().parents[2]
# This program reports simulated seconds with 5 percent noise, so the test does not depend on the speed of the machine.
SLOW_PROGRAM = """
import argparse, os, random, sys
sys.path.insert(0, {root!r})
from benchmarks import measurements

draw = random.Random(os.getpid())

def cpu_seconds(rounds):
    return rounds * draw.gauss(1, 0.05)

parser = argparse.ArgumentParser()
measurements.add_json_option(parser)
args = parser.parse_args()
pairs = [(cpu_seconds({rounds}), cpu_seconds(100_000)) for _ in range(25)]
measurements.write(args.json, [measurements.paired_ratio("work over base", *zip(*pairs))])
"""


def number(value: float, kind="ratio", **fields) -> Measurement:
    return Measurement("x", value, "unit", kind, **fields)


@pytest.mark.parametrize("kind", ["ratio", "cpu_s", "wall"])
def test_only_a_change_beyond_the_noise_is_worse(kind):
    inside, outside = 1 + 0.9 * FLOORS[kind], 1 + 1.1 * FLOORS[kind]
    assert not worse([number(2.0, kind)], [number(2.0 * inside, kind)])
    assert "worse by" in worse([number(2.0, kind)], [number(2.0 * outside, kind)])["x"]
    assert not worse([number(2.0, kind)], [number(2.0 / outside, kind)]), "faster is not worse"


def test_a_higher_number_may_be_better():
    before, now = number(3.0, better="higher"), number(2.0, better="higher")
    assert worse([before], [now]) and not worse([now], [before])


def test_the_larger_spread_of_both_runs_is_the_noise():
    now = number(1.6)
    assert worse([number(1.0)], [now])
    assert not worse([number(1.0, spread=0.7)], [now]) and not worse([number(1.0)], [replace(now, spread=0.7)])


def test_counts_must_be_equal_in_both_directions():
    assert worse([number(100, "count")], [number(101, "count")]) and worse(
        [number(100, "count")], [number(99, "count")]
    )
    assert not worse([number(0.1 + 0.2, "count")], [number(0.3, "count")]), "the rounding of sums is no change"


def test_a_slower_machine_excuses_seconds_but_no_ratio():
    for kind, excused in (("cpu_s", True), ("wall", True), ("ratio", False)):
        assert (not worse([number(1.0, kind)], [number(1.8, kind)], slowdown=1.5)) is excused
    assert not worse([number(1.0, "cpu_s")], [number(1.2, "cpu_s")], slowdown=0.5), "a faster machine accuses nothing"


def test_a_slowdown_of_30_percent_is_called_and_noise_of_5_percent_is_not():
    draw = random.Random(0)

    def repeats(factor: float) -> Measurement:
        base = [draw.gauss(1, 0.05) * draw.uniform(1, 2) for _ in range(5)]  # noise that is common to a pair
        return paired_ratio("x", [factor * value * draw.gauss(1, 0.05) for value in base], base)

    results = [repeats(1.0) for _ in range(200)]
    assert sum(bool(worse([a], [b])) for a, b in zip(results[::2], results[1::2], strict=True)) <= 2
    assert sum(bool(worse([a], [repeats(1.35)])) for a in results) >= 190


def test_a_number_that_cannot_be_compared_is_no_measurement():
    for value, kind in ((0.0, "ratio"), (float("nan"), "count"), (1.0, "minutes")):
        with pytest.raises(AssertionError):
            number(value, kind)


def test_measurements_are_read_as_they_were_written(tmp_path):
    found = [of_repeats("a", [1.0, 2.0, 4.0], "s", "wall"), number(3, "count", better="higher")]
    write(tmp_path / "m.json", found)
    assert read(tmp_path / "m.json") == found and found[0].spread == pytest.approx(0.75)
    with pytest.raises(AssertionError, match="same name"):
        write(None, [found[0], found[0]])


def fake_root(monkeypatch, folder: Path, rounds: int) -> None:
    (folder / "benchmarks").mkdir(exist_ok=True)
    (folder / "benchmarks/slow.py").write_text(SLOW_PROGRAM.format(root=str(ROOT), rounds=rounds))
    (folder / "benchmarks/fails.py").write_text("raise SystemExit(3)")
    (folder / "benchmarks/hangs.py").write_text("import time; time.sleep(100)")
    (folder / "benchmarks/silent.py").write_text("")
    monkeypatch.setattr(run, "ROOT", folder)


def as_last(outcomes: dict[str, run.Outcome]) -> dict:
    """Return the results of a run in the form in which a later run reads them."""
    programs = orjson.loads(orjson.dumps(outcomes))
    return {"programs": {name: outcome | {"machine": run.machine()} for name, outcome in programs.items()}}


def run_and_compare(program: run.Program, last: dict) -> run.Outcome:
    return run.run_again(program, last, run.run_program(program, 60), 60)


@pytest.mark.extended
def test_a_function_that_became_slower_is_called_and_an_unchanged_one_is_not(tmp_path, monkeypatch):
    program = run.Program("slow", "slow.py", 60)
    fake_root(monkeypatch, tmp_path, 100_000)
    last = as_last({"slow": run_and_compare(program, {})})
    again = run_and_compare(program, last)
    assert again.error is None and again.worse == []
    fake_root(monkeypatch, tmp_path, 145_000)
    (sentence,) = run_and_compare(program, last).worse
    assert re.match(r"work over base: .* ratio; worse by \d\d%, noise 1?\d\d?%", sentence)


def program_with_runs(monkeypatch, *measured: float | str) -> run.Program:
    """Return a program whose runs measure these values, one after the other. A text is the error of a run that fails."""
    outcomes = iter(
        run.Outcome("slow.py", 1.0, 1.0, error=one)
        if isinstance(one, str)
        else run.Outcome("slow.py", 1.0, 1.0, [number(one)])
        for one in measured
    )
    monkeypatch.setattr(run, "run_program", lambda program, deadline_s: next(outcomes))
    return run.Program("slow", "slow.py", 60)


LAST = run.Outcome("slow.py", 1.0, 1.0, [number(1.0)])


@pytest.mark.parametrize(
    "values, is_worse", [((1.0,), False), ((2.0, 1.0), False), ((2.0, 1.5, 1.0), False), ((2.0, 2.5, 3.0), True)]
)
def test_a_measurement_is_called_worse_only_if_it_is_worse_in_all_of_up_to_three_runs(monkeypatch, values, is_worse):
    outcome = run_and_compare(program_with_runs(monkeypatch, *values), as_last({"slow": LAST}))
    assert bool(outcome.worse) is is_worse and outcome.measurements == [number(values[-1])]


def test_the_line_says_if_a_worse_measurement_could_not_be_repeated(monkeypatch):
    program = program_with_runs(monkeypatch)
    last, now = as_last({"slow": LAST}), run.Outcome("slow.py", 1.0, 1.0, [number(2.0)])
    (sentence,) = run.run_again(program, last, now, 1.0).worse
    assert sentence.endswith("; no time remained to measure it again")


def test_a_program_without_an_earlier_result_of_its_command_runs_twice(monkeypatch):
    other_command = as_last({"slow": replace(LAST, command="slow.py --steps 4")})
    for last in ({}, other_command):
        outcome = run_and_compare(program_with_runs(monkeypatch, 1.0, 3.0), last)
        assert outcome.measurements == [number(2.0, spread=1.0)] and not outcome.worse
        failed = run_and_compare(program_with_runs(monkeypatch, 1.0, "exit status 3"), last)
        assert failed.error is None and failed.measurements == [number(1.0)], "the first result is kept"
        late = run.run_again(program_with_runs(monkeypatch), last, LAST, 1.0)
        assert late.measurements == LAST.measurements


def test_two_different_counts_are_not_averaged():
    assert mean_of(number(101, "count"), number(100, "count")) == number(100, "count")
    assert mean_of(number(1.0, spread=0.5), number(1.2)) == number(1.1, spread=0.5)


def test_results_of_another_machine_or_command_are_not_compared_in_seconds():
    before = run.Outcome("x.py --steps 3", 1.0, 1.0, [number(1.0, "wall")])
    now = replace(before, measurements=[number(9.0, "wall")])
    last = as_last({"x": before})
    assert run.what_got_worse(last, "x", now)
    elsewhere = {"programs": {"x": last["programs"]["x"] | {"machine": {"processor": "other"}}}}
    assert not run.what_got_worse(elsewhere, "x", now)
    assert not run.what_got_worse(last, "x", replace(now, command="x.py --steps 4"))
    ratio = replace(now, measurements=[number(9.0)])
    assert run.what_got_worse(elsewhere, "x", ratio)


def test_each_program_is_compared_with_its_own_last_result(tmp_path, monkeypatch):
    """The newest result of a program may be in an older file, because a run may measure only some programs."""
    monkeypatch.setattr(run, "REFERENCES", tmp_path / "references")
    for folder, date, values in (
        ("references", "bench_1", {"a": 1.0, "b": 1.0, "c": 1.0}),
        ("out", "2026-01-01", {"a": 2.0, "b": 2.0}),
        ("out", "2026-01-02", {"a": 3.0}),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        programs = {name: run.Outcome("x.py", 1.0, 1.0, [number(value)]) for name, value in values.items()}
        content = {"machine": folder, "programs": programs}
        (tmp_path / folder / f"{date}.json").write_bytes(orjson.dumps(content))
    found = run.read_results(run.result_files(tmp_path / "out"))["programs"]
    assert {name: (one["machine"], one["measurements"][0]["value"]) for name, one in found.items()} == {
        "a": ("out", 3.0),
        "b": ("out", 2.0),
        "c": ("references", 1.0),
    }


def test_a_program_that_fails_when_it_runs_again_is_reported_as_failed(monkeypatch):
    outcomes = iter([run.Outcome("x.py", 1.0, 1.0, [number(9.0)]), run.Outcome("x.py", 1.0, error="exit status 3")])
    monkeypatch.setattr(run, "run_program", lambda program, deadline_s: next(outcomes))
    last = as_last({"x": run.Outcome("x.py", 1.0, 1.0, [number(1.0)])})
    outcome = run_and_compare(run.Program("x", "x.py", 60), last)
    assert outcome.error == "exit status 3" and outcome.worse == []


def test_all_programs_run_before_the_worse_ones_run_again(monkeypatch):
    ran = []

    def measured(program, deadline_s):
        ran.append(program.name)
        return run.Outcome(program.command, 0.01, 1.0, [number(9.0 if program.name == "a" else 1.0)])

    monkeypatch.setattr(run, "run_program", measured)
    programs = [run.Program(name, f"{name}.py", 60) for name in "abc"]
    last = as_last({name: run.Outcome(f"{name}.py", 1.0, 1.0, [number(1.0)]) for name in "abc"})
    outcomes, _ = run.run_all(programs, last, 60, Console(quiet=True))
    assert ran == ["a", "b", "c", "a", "a"]
    assert {name: len(outcome.worse) for name, outcome in outcomes.items()} == {"a": 1, "b": 0, "c": 0}


def test_files_are_written_to_memory_only_if_there_is_room(tmp_path):
    assert run.folder_in_memory(tmp_path, 1) == tmp_path
    for folder, free_bytes in ((tmp_path, 2**60), (tmp_path / "missing", 1)):
        assert run.folder_in_memory(folder, free_bytes) == Path(tempfile.gettempdir())


@pytest.mark.extended
def test_programs_that_fail_hang_or_miss_something_are_named(tmp_path, monkeypatch):
    fake_root(monkeypatch, tmp_path, 1000)
    programs = [
        run.Program("fails", "fails.py", 60),
        run.Program("hangs", "hangs.py", 0.5),
        run.Program("silent", "silent.py", 60),
        run.Program("peer", "slow.py", 60, {"no/python": "make it"}),
    ]
    start = time.monotonic()
    outcomes, left_out = run.run_all(programs, {}, 60, Console(quiet=True))
    assert time.monotonic() - start < 60, "hangs.py sleeps for 100 s"
    errors = [outcomes[name].error for name in ("fails", "hangs", "silent")]
    assert errors == ["exit status 3", "not finished after 0.5 s", "it wrote no measurements"]
    assert left_out == ["peer was left out: no/python does not exist; make it"]
    late = run.run_program(run.Program("hangs", "hangs.py", 60), 0.5)
    assert late.error == "not finished after 0.5 s, and no more time remained; set --minutes"


@pytest.mark.extended
def test_the_exit_status_is_1_only_if_a_program_failed(tmp_path, monkeypatch):
    fake_root(monkeypatch, tmp_path, 1000)
    monkeypatch.setattr(run, "PROGRAMS", (run.Program("slow", "slow.py", 60), run.Program("fails", "fails.py", 60)))
    words = ["run.py", "--output", str(tmp_path / "out"), "--only"]
    for names, status in ((["slow"], 0), (["slow", "fails"], 1)):
        monkeypatch.setattr("sys.argv", [*words, *names])
        assert run.main() == status
    last = run.result_files(tmp_path / "out")[-1]
    assert "slow" in orjson.loads(last.read_bytes())["programs"]
    assert last.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_every_benchmark_with_measurements_is_run():
    runs = {program.command.split()[0] for program in run.PROGRAMS}
    files = [path for path in (ROOT / "benchmarks").glob("*.py") if path.name != "measurements.py"]
    assert runs == {path.name for path in files if "add_json_option(" in path.read_text()}
    without = {path.name for path in files if "__main__" in path.read_text()} - runs
    assert without == {"run.py", "simulated_engine.py", "trl_peer.py"}, "a benchmark has no option --json"


def test_the_peers_schedulers_place_every_sequence_once():
    draw = random.Random(0)
    lengths = balance.np.array([draw.randint(512, 9000) for _ in range(64)])
    costs = [float(balance.VERL_COST(tokens)) for tokens in lengths.tolist()]
    for partition in (
        balance.equal_karmarkar_karp(costs, 8),
        balance.equal_greedy(costs, 8),
        balance.slime_partition(lengths, 8),
    ):
        assert len(partition) == 8 and sorted(row for part in partition for row in part) == list(range(64))
    for method in (balance.equal_karmarkar_karp, balance.equal_greedy):
        assert {len(part) for part in method(costs, 8)} == {8}


def test_karmarkar_karp_with_equal_numbers_finds_a_perfect_partition():
    assert sorted(map(sorted, balance.equal_karmarkar_karp([8, 7, 6, 5], 2))) == [[0, 3], [1, 2]]
