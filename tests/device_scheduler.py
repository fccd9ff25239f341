"""pytest plug-in that runs tests side by side on the devices of this machine. Each test gets as many devices as it needs.

`pytest -m gpu` uses all visible GPUs. `pytest --devices N` uses only N of them. On a machine without GPUs, `--devices N` pretends
that there are N devices. A test that needs two devices is marked `@pytest.mark.devices(2)`. Without this marker, a test needs one
device. pytest-xdist starts one worker for each device. With -n0, or with one device, the main pytest process runs the tests one
after another.
"""

import json
import os
import re
import sys
import time
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

VISIBLE = "CUDA_VISIBLE_DEVICES"
NEEDS_FILE = "needs_file"  # key of `workerinput`: the file to which a worker writes how many devices each test needs


class DeviceSchedule:
    """Chooses which test starts next, and on which devices. The caller runs the tests, and calls `end` when a test ends.

    Among the waiting tests that fit on the free devices, the test that needs most devices starts. If several tests need equally
    many, the first of them starts. So no device is idle while a waiting test could run on it. No test starves: while a test
    waits, at least one running test needs at least as many devices. When the last of these running tests ends, the waiting test
    fits on its devices. On N devices, all tests end within 2 max(longest test, device-seconds / (N + 1)) (Garey and Graham 1975,
    list scheduling with one resource).

    Raises ValueError if a test needs no device, or more devices than there are.
    """

    def __init__(self, devices: Sequence[str], needs: Sequence[int]):
        if wrong := [need for need in needs if not 1 <= need <= len(devices)]:
            raise ValueError(f"tests need {wrong} devices; expected at least 1 and at most {len(devices)}")
        self.needs = needs  # number of devices of each test
        self.devices, self.free = devices, list(devices)
        self.running: dict[int, list[str]] = {}  # test -> its devices
        self.waiting: list[int] = []
        for test in range(len(needs)):
            self.repeat(test)

    def repeat(self, test: int) -> None:
        """Add a test to the waiting tests. A test that has already run then runs once more."""
        insort(self.waiting, test, key=lambda test: (-self.needs[test], test))

    def start_next(self) -> int | None:
        """Return the test that starts now, and store its devices in `running`. Returns None if no waiting test can start."""
        test = next((test for test in self.waiting if self.needs[test] <= len(self.free)), None)
        if test is not None:
            self.waiting.remove(test)
            self.running[test] = [self.free.pop(0) for _ in range(self.needs[test])]
        return test

    def end(self, test: int) -> list[str]:
        """Free and return the devices of a test that has ended or crashed."""
        devices = self.running.pop(test)
        for device in devices:
            insort(self.free, device, key=self.devices.index)
        return devices


@dataclass(frozen=True)
class DeviceUse:
    """A finished test: its id, its devices, and when it started and ended (s)."""

    test: str
    devices: list[str]
    start_s: float
    end_s: float


def summary_of(devices: Sequence[str], uses: Sequence[DeviceUse]) -> dict[str, Any]:
    """Return the wall time (s), a lower bound of it for any order of the tests (s), and the busy fraction of each device."""
    wall = max(use.end_s for use in uses) - min(use.start_s for use in uses)
    spans = [use.end_s - use.start_s for use in uses]
    area = sum(span * len(use.devices) for span, use in zip(spans, uses, strict=True))
    busy = {
        device: sum(span for span, use in zip(spans, uses, strict=True) if device in use.devices) / wall
        for device in devices
    }
    return {"wall_s": wall, "lower_bound_s": max(area / len(devices), *spans), "busy": busy}


