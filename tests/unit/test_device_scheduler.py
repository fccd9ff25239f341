"""Tests share the devices of a machine: no device has two tests, and none is idle while a waiting test could run on it."""

import heapq
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from device_scheduler import NEEDS_FILE, DeviceSchedule, DeviceScheduling, DeviceUse, summary_of
from hypothesis import given
from hypothesis import strategies as st

TESTS = Path(__file__).resolve().parents[1]
DEADLINE_S = 120

# -- The order of the tests -----------------------------------------------------------------------------------------------


def check_rules(schedule: DeviceSchedule) -> None:
    """Check what must be true whenever no further test can be started."""
    used = [device for devices in schedule.running.values() for device in devices]
    assert sorted(used + schedule.free) == sorted(schedule.devices), "each device is free or has one test"
    assert all(len(devices) == schedule.needs[test] for test, devices in schedule.running.items())
    for waiting in schedule.waiting:
        assert schedule.needs[waiting] > len(schedule.free), "a device is idle, and a waiting test could run on it"
        assert max(schedule.needs[test] for test in schedule.running) >= schedule.needs[waiting], "the test may starve"


def simulate(num_devices: int, needs: list[int], durations: list[int]) -> tuple[int, list[int]]:
    """Run tests with a simulated clock. Returns the time at which the last test ends, and the tests in the order of starts."""
    schedule = DeviceSchedule([str(number) for number in range(num_devices)], needs)
    now, ends, started = 0, [], []
    while schedule.waiting or schedule.running:
        while (test := schedule.start_next()) is not None:
            heapq.heappush(ends, (now + durations[test], test))
            started.append(test)
        check_rules(schedule)
        now, test = heapq.heappop(ends)
        schedule.end(test)
    return now, started


@st.composite
def sets_of_tests(draw) -> tuple[int, list[int], list[int]]:
    """Return (number of devices, devices that each test needs, duration of each test)."""
    num_devices = draw(st.integers(1, 8))
    tests = draw(st.lists(st.tuples(st.integers(1, num_devices), st.integers(1, 20)), min_size=1, max_size=30))
    return num_devices, [need for need, _ in tests], [duration for _, duration in tests]


@given(sets_of_tests())
def test_every_test_runs_once_and_all_end_within_the_bound_of_list_scheduling(tests):
    num_devices, needs, durations = tests
    end, started = simulate(num_devices, needs, durations)
    assert sorted(started) == list(range(len(needs)))
    longest, area = max(durations), sum(need * duration for need, duration in zip(needs, durations, strict=True))
    assert max(longest, area / num_devices) <= end
    assert end * (num_devices + 1) <= 2 * max(longest * (num_devices + 1), area)


def test_large_tests_run_first_and_small_ones_fill_the_gaps():
    # Test 4 runs alone, then test 2 with three devices. On the fourth device, tests 1 and 3 run. Test 0 needs two and comes last.
    assert simulate(4, needs=[2, 1, 3, 1, 4], durations=[5, 4, 5, 9, 5]) == (18, [4, 2, 1, 3, 0])


def test_a_test_that_is_repeated_runs_once_more():
    schedule = DeviceSchedule(["a", "b"], [1, 2, 2])
    assert schedule.start_next() == 1 and schedule.end(1) == ["a", "b"]
    schedule.repeat(1)
    assert [schedule.start_next(), schedule.end(1), schedule.start_next()] == [1, ["a", "b"], 2]


@pytest.mark.parametrize("needs", [[1, 3], [0]])
def test_a_need_that_no_machine_satisfies_is_refused(needs):
    with pytest.raises(
        ValueError, match=re.escape(f"tests need [{needs[-1]}] devices; expected at least 1 and at most 2")
    ):
        DeviceSchedule(["0", "1"], needs)


def test_the_summary_has_the_busy_fractions_and_the_least_possible_time():
    uses = [DeviceUse("a", ["0", "1"], 10.0, 12.0), DeviceUse("b", ["1"], 12.0, 20.0)]
    assert summary_of(["0", "1"], uses) == {"wall_s": 10.0, "lower_bound_s": 8.0, "busy": {"0": 0.2, "1": 1.0}}
    assert summary_of(["0", "1"], [*uses, DeviceUse("c", ["0"], 12.0, 20.0)])["lower_bound_s"] == 10.0


