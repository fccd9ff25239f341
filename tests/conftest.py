"""Shared by all tests: one thread per process, and one preloaded parent that multi-process tests fork from."""

import os

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", RAY_USAGE_STATS_ENABLED="0")

import multiprocessing
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(rank: int, dims, port: int, results, fn: Callable, args: tuple) -> None:
    import torch

    from parallel import device, groups

    torch.set_num_threads(1)
    try:
        device.init_process_group(rank, dims.world_size, "127.0.0.1", port, timeout_s=60)
        groups.initialize(dims, seed=0)
        results.put((rank, fn(rank, *args), None))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # skip the parent's atexit hooks, which the fork inherited


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(dims, fn, *args)` -> [fn(rank, *args) of each rank], each rank a fork of this preloaded process."""
    from parallel import device

    device.install()
    import mrl.workers.actor  # noqa: F401  Megatron, once, before the forks

    def run(dims, fn: Callable, *args: Any, timeout_s: float = 120) -> list[Any]:
        context = multiprocessing.get_context("fork")
        results, port = context.Queue(), free_port()
        ranks = [
            context.Process(target=_rank_main, args=(rank, dims, port, results, fn, args))
            for rank in range(dims.world_size)
        ]
        for process in ranks:
            process.start()
        got: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        try:
            while len(got) < dims.world_size:
                rank, value, error = results.get(timeout=max(0.1, end - time.monotonic()))
                assert error is None, f"rank {rank}:\n{error}"
                got[rank] = value
        except queue.Empty:
            raise AssertionError(f"ranks {sorted(set(range(dims.world_size)) - set(got))} did not answer") from None
        finally:
            for process in ranks:
                process.join(timeout=10 if len(got) == dims.world_size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
        return [got[rank] for rank in range(dims.world_size)]

    return run


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory):
    """A tiny random Qwen3 in Hugging Face form; `tiny_qwen3(vocab_size=..., tied=...)` -> folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    made = {}

    def make(vocab_size: int = 40, tied: bool = False):
        if (vocab_size, tied) not in made:
            torch.manual_seed(1)
            config = Qwen3Config(
                vocab_size=vocab_size,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=64,
                tie_word_embeddings=tied,
                initializer_range=0.2,
                rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            )
            model = Qwen3ForCausalLM(config)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" in name:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            folder = tmp_path_factory.mktemp(f"qwen3_{vocab_size}_{tied}")
            model.save_pretrained(folder)
            made[vocab_size, tied] = folder
        return made[vocab_size, tied]

    return make