class DeviceScheduling(LoadScheduling):
    """Scheduler of pytest-xdist that sends each test to an idle worker, together with its devices."""

    def __init__(self, config: pytest.Config, log: Any, devices: Sequence[str], uses: list[DeviceUse]):
        super().__init__(config, log)
        self.devices, self.uses = devices, uses  # this object appends every finished test to `uses`
        self.queue = DeviceSchedule(devices, [])
        self.ids: list[str] = []
        self.starts: dict[int, float] = {}  # running test -> time of its start (s)

    @property
    def has_pending(self) -> bool:
        return bool(self.queue.waiting or self.queue.running)

    @property
    def tests_finished(self) -> bool:
        return self.collection_is_completed and not self.has_pending

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        needs = json.loads(Path(node.workerinput[NEEDS_FILE]).read_text())
        super().add_node_collection(
            node, [f"{test} needs {need}" for test, need in zip(collection, needs, strict=True)]
        )
        # pytest-xdist rejects a collection only if it comes from a worker that replaces a crashed worker.
        if node not in self.node2collection:
            raise RuntimeError(f"{node} collected other tests than the workers before it")

    def schedule(self) -> None:
        """Start tests. pytest-xdist makes the first call when all workers have collected their tests, which must be the same."""
        if self.collection is None and self._check_nodes_have_same_collection():
            self.collection = next(iter(self.node2collection.values()))
            ids_and_needs = [entry.rpartition(" needs ") for entry in self.collection]
            self.ids = [test for test, _, _ in ids_and_needs]
            self.queue = DeviceSchedule(self.devices, [int(need) for _, _, need in ids_and_needs])
        self._start_tests()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        self.node2pending[node].remove(item_index)
        self._end(item_index)

    def mark_test_pending(self, item: str) -> None:
        self.queue.repeat(self.ids.index(item))
        self._start_tests()

    def remove_node(self, node: Any) -> str | None:
        """Forget a worker that has ended. If it crashed during a test, free the devices of the test and return the test's id."""
        crashed = self.node2pending.pop(node)
        for test in crashed:
            self._end(test)
        return self.ids[crashed[0]] if crashed else None

    def _end(self, test: int) -> None:
        devices = self.queue.end(test)
        self.uses.append(DeviceUse(self.ids[test], devices, self.starts.pop(test), time.monotonic()))
        self._start_tests()

    def _start_tests(self) -> None:
        for node, tests in self.node2pending.items():
            if node in self.node2collection and not (tests or node.shutting_down):
                test = self.queue.start_next()
                if test is None:
                    return
                tests.append(test)
                self.starts[test] = time.monotonic()
                node.sendcommand("runtests", indices=[test], devices=self.queue.running[test])


class DeviceProcess:
    """Part of the plug-in for a process that runs tests on `devices`."""

    def __init__(self, devices: Sequence[str]):
        self.devices = devices

    def need(self, item: pytest.Item) -> int:
        """Return the number of devices that a test occupies. A test that is skipped for lack of devices occupies one device."""
        need = devices_needed(item)
        return need if need <= len(self.devices) else 1

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (need := devices_needed(item)) > len(self.devices):
                item.add_marker(pytest.mark.skip(f"devices needed: {need}, available: {len(self.devices)}"))


class DeviceWorker(DeviceProcess):
    """Part of the plug-in for a worker of pytest-xdist: runs one test at a time, on the devices that the scheduler chose for it.

    The loop of pytest-xdist starts a test only when it also knows the next test, so that it can keep the fixtures that both tests
    use. Meanwhile, the devices of the first test would be idle. The loop of this class starts a test at once, and keeps only the
    fixtures of the session.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write to a file how many devices each test needs, before pytest-xdist sends the ids of the tests to the scheduler."""
        needs = [self.need(item) for item in session.items]
        Path(session.config.workerinput[NEEDS_FILE]).write_text(json.dumps(needs))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        plugins = session.config.pluginmanager.get_plugins()
        connection: Any = next(plugin for plugin in plugins if type(plugin).__name__ == "WorkerInteractor")
        commands: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        shutdown = ("shutdown", {})
        connection.channel.setcallback(commands.put, endmarker=shutdown)
        for _, command in iter(commands.get, shutdown):
            (index,) = command["indices"]
            connection.item_index = index  # pytest-xdist adds this number to each report of the test
            start = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(VISIBLE, ",".join(command["devices"]))
                # `nextitem` may be any node: pytest keeps the fixtures of this node and of its parents.
                session.config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=session)
            duration = time.monotonic() - start
            connection.sendevent("runtest_protocol_complete", item_index=index, duration=duration)
            if session.shouldfail or session.shouldstop:
                break
        return True


