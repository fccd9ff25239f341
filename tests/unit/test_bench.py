"""The processes, the deadlines and the report of `mrl bench gpu`, with sections that measure nothing."""

import argparse
import io
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from mrl_runs import is_alive, wait_until
from rich.console import Console

from mrl import cli
from mrl.bench import sections
from mrl.bench.sections import SECTIONS, Bench, Section, SectionJob
from mrl.commands import bench
from mrl.core.code_locations import PACKAGE_ROOT
from mrl.core.command_names import SUBCOMMANDS

CASES = """
import os, signal, subprocess, sys, time

def measure(job):
    job.progress("measuring")
    job.row("a case", ("time", 1.5, "ms"), *job.efficiency(50.0))
    job.leave_out("flash-attn", "flash-attn is not installed; pip install flash-attn")
    job.set_rate("measured", 100.0)

def fail(job):
    job.row("before the error", ("time", 1.0, "ms"))
    raise ValueError("the kernel needs a multiple of 8\\nand more")

def fail_in_one_case(job):
    class OutOfMemoryError(RuntimeError):
        pass
    with job.case("large"):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    with job.case("wrong"):
        raise RuntimeError("no kernel image is available")
    with job.case("right"):
        job.row("right", ("time", 1.0, "ms"))

def fail_with_paths(job):
    print(os.path.join(sys.prefix, "bin/x"), os.path.join(os.environ["TMPDIR"], "y"), flush=True)
    raise ValueError("wrong")

def crash(job):
    os.kill(os.getpid(), signal.SIGSEGV)

def hang(job):
    child = subprocess.Popen(["sleep", "1000"])
    job.row("before the hang", ("pid", child.pid, ""))
    job.progress("hanging")
    time.sleep(1000)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(name, ...)` runs sections with these functions, and returns (results, shown lines, the Bench)."""
    (tmp_path / "bench_cases.py").write_text(CASES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    late, shown = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=time.sleep)
    monkeypatch.setattr(sections, "time", clock)

    def show(line: str) -> None:
        shown.append(line)
        if "hanging" in line:
            late[0] = 301.0  # only now the 300 s of the section are over, so a slow start of its process does no harm

    def run_named(*names: str, **rates: float):
        chosen = [Section(name, f"title of {name}", f"bench_cases:{name}", 1.0) for name in names]
        bench_of_test = Bench("toy", {}, show, dict(rates))
        return bench_of_test.run(chosen, seconds=600), shown, bench_of_test

    return run_named


def test_each_section_that_fails_is_reported_and_the_next_one_runs(run):
    results, shown, _ = run("fail", "crash", "measure")
    failed, crashed, measured = results
    assert failed.problems == ["ValueError: the kernel needs a multiple of 8"]
    assert failed.rows[0]["case"] == "before the error" and "Traceback (most recent call last):" in failed.log
    assert crashed.problems[0].startswith("its process ended with signal SIGSEGV")
    assert measured.status == "measured" and not measured.problems
    assert [line for line in shown if "title of" in line][2].startswith("3/3 measure: title of measure (at most ")
    assert "  failed: ValueError: the kernel needs a multiple of 8" in shown


def test_a_section_that_hangs_ends_at_its_deadline_with_its_children(run):
    (hung, measured), *_ = run("hang", "measure")
    assert hung.status == "failed" and "did not finish within 300 s; it was at: hanging" in hung.problems[0]
    child = hung.rows[0]["values"][0]["value"]
    wait_until(lambda: not is_alive(child), 20)
    assert measured.status == "measured"


def test_a_case_that_fails_does_not_end_its_section(run):
    ((result,), *_) = run("fail_in_one_case")
    assert result.left_out == ["large: the memory of this card is too small for it"]
    assert result.problems == ["wrong: RuntimeError: no kernel image is available"]
    assert [row["case"] for row in result.rows] == ["right"]


def test_later_sections_get_the_measured_rate(run):
    (first, second), _, used = run("measure", "measure", published=200.0)
    assert used.rates == {"published": 200.0, "measured": 100.0}
    found = [{one["quantity"]: one["value"] for one in result.rows[0]["values"]} for result in (first, second)]
    assert found[0] == {"time": 1.5, "rate": 50.0, "of the published rate": 25.0}
    assert found[1] == found[0] | {"of the measured rate": 50.0}