# -- The scheduler of pytest-xdist ------------------------------------------------------------------------------------------


class Worker:
    """Stands in for a worker of pytest-xdist. Records the tests that it gets."""

    shutting_down = False

    def __init__(self, file: Path, needs: list[int]):
        file.write_text(json.dumps(needs))
        self.gateway, self.workerinput = SimpleNamespace(id=file.name), {NEEDS_FILE: str(file)}
        self.received = []

    def sendcommand(self, name: str, indices: list[int], devices: list[str]) -> None:
        self.received.append((name, indices, devices))


@pytest.fixture
def scheduling(tmp_path):
    """Return (scheduler with two devices, its two workers, finished tests). Tests a, b and c need one device each."""
    config = SimpleNamespace(getvalue=lambda name: ["popen"] * 2, getoption=lambda name: None)
    scheduler = DeviceScheduling(config, SimpleNamespace(loadsched=print), ["x", "y"], uses := [])
    workers = [Worker(tmp_path / name, [1, 1, 1]) for name in ("first", "second")]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, ["a", "b", "c"])
    scheduler.schedule()
    return scheduler, workers, uses


def test_a_worker_that_shuts_down_gets_no_test(scheduling):
    scheduler, (first, second), uses = scheduling
    second.shutting_down = True
    scheduler.mark_test_complete(second, 1)
    assert second.received == [("runtests", [1], ["y"])] and not scheduler.tests_finished
    scheduler.mark_test_complete(first, 0)
    assert first.received == [("runtests", [0], ["x"]), ("runtests", [2], ["x"])]
    assert scheduler.remove_node(second) is None and scheduler.remove_node(first) == "c"
    assert [(use.test, use.devices) for use in uses] == [("b", ["y"]), ("a", ["x"]), ("c", ["x"])]
    assert scheduler.tests_finished


def test_a_worker_that_replaces_another_must_collect_the_same_tests(scheduling, tmp_path):
    scheduler, (first, _), _ = scheduling
    assert scheduler.remove_node(first) == "a"
    scheduler.add_node(replacement := Worker(tmp_path / "third", [1, 1, 2]))
    with pytest.raises(RuntimeError, match="collected other tests than the workers before it"):
        scheduler.add_node_collection(replacement, ["a", "b", "c"])


# -- Runs of pytest -------------------------------------------------------------------------------------------------------


