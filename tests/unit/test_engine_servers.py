"""Engine servers: where they run, which GPUs they see, and which servers are replaced when they end early."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from http_engines import spec_of

from mrl.config.process_schema import FaultToleranceConfig
from mrl.core.code_locations import python_path
from mrl.core.types import DeviceSlot
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.engines import hosts, launch_sglang, ray_engine, server
from mrl.rollout.engines.hosts import EngineServers
from mrl.rollout.engines.ray_engine import group_by_node, visible_devices_env
from mrl.rollout.engines.server import EngineServer
from mrl.rollout.engines.server_args import check_server_args, memory_saver_args

KILLED, FAILED, READY, PAUSED = "killed", "failed", "ready", "paused"


def slots(*places: str) -> list[DeviceSlot]:
    """Return the slots of these places. The place "a2" is GPU 2 of node a."""
    return [DeviceSlot(place[0], f"host of {place[0]}", place[1:], {}) for place in places]


def test_a_server_sees_exactly_its_gpus_in_the_order_of_its_ranks():
    assert visible_devices_env(slots("a6", "a7", "a4")) == {"CUDA_VISIBLE_DEVICES": "6,7,4"}
    assert visible_devices_env(slots("a", "a")) == {}, "a CPU slot has no device number"


def test_an_engine_has_equally_many_ranks_on_each_of_its_nodes():
    assert group_by_node(slots("a0", "a1", "b4", "b5")) == [slots("a0", "a1"), slots("b4", "b5")]
    with pytest.raises(
        ValueError, match="engine_tp=4: an engine would have 3 on host of a, 1 on host of b, and SGLang"
    ):
        group_by_node(slots("a0", "a1", "a2", "b0"))


def environment(folder, **arguments) -> dict[str, str]:
    """Return the environment variables of a server."""
    server = EngineServer(dict(model_path="m", **arguments), folder / "log")
    try:
        return server._environment(folder)
    finally:
        server.stop()


def test_ranks_on_several_nodes_do_not_use_a_rendezvous_file(tmp_path):
    variable = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    assert environment(tmp_path)[variable] == f"file://{tmp_path}/rendezvous"
    assert variable not in environment(tmp_path, nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:20000")


def test_an_engine_in_float32_multiplies_in_float32_unless_the_user_wants_tf32(monkeypatch):
    variables = ("NVIDIA_TF32_OVERRIDE", "TRITON_F32_DEFAULT")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variables[0], "1")
    launch_sglang.forbid_tf32()
    found = [os.environ.pop(name) for name in variables]
    assert found == ["1", "ieee"]


# A child that the server spawns runs the module again, under the name __mp_main__.
HIDDEN = """
import runpy, sys
runpy.run_module("mrl.rollout.engines.launch_sglang", run_name=sys.argv[1])
print("megatron" in sys.modules and sys.modules["megatron"] is None)
"""


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name, hidden", [("__mp_main__", True), ("another_module", False)])
def test_the_processes_of_a_server_cannot_import_megatron(name, hidden):
    """Megatron's import changes a setting of torch_memory_saver, so that a colocated engine could not capture CUDA graphs."""
    environment = os.environ | {"PYTHONPATH": python_path()}
    output = subprocess.check_output([sys.executable, "-P", "-c", HIDDEN, name], text=True, env=environment)
    assert output == f"{hidden}\n"


SET_TITLE = """
import os, pathlib, setproctitle
os.environ.update((name, value + "_changed") for name, value in os.environ.items() if name != "SPT_NOENV")
setproctitle.setproctitle("sglang::scheduler")
process = pathlib.Path("/proc/self")
print((process / "cmdline").read_text().strip("\\0 "), "SPT_NOENV=1" in (process / "environ").read_text())
"""


def test_the_processes_of_an_engine_get_their_titles_when_they_change_variables(tmp_path):
    command = [sys.executable, "-c", SET_TITLE]
    found = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["sglang::scheduler", "True"], "the hang report finds the scheduler by its title"


def test_an_engine_that_can_be_offloaded_can_release_the_memory_of_its_cuda_graphs(tmp_path, monkeypatch):
    variable, saver = "SGLANG_MEMORY_SAVER_CUDA_GRAPH", memory_saver_args("cuda")
    assert environment(tmp_path, **saver)[variable] == "1"
    assert variable not in environment(tmp_path)
    assert variable not in environment(tmp_path, **saver | dict(cuda_graph_backend_prefill="breakable"))
    monkeypatch.setenv(variable, "0")
    assert environment(tmp_path, **saver)[variable] == "0", "a user's value wins"


