"""Programs that run on both devices: on the CPU in `make test-all`, and on GPUs with `pytest -m gpu`.

A program is a function of a test file. It asks `parallel.device` for the device. Statements that need CUDA, such as those about
GPU memory, are under `if has_cuda():`. So a change that breaks a program fails on a machine without a GPU.
"""

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_in_processes

sys.path.append(str(Path(__file__).parents[1] / "distributed"))  # for models_for_layouts


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.extended), pytest.param("cuda", marks=pytest.mark.gpu)])
def device_type(request) -> str:
    """Device on which the programs of the test run."""
    return request.param


@pytest.fixture
def run_program(device_type, request):
    """`run_program(dims, program, *args)` -> [program(rank, *args) of each rank]."""
    return run_on_gpus if device_type == "cuda" else request.getfixturevalue("run_ranks")


def run_on_gpus(dims, program: Callable, *args: Any) -> list[Any]:
    """Run a program with one GPU for each rank. Skips the test if this machine has fewer GPUs."""
    if torch.cuda.device_count() < dims.world_size:
        pytest.skip(f"{dims.world_size} ranks need {dims.world_size} GPUs, and this machine has fewer")
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
        processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()