class DeviceController(DeviceProcess):
    """Part of the plug-in for the main pytest process: gives devices to the tests, and reports how busy the devices were."""

    def __init__(self, devices: Sequence[str], folder: Path):
        super().__init__(devices)
        self.folder = folder  # folder of the workers' files (NEEDS_FILE)
        self.uses: list[DeviceUse] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput |= {"devices": self.devices, NEEDS_FILE: str(self.folder / node.gateway.id)}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> DeviceScheduling:
        return DeviceScheduling(config, log, self.devices, self.uses)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test on the first devices of the list. pytest calls this hook only if there are no workers."""
        devices, start = list(self.devices[: self.need(item)]), time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VISIBLE, ",".join(devices))
            result = yield
        self.uses.append(DeviceUse(item.nodeid, devices, start, time.monotonic()))
        return result

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if not self.uses:
            return
        summary = summary_of(self.devices, self.uses)
        terminalreporter.section("devices")
        for device, fraction in summary["busy"].items():
            terminalreporter.line(f"device {device}: busy {fraction:4.0%} of the time")
        wall, bound = summary["wall_s"], summary["lower_bound_s"]
        terminalreporter.line(
            f"{len(self.uses)} tests took {wall:.1f} s; any order of them needs at least {bound:.1f} s"
        )
        if path := config.getoption("devices_report"):
            tests = [asdict(use) for use in self.uses]
            Path(path).write_text(json.dumps({**summary, "tests": tests}, indent=1) + "\n")


def devices_needed(item: pytest.Item) -> int:
    """Return the number of devices that a test needs: the argument of its marker `devices`, or 1."""
    marker = item.get_closest_marker("devices")
    need = marker.args[0] if marker else 1
    if not (isinstance(need, int) and need >= 1):
        raise ValueError(f"{item.nodeid}: devices({need!r}); expected a number of devices, at least 1")
    return need


def visible_gpus() -> list[str]:
    """Return the ids of the GPUs that CUDA_VISIBLE_DEVICES shows to this process. Does not initialize CUDA."""
    if VISIBLE in os.environ:
        return [gpu for gpu in os.environ[VISIBLE].split(",") if gpu]
    import torch  # imported only here, because the import takes seconds

    return [str(number) for number in range(torch.cuda.device_count())]


def scheduled_devices(config: pytest.Config) -> list[str]:
    """Return the ids of the devices on which this plug-in runs tests, or an empty list if the plug-in is not in use.

    Raises UsageError if `--devices` is less than 1 or more than the number of visible GPUs.
    """
    count, gpus = config.getoption("devices"), re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr"))
    if count is None and not gpus:
        return []
    visible = visible_gpus()
    if count is None:
        return visible
    if count < 1 or 0 < len(visible) < count:
        most = f" and at most {len(visible)}, the number of visible GPUs" if visible else ""
        raise pytest.UsageError(f"--devices {count}: expected at least 1{most}")
    return visible[:count] or [str(number) for number in range(count)]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("devices", "tests that share the devices of this machine")
    group.addoption("--devices", type=int, help="Number of devices; with -m gpu, all visible GPUs by default.")
    group.addoption("--devices-report", metavar="FILE", help="Write when each test ran, and on which devices, as JSON.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "devices(count): the test needs this number of devices at the same time, 1 by default"
    )
    if hasattr(config, "workerinput"):
        if "devices" in config.workerinput:
            config.pluginmanager.register(DeviceWorker(config.workerinput["devices"]))
        return
    if not (devices := scheduled_devices(config)):
        return
    workers = config.getoption("numprocesses", 0)  # None: the command has no -n
    if workers not in (None, 0, len(devices)):
        raise pytest.UsageError(
            f"-n {workers}: expected one worker for each of {len(devices)} devices; leave -n out, or use -n0"
        )
    folder = TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    config.pluginmanager.register(DeviceController(devices, Path(folder.name)))
    if workers is None and len(devices) > 1 and not config.getoption("usepdb"):
        config.option.tx, config.option.dist = ["popen"] * len(devices), "load"  # the options that -n sets


@pytest.fixture
def devices(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Ids of the devices of this test. The marker `devices` says how many (1 by default). Skips the test if there are fewer.

    CUDA_VISIBLE_DEVICES contains these ids while the test runs. One process runs many tests, and a change of the variable has no
    effect in a process that has used CUDA. So a test must use CUDA only in processes that it starts, not in its own process.
    """
    found, need = visible_gpus(), devices_needed(request.node)
    if len(found) < need:
        pytest.skip(f"devices needed: {need}, available: {len(found)}")
    yield found[:need]
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), (
        f"{request.node.nodeid} used CUDA in the process of pytest, so later tests could not change their devices. "
        "Use CUDA only in processes that the test starts."
    )
