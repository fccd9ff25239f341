"""Programs that run on the CPU (`make test-all`) and on GPUs (`make test-gpu`).

A program is a function of a test file. It asks `parallel.device` for the device. Statements that need CUDA, such as those about
GPU memory, are under `if has_cuda():`. So a machine without a GPU runs all other statements of the program.

A test with a layout `dims` needs one device for each rank. A test without `dims` needs one device. tests/device_scheduler.py
assigns the devices.
"""

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_scheduler import devices_needed
from rank_processes import prepare_fork, run_in_processes

sys.path.append(str(Path(__file__).parents[1] / "distributed"))  # for models_for_layouts


def pytest_itemcollected(item: pytest.Item) -> None:
    """Declare that a test with a layout `dims` needs one device for each rank."""
    if "dims" in item.fixturenames:
        item.add_marker(pytest.mark.devices(item.callspec.params["dims"].world_size))


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.extended), pytest.param("cuda", marks=pytest.mark.gpu)])
def device_type(request) -> str:
    """Type of the devices on which the programs of the test run: cpu or cuda."""
    if request.param == "cuda":
        request.getfixturevalue("devices")  # skips the test if there are too few
        if not torch.cuda.device_count():
            pytest.skip("this machine has no GPU; -m extended runs the same program on the CPU")
    return request.param


@pytest.fixture
def run_program(device_type, request):
    """`run_program(dims, program, *args)` -> [program(rank, *args) of each rank]."""
    run = run_on_gpus if device_type == "cuda" else request.getfixturevalue("run_ranks")
    declared = devices_needed(request.node)

    def run_declared(dims, program: Callable, *args: Any) -> list[Any]:
        assert dims.world_size <= declared, f"{dims.world_size} ranks, but the test declares {declared} devices"
        return run(dims, program, *args)

    return run_declared


def run_on_gpus(dims, program: Callable, *args: Any) -> list[Any]:
    """Run a program with one GPU for each rank."""
    return run_in_processes(multiprocessing.get_context("spawn"), dims, program, args, timeout_s=250)


@pytest.fixture
def start_process(device_type, request):
    """`start_process(function, *args)` -> a running process."""
    if device_type == "cpu":
        request.getfixturevalue("run_ranks")  # patches Megatron for the CPU
    context = multiprocessing.get_context("fork" if device_type == "cpu" else "spawn")
    processes = []

    def start(function: Callable, *args: Any) -> Any:
        processes.append(context.Process(target=function, args=args))
        prepare_fork()
        processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()