def test_the_report_has_numbers_with_units_and_what_was_left_out(run, tmp_path, monkeypatch, capsys):
    results, _, used = run("measure", "crash")
    used.machine |= dict(card="NVIDIA H100 80GB HBM3", versions={"torch": "2.14.1"})
    monkeypatch.setattr(bench, "read_gpus", lambda: SimpleNamespace(cards=[SimpleNamespace(driver="570.1")]))
    report = json.loads(json.dumps(bench.report_of(used, results, 0.0, argparse.Namespace(device="cuda"))))
    assert report["schema"] == 1 and report["date"] == "1970-01-01T00:00:00Z" and report["size"] == "toy"
    assert report["machine"] == dict(card="NVIDIA H100 80GB HBM3", driver="570.1")
    assert report["versions"] == {"torch": "2.14.1"} and report["rates_tflops"] == {"measured": 100.0}
    assert report["sections"][0]["rows"][0]["values"][0] == dict(quantity="time", value=1.5, unit="ms")
    assert report["left_out"] == ["measure: flash-attn: flash-attn is not installed; pip install flash-attn"]
    assert report["failed"][0].startswith("crash: its process ended with signal SIGSEGV")
    bench.print_results(Console(width=150), results)
    out = capsys.readouterr().out
    assert "time 1.5 ms, rate 50 TFLOP/s" in out and "left out: measure: flash-attn: flash-attn is not" in out


@pytest.mark.parametrize("deadline_s", [60.0, 0.0])
def test_gpu_tests_are_reported_one_by_one(tmp_path, monkeypatch, deadline_s):
    """A program prints the lines of pytest. With a deadline of 0 s, the program is interrupted and the rest left out."""
    lines = [
        "tests/gpu/test_kernels.py::test_attention[cuda] PASSED                                   [ 25%]",
        "tests/gpu/test_actor.py::test_update[tp-cuda] SKIPPED (2 ranks need 2 GPUs (of 1))      [ 50%]",
        "tests/gpu/test_actor.py::test_update[one-cuda] FAILED                                    [ 75%]",
        "FAILED tests/gpu/test_actor.py::test_update[one-cuda] - AssertionError: rank 0: 1.5 is not 1.0",
    ]
    program = tmp_path / "pytest"
    end = "exec sleep 1000" if deadline_s == 0.0 else "exit 1"
    program.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), end, ""]))
    program.chmod(0o755)
    monkeypatch.setattr(sections.sys, "executable", str(program))
    events = io.StringIO()
    sections.check_gpu_tests(SectionJob(SimpleNamespace(size="full", deadline_s=deadline_s), events))
    found = [json.loads(line) for line in events.getvalue().splitlines()]
    left_out = [event["left_out"] for event in found if "left_out" in event]
    if deadline_s == 0.0:
        assert left_out[-1].startswith("the remaining programs: there was no time for them")
        return
    assert left_out == ["test_update[tp-cuda]: 2 ranks need 2 GPUs (of 1)"]
    assert [event["problem"] for event in found if "problem" in event] == [
        "test_update[one-cuda]: failed",
        "test_update[one-cuda]: AssertionError: rank 0: 1.5 is not 1.0",
    ]
    gpu_tests = [event["test"] for event in found if "test" in event]
    assert gpu_tests == [
        {"tests/gpu/test_kernels.py::test_attention[cuda]": "passed"},
        {"tests/gpu/test_actor.py::test_update[tp-cuda]": "skipped"},
        {"tests/gpu/test_actor.py::test_update[one-cuda]": "failed"},
    ]
    row = next(event["row"] for event in found if "row" in event)
    assert [value["value"] for value in row["values"]] == [1, 1]


def test_an_installed_package_leaves_the_gpu_tests_out(monkeypatch):
    monkeypatch.setattr(sections, "IS_CHECKOUT", False)
    events = io.StringIO()
    sections.check_gpu_tests(SectionJob(SimpleNamespace(size="full", deadline_s=1.0), events))
    assert "run the command in a checkout" in json.loads(events.getvalue())["left_out"]