class PytestRun:
    """A running pytest over one test file."""

    def __init__(self, folder: Path, source: str, arguments: tuple[str, ...], variables: dict[str, str]):
        self.folder, self.report_file = folder, folder / "report.json"
        (folder / "test_made.py").write_text("import os, time, pytest\nfrom pathlib import Path\n" + source)
        (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n")
        # pytest loads only the plug-ins of the command. Without GPUs, the devices are the slots that the command declares.
        own = {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
        words = ["-p", "xdist.plugin", "-p", "device_scheduler", "-p", "no:cacheprovider"]
        words += ["-v", "--devices-report", str(self.report_file), *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | own | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self, **expected: int) -> str:
        """Wait for the end, and return the output. Its last line must have exactly these counts, such as passed=2."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        counts = re.findall(r"(\d+) (passed|failed|skipped|error)", output.splitlines()[-1])
        assert {name: int(count) for count, name in counts} == expected, output
        return output

    def devices_of(self) -> dict[str, list[str]]:
        """Return the devices of each test that ran, in the order in which the tests ended."""
        return {
            use["test"].partition("::")[2]: use["devices"] for use in json.loads(self.report_file.read_text())["tests"]
        }


@pytest.fixture
def start_pytest(tmp_path):
    """`start_pytest(source, *arguments, **variables)` starts pytest on a file with this source, and returns a PytestRun."""
    runs = []

    def start(source: str, *arguments: str, **variables: str) -> PytestRun:
        runs.append(PytestRun(tmp_path, source, arguments, variables))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()


NEEDS = (1, 4, 3, 1, 1, 2, 4, 1, 2, 1, 1, 3)
TESTS_THAT_WAIT = f"""
import subprocess

@pytest.mark.parametrize("number", [pytest.param(i, marks=pytest.mark.devices(n)) for i, n in enumerate({NEEDS})])
def test_waits(number, devices):
    seen = subprocess.check_output(["printenv", "CUDA_VISIBLE_DEVICES"], text=True).strip()
    assert seen == ",".join(devices)
    Path(f"{{number}}.part").write_text(seen)
    Path(f"{{number}}.part").rename(f"{{number}}.started")
    while not Path(f"{{number}}.may_end").exists():
        time.sleep(0.01)
"""


def wait_until(condition: Callable[[], bool], message: Callable[[], str]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, message()
        time.sleep(0.01)


@pytest.mark.extended
def test_pytest_leaves_no_device_idle_and_gives_none_to_two_tests(start_pytest, tmp_path):
    """Each of the started tests ends only when this function allows it, so the order of events depends on no duration."""
    run, ended = start_pytest(TESTS_THAT_WAIT, "--devices", "4"), set()
    model = DeviceSchedule("0123", NEEDS)

    def running() -> dict[int, list[str]]:
        """Return the tests that have started and not ended, with the devices that their processes see."""
        files = {int(file.stem): file for file in tmp_path.glob("*.started")}
        return {test: file.read_text().split(",") for test, file in files.items() if test not in ended}

    def no_waiting_test_fits() -> bool:
        tests = running()
        free = 4 - sum(NEEDS[test] for test in tests)
        return all(NEEDS[test] > free for test in range(len(NEEDS)) if test not in ended | set(tests))

    while len(ended) < len(NEEDS):
        wait_until(no_waiting_test_fits, lambda: f"a device is idle beside {running()} after {ended}")
        used = [device for devices in running().values() for device in devices]
        assert len(set(used)) == len(used) <= 4, f"a device has two tests: {running()}"
        while model.start_next() is not None:
            pass
        assert running() == model.running
        last = max(model.running)
        ended.add(last)
        model.end(last)
        (tmp_path / f"{last}.may_end").touch()
    output = run.wait(passed=len(NEEDS))
    assert "scheduling tests via DeviceScheduling" in output and "12 tests took" in output
    assert [len(devices) for devices in run.devices_of().values()] == [
        NEEDS[int(re.findall(r"\d+", name)[0])] for name in run.devices_of()
    ]


TESTS_THAT_CRASH = """
@pytest.mark.devices(2)
def test_crashes():
    os._exit(3)

@pytest.mark.devices(2)
def test_crashes_once():
    if not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(3)

@pytest.mark.devices(2)
def test_needs_all_devices(): ...

@pytest.mark.devices(3)
def test_needs_too_many_devices(): ...

def test_small(): ...
"""
REPEATS = """
def pytest_handlecrashitem(crashitem, report, sched):
    if crashitem.endswith("once"):
        sched.mark_test_pending(crashitem)
        report.outcome = "rerun"
"""


@pytest.mark.extended
def test_a_worker_that_crashes_frees_its_devices_and_its_test_fails(start_pytest, tmp_path):
    (tmp_path / "conftest.py").write_text(REPEATS)
    run = start_pytest(TESTS_THAT_CRASH, "--devices", "2", "-rs")
    output = run.wait(failed=1, passed=3, skipped=1)
    assert re.search(r"worker 'gw\d' crashed while running 'test_made.py::test_crashes'", output)
    assert "devices needed: 3, available: 2" in output
    assert run.devices_of()["test_needs_all_devices"] == ["0", "1"]


TESTS_WITH_FAILURES = """
@pytest.mark.devices(2)
@pytest.mark.parametrize("number", range(4))
def test_fails(number):
    assert number == 3

@pytest.mark.gpu
def test_small(): ...
"""


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        (["-x"], dict(failed=1)),
        (["--maxfail=2"], dict(failed=2)),
        (["-k", "small or 3"], dict(passed=2)),
        (["-m", "gpu"], dict(passed=1)),
        (["--deselect", "test_made.py::test_fails[0]"], dict(failed=2, passed=2)),
        (["-n0", "-x"], dict(failed=1)),
    ],
    ids=["x", "maxfail", "k", "m", "deselect", "one process"],
)
@pytest.mark.extended
def test_tests_are_selected_and_stopped_as_with_other_schedulers(start_pytest, arguments, counts):
    start_pytest(TESTS_WITH_FAILURES, "--devices", "2", *arguments).wait(**counts)


TESTS_THAT_STOP = """
@pytest.mark.devices(2)
@pytest.mark.parametrize("number", range(5))
def test_stops(request, number):
    request.session.shouldstop = "enough tests"
"""


@pytest.mark.extended
def test_a_worker_that_is_told_to_stop_runs_no_further_test(start_pytest):
    output, _ = start_pytest(TESTS_THAT_STOP, "--devices", "2").process.communicate(timeout=DEADLINE_S)
    assert "Interrupted: enough tests" in output
    assert 1 <= output.count(" PASSED ") <= 2  # the other worker may get a test before the session stops


DIFFERENT_IDS = "@pytest.mark.parametrize('x', [os.environ['PYTEST_XDIST_WORKER']])\ndef test_a(x): ..."
DIFFERENT_NEEDS = "@pytest.mark.devices(int(os.environ['PYTEST_XDIST_WORKER'][-1]) + 1)\ndef test_a(): ..."


@pytest.mark.parametrize("source", [DIFFERENT_IDS, DIFFERENT_NEEDS], ids=["ids", "needs"])
@pytest.mark.extended
def test_workers_that_collect_different_tests_run_none(start_pytest, source):
    assert "Different tests were collected between gw" in start_pytest(source, "--devices", "2").wait(error=1)


TESTS_OF_VARIABLES = """
@pytest.mark.gpu
@pytest.mark.devices(2)
def test_two(devices):
    assert devices == os.environ["CUDA_VISIBLE_DEVICES"].split(",")

@pytest.mark.gpu
def test_one(devices):
    assert devices == os.environ["CUDA_VISIBLE_DEVICES"].split(",")

def test_plain(): ...
"""


@pytest.mark.extended
def test_gpu_tests_use_all_visible_gpus_by_default(start_pytest):
    run = start_pytest(TESTS_OF_VARIABLES, "-m", "gpu", CUDA_VISIBLE_DEVICES="GPU-4,GPU-7")
    assert "2 workers" in run.wait(passed=2)
    assert run.devices_of() == {"test_two": ["GPU-4", "GPU-7"], "test_one": ["GPU-4"]}


@pytest.mark.extended
def test_in_one_process_each_test_gets_the_first_devices(start_pytest):
    run = start_pytest(TESTS_OF_VARIABLES, "--devices", "3", "-n0")
    assert "worker" not in run.wait(passed=3)
    assert run.devices_of() == {"test_two": ["0", "1"], "test_one": ["0"], "test_plain": ["0"]}


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [([], dict(passed=2, skipped=1)), (["-m", "not gpu"], dict(passed=1))],
    ids=["all", "not gpu"],
)
@pytest.mark.extended
def test_without_the_option_and_the_marker_pytest_runs_as_ever(start_pytest, arguments, counts):
    run = start_pytest(TESTS_OF_VARIABLES, *arguments, "-rs", CUDA_VISIBLE_DEVICES="4")
    output = run.wait(**counts)
    assert not run.report_file.exists() and "worker" not in output
    assert ("devices needed: 2, available: 1" in output) == ("skipped" in counts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "3"], "--devices 3: expected at least 1 and at most 2, the number of visible GPUs"),
        (["--devices", "0"], "--devices 0: expected at least 1 and at most 2, the number of visible GPUs"),
        (["--devices", "2", "-n3"], "-n 3: expected one worker for each of 2 devices; leave -n out, or use -n0"),
    ],
    ids=["too many", "none", "workers"],
)
@pytest.mark.extended
def test_wrong_options_are_refused_before_a_test_runs(start_pytest, arguments, message):
    run = start_pytest(TESTS_OF_VARIABLES, *arguments, CUDA_VISIBLE_DEVICES="4,7")
    assert f"ERROR: {message}" in run.wait()
    assert run.process.returncode == pytest.ExitCode.USAGE_ERROR


TEST_THAT_USES_CUDA = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))

def test_uses_cuda(devices): ...
"""


@pytest.mark.extended
def test_a_test_must_not_use_cuda_in_the_process_of_pytest(start_pytest):
    output = start_pytest(TEST_THAT_USES_CUDA, "--devices", "1").wait(passed=1, error=1)
    assert "test_uses_cuda used CUDA in the process of pytest, so later tests could not change their devices" in output