@pytest.fixture
def toolkit(monkeypatch, tmp_path) -> Path:
    """Create NVIDIA's packages with a CUDA compiler, as the GPU lock installs them."""
    folder = tmp_path / "site" / "nvidia" / "cu13"
    for file in ("bin/nvcc", "include/cccl/nv/target", "lib/libcudart.so.13", "lib/libcublas.so.13"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    monkeypatch.setattr(server, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[folder.parent]))
    for name in ("CUDA_HOME", "CUDA_PATH", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_engines_on_gpus_find_the_cuda_compiler_of_the_lock(toolkit, tmp_path):
    env = environment(tmp_path, device="cuda")
    assert env["CUDA_HOME"] == str(toolkit)
    assert env["PATH"].split(":")[:2] == [str(toolkit / "bin"), str(Path(sys.executable).parent)]
    assert (Path(env["LIBRARY_PATH"]) / "libcudart.so").resolve() == toolkit / "lib" / "libcudart.so.13"
    assert env["CPLUS_INCLUDE_PATH"] == str(toolkit / "include" / "cccl")


def test_the_warm_up_of_a_gpu_may_take_as_long_as_its_kernels_compile(tmp_path):
    """SGLang ends an engine whose warm-up request exceeds a limit of SGLang. In mrl, cluster.start_timeout_s is the limit."""
    assert float(environment(tmp_path, device="cuda")["SGLANG_WARMUP_TIMEOUT"]) >= 3600
    assert "SGLANG_WARMUP_TIMEOUT" not in environment(tmp_path, device="cpu"), "on a CPU, there is no warm-up"


@pytest.mark.parametrize(("device", "name"), [("cuda", "CUDA_HOME"), ("cuda", "CUDA_PATH"), ("cpu", "NOTHING")])
def test_a_cuda_toolkit_that_the_user_chose_stays_and_a_cpu_needs_none(toolkit, tmp_path, monkeypatch, device, name):
    monkeypatch.setenv(name, "/opt/cuda")
    env = environment(tmp_path, device=device)
    assert env.get("CUDA_HOME", "/opt/cuda") == "/opt/cuda" and "LIBRARY_PATH" not in env


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_kernel_links_with_the_names_that_flashinfer_uses(toolkit, tmp_path):
    for library in (toolkit / "lib" / "libcudart.so.13", tmp_path / "libcuda.so.1"):
        subprocess.run(["cc", "-shared", "-o", library, "-x", "c", "/dev/null"], check=True)
    env = environment(tmp_path, device="cuda")
    env["LIBRARY_PATH"] += f":{tmp_path}"  # stands in for the folder of the driver
    command = ["cc", "-shared", "-o", tmp_path / "kernel.so", "-x", "c", "/dev/null", "-lcudart", "-lcuda"]
    linked = subprocess.run(command, env=env, capture_output=True, text=True)
    assert linked.returncode == 0, linked.stderr


@pytest.mark.parametrize("name", ["nnodes", "node_rank", "dist_init_addr"])
def test_users_cannot_set_the_nodes_of_an_engine(name):
    with pytest.raises(ValueError, match=rf"sglang.{name}=2 is set by mrl; "):
        check_server_args({name: 2})


def test_engines_and_their_replacements_run_on_the_slots_of_their_place(monkeypatch, tmp_path):
    started = []

    class FakeRayEngine:
        def __init__(self, slots, arguments, log_path, env):
            self.slots, self.url, self.log_path = slots, log_path.stem, log_path
            started.append((slots(), arguments["random_seed"], log_path.name, env["MRL_PROCESS_NAME"]))

        def start(self) -> None: ...

        def wait_ready(self, timeout_s: float) -> None: ...

        def stop(self, timeout_s: float = 20.0) -> None: ...

        def alive(self) -> bool:
            return True

    monkeypatch.setattr(ray_engine, "RayEngine", FakeRayEngine)
    pool = EnginePool(
        spec_of(tmp_path, num_engines=2, server_args={}, slots=lambda number: f"slots of {number}", seed=7)
    )
    assert pool.wait_ready(1) == ["engine_0", "engine_1"]
    assert pool.replace(["engine_1"], 1) == ["engine_0", "engine_2"]
    pool.close()
    assert started == [
        ("slots of 0", 7, "engine_0.log", "engine_0"),
        ("slots of 1", 8, "engine_1.log", "engine_1"),
        ("slots of 1", 9, "engine_2.log", "engine_2"),
    ]


@dataclass
class Starts:
    """Counts starts and stops. `fates`: what becomes of each server, in the order of starts. Later servers become ready."""

    fates: list[str]
    started: int = 0
    stopped: int = 0


@pytest.fixture
def start(monkeypatch, tmp_path):
    """`start(fates, **settings)` -> (EnginePool of servers without processes, Starts)."""

    def start(fates: list[str], **settings) -> tuple[EnginePool, Starts]:
        starts = Starts(fates)

        class FakeServer(EngineServer):
            def start(self) -> None:
                self.fate = starts.fates[starts.started] if starts.started < len(starts.fates) else READY
                starts.started += 1

            def wait_ready(self, timeout_s: float) -> None:
                if self.fate == PAUSED:
                    raise TimeoutError(f"the SGLang server at {self.url} was not ready after {timeout_s} s")
                if self.fate != READY:
                    raise RuntimeError(f"the SGLang server at {self.url} ended before it was ready")

            def alive(self) -> bool:
                return self.fate in (READY, PAUSED)

            @property
            def was_killed(self) -> bool:
                return self.fate == KILLED

            def stop(self, timeout_s: float = 20.0) -> None:
                super().stop(timeout_s)
                starts.stopped += 1

        monkeypatch.setattr(hosts, "EngineServer", FakeServer)
        own = dict(
            num_engines=2,
            server_args={},
            deterministic=False,
            fault_tolerance=FaultToleranceConfig(max_response_attempts=3),
        )
        return EnginePool(spec_of(tmp_path, **own | settings)), starts

    return start


def test_a_replacement_that_ends_before_it_is_ready_is_replaced_again(start):
    """The replacement may end for any reason, because engines with the same arguments have run before."""
    pool, starts = start([READY, READY, FAILED, KILLED, FAILED])
    before = pool.wait_ready(10)
    after = pool.replace([before[1]], 10)
    assert after[0] == before[0] and after[1] not in before
    assert (starts.started, starts.stopped) == (6, 4), "servers that ended are stopped as well"
    pool.close()


def test_the_replacement_of_a_server_does_not_wait_for_the_offloaded_servers(start):
    """An offloaded engine is paused until its next push, so SGLang does not report that it is ready."""
    pool, starts = start([])
    before = pool.wait_ready(10)
    pool._servers.servers[0].fate = PAUSED
    after = pool.replace([before[1]], 10)
    assert after[0] == before[0] and after[1] not in before and starts.started == 3
    pool._servers.servers[0].fate = KILLED
    assert before[0] not in pool.replace([after[1]], 10), "a server that has ended is still noticed"
    pool.close()


@pytest.mark.extended
def test_a_server_that_keeps_ending_raises(start):
    pool, starts = start([READY, READY, *[FAILED] * 10])
    before = pool.wait_ready(10)
    with pytest.raises(RuntimeError, match="ended before it was ready"):
        pool.replace([before[0]], 10)
    assert starts.started == 2 + 1 + 3, "the replacement, and max_response_attempts more"
    pool.close()


def test_a_server_that_ends_by_itself_at_the_first_start_is_not_replaced(start):
    pool, starts = start([FAILED])
    with pytest.raises(RuntimeError, match="ended before it was ready"):
        pool.wait_ready(10)
    assert starts.started == 2
    pool.close()


def test_a_server_that_was_killed_at_the_first_start_is_replaced_once(start):
    pool, starts = start([KILLED])
    pool.wait_ready(10)
    assert starts.started == 3
    pool.close()
    pool, starts = start([KILLED, READY, KILLED])
    with pytest.raises(RuntimeError, match="ended before it was ready"):
        pool.wait_ready(10)
    pool.close()


def test_the_end_of_a_killed_server_names_the_signal_and_the_usual_cause():
    servers = EngineServers.__new__(EngineServers)
    servers.servers = [SimpleNamespace(url="killed", was_killed=True), SimpleNamespace(url="ended", was_killed=False)]  # type: ignore[list-item]
    assert servers.end_reason("ended") == "its processes have ended" == servers.end_reason("replaced already")
    assert servers.end_reason("killed") == (
        "its processes have ended: killed by signal 9 (SIGKILL); the kernel's out-of-memory killer is the usual cause; check "
        "`dmesg`"
    )