def machine_without_gpu(self, section, deadline_s):
    self.machine |= dict(card=None, free_gib=0.0, cuda_of_torch=None, versions={"torch": "2.14.1+cpu"})
    return sections.SectionResult(section.name, section.title)


def test_without_a_gpu_the_command_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Bench, "run_section", machine_without_gpu)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "gpu"]) == 2
    error = capsys.readouterr().err
    assert "torch 2.14.1+cpu, which is built without CUDA, finds no GPU" in error
    assert "`mrl bench gpu --device cpu`" in error and not list(tmp_path.iterdir())


def test_only_the_named_sections_run_in_their_order(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(Bench, "run_section", machine_without_gpu)
    monkeypatch.setattr(Bench, "run", lambda self, chosen, seconds: ran.append((chosen, seconds)) or [])
    words = [
        "--device",
        "cpu",
        "--sections",
        "ipc,matrix",
        "--minutes",
        "2",
        "--output",
        str(tmp_path / "new" / "a.json"),
    ]
    assert cli.main(["bench", "gpu", *words]) == 0
    ((chosen, seconds),) = ran
    assert [section.name for section in chosen] == ["matrix", "ipc"] and 0 < seconds <= 120
    assert json.loads((tmp_path / "new" / "a.json").read_text())["device"] == "cpu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sections", "matrx"], "'matrx'; expected some of correctness, matrix"),
        (["--sections", ","], "no section; expected some of"),
        (["--minutes", "0"], "'0'; expected a number of minutes above 0"),
        (["--size", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_wrong_arguments_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "gpu", *words])
    assert message in capsys.readouterr().err


def test_a_process_sees_one_gpu_or_none():
    assert bench.visible_device("cuda", None) == "0"
    assert bench.visible_device("cuda", "3,4") == "3"
    assert bench.visible_device("cpu", "3,4") == ""


def test_the_size_depends_on_the_free_memory():
    assert [bench.choose_size("cuda", gib) for gib in (79.0, 60.0, 59.9, 14.0, 10.0)] == [
        *("full", "full", "small", "small", "toy")
    ]
    assert bench.choose_size("cpu", 0.0) == "toy"


def test_no_report_is_overwritten(tmp_path):
    now, report = time.gmtime(0), dict(machine=dict(card="NVIDIA H100 80GB HBM3"))
    names = [bench.write_new(tmp_path, report, now).name for _ in range(3)]
    day = "gpu_h100_80gb_hbm3_1970-01-01"
    assert names == [f"{day}.json", f"{day}_000000.json", f"{day}_000000_{os.getpid()}.json"]
    assert all(json.loads((tmp_path / name).read_text()) == report for name in names)
    with pytest.raises(FileExistsError, match="use --output"):
        bench.write_new(tmp_path, report, now)
    assert bench.write_new(tmp_path, dict(machine=dict(card=None)), now).name == "cpu_1970-01-01.json"


def test_the_log_of_a_failed_section_names_no_folder_of_the_machine(run):
    (failed,), _, _ = run("fail_with_paths")
    text = "\n".join(failed.log)
    assert "./mrl/bench/sections.py" in text and "VENV/bin/x" in text and "SCRATCH/" in text
    assert not any(folder in text for folder in (str(PACKAGE_ROOT), sys.prefix, str(Path.home())))


def test_the_help_and_the_pages_name_the_least_version_of_torch_that_is_pinned(capsys):
    root = Path(__file__).parents[2]
    (least,) = re.findall(r'"torch>=([\d.]+),', (root / "setup.py").read_text())
    assert cli.main(["bench", "--help"]) == 0
    page = (root / "docs" / "reference" / "commands.md").read_text()
    for text in (capsys.readouterr().out, page):
        assert set(re.findall(r"torch (\d+\.\d+)", text)) == {least}


def test_the_help_names_all_sections_and_sizes(capsys):
    assert cli.main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(section.name in out for section in SECTIONS) and all(size in out for size in sections.SIZES)
    assert SUBCOMMANDS["bench"] == ("gpu",) and sum(section.time_fraction for section in SECTIONS) == pytest.approx(1)


@pytest.mark.parametrize(
    ("card", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H20", None),
    ],
)
def test_the_published_rate_is_that_of_the_card(card, tflops):
    from mrl.bench.device_rates import published_tflops

    assert published_tflops(card) == tflops
