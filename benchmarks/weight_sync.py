"""Measures weight sync: the number of sent bytes, the time compared with a memory copy, and the size of weight differences.

    python benchmarks/weight_sync.py bytes                    compiles transfer plans for published models; sends nothing
    python benchmarks/weight_sync.py speed [--pushes 5]       pushes a 0.5B-parameter model from Megatron to a real engine
    python benchmarks/weight_sync.py delta [--steps 20]       trains with weight_sync.delta=true, which sends only differences

`speed` needs 8 GiB of memory and takes a minute. `delta` trains the quickstart once for each name in `--runs`, by default three
times. With --json FILE, each command also writes its measurements into a JSON file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import measurements
from benchmarks.measurements import Measurement
from mrl.core.types import SyncReport

CONSOLE = Console(width=110)
SHARED = dict(head_dim=128, rope_theta=1e6, tie_word_embeddings=False)
MODELS = {
    "Qwen3-0.6B": ("Qwen3ForCausalLM", dict(hidden_size=1024, intermediate_size=3072, layers=28, heads=16, kv=8)),
    "Qwen3-8B": ("Qwen3ForCausalLM", dict(hidden_size=4096, intermediate_size=12288, layers=36, heads=32, kv=8)),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        dict(hidden_size=2048, intermediate_size=6144, layers=48, heads=32, kv=4, moe=768, experts=128, topk=8),
    ),
}
LAYOUTS = [
    ("Qwen3-0.6B", dict(dp=8), dict(tp=1), 8),
    ("Qwen3-8B", dict(tp=2, pp=2, dp=4), dict(tp=2), 8),
    ("Qwen3-8B", dict(tp=4, pp=2, dp=2), dict(tp=1), 16),
    ("Qwen3-30B-A3B", dict(tp=2, pp=2, dp=4, ep=8, etp=1), dict(tp=8, ep=8), 2),
    ("Qwen3-30B-A3B", dict(tp=4, dp=4, ep=4), dict(tp=4), 4),
]
DELTA_RUNS = {  # name on the command line -> (title, overrides of the quickstart)
    "float32": ("float32, learning rate of the quickstart", []),
    "bfloat16": ("bfloat16, learning rate of the quickstart", ["model.dtype=bfloat16"]),
    "bfloat16_low_lr": (
        "bfloat16, learning rate 1e-6",
        ["model.dtype=bfloat16", "optim.lr=1e-6", "optim.warmup_steps=0"],
    ),
}


def config_of(name: str) -> dict:
    """Return the content of a config.json for the model `name`."""
    architecture, s = MODELS[name]
    moe = {}
    if "experts" in s:
        moe = dict(num_experts=s["experts"], num_experts_per_tok=s["topk"], moe_intermediate_size=s["moe"])
        moe |= dict(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)
    return dict(
        architectures=[architecture],
        model_type="qwen3_moe" if moe else "qwen3",
        vocab_size=151936,
        hidden_size=s["hidden_size"],
        intermediate_size=s["intermediate_size"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"],
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        hidden_act="silu",
        attention_bias=False,
        attention_dropout=0.0,
        **SHARED,
        **moe,
    )


def count_bytes(arguments: argparse.Namespace) -> None:
    """Print, for each layout, the bytes that the transfer plan sends divided by the bytes that the engines hold."""
    from models.families import family_of
    from models.hf_config import HFConfig
    from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes
    from mrl.weight_sync.transfer_plan import (
        LinkSpeeds,
        compile_transfer_plan,
        estimate_transfer_cost,
        even_pipeline_stages,
        trainer_shards,
    )
    from parallel.dims import ParallelDims

    table, found = (
        Table("model", "trainer", "engines", "sent over held", "busiest over mean", "messages", "GB", "compile, s"),
        [],
    )
    for name, axes, engine, count in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config_of(name)))
            hf = HFConfig.load(folder)
            family = family_of(hf)
            arch = family.read(hf)
        start, dims = time.perf_counter(), ParallelDims(**axes)
        layout = EngineLayout.of(family, arch, EngineParallelSizes(**engine))
        owned = trainer_shards(layout.rows, arch.sizes, dims, even_pipeline_stages(arch.num_layers, dims))
        plan = compile_transfer_plan(owned, layout, count, lambda _: ("bfloat16", 2), 512 << 20)
        cost = estimate_transfer_cost(plan, dims.world_size, LinkSpeeds(25.0, 25.0, 50.0), shared=False)
        seconds = time.perf_counter() - start
        messages = sum(sender.messages for sender in cost.senders)
        each = "x".join(f"{k}{v}" for k, v in engine.items())
        cells = [f"{cost.ratio:.5f}", f"{cost.imbalance:.3f}", f"{messages:,}", f"{cost.sent_bytes / 1e9:.1f}"]
        table.add_row(name, str(dims), f"{count} of {each}", *cells, f"{seconds:.1f}")
        place = f"{name}, {dims}, {count} engines of {each}"
        found += [
            Measurement(f"{place}: bytes sent over bytes held", cost.ratio, "ratio", "count"),
            Measurement(f"{place}: busiest sender over mean", cost.imbalance, "ratio", "count"),
            Measurement(f"{place}: messages", messages, "messages", "count"),
        ]
    CONSOLE.print(table)
    measurements.write(arguments.json, found)


def write_half_billion(folder: Path) -> None:
    """Write a random Qwen2-0.5B in bfloat16."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, vocab_size=151936)
    heads = dict(num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=2048)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).to(torch.bfloat16).save_pretrained(folder)


def copy_seconds(nbytes: int) -> float:
    """Return the median duration of a memory copy of this size. Both arrays are in memory before the copy."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    found = []
    for _ in range(7):
        start = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def push_repeatedly(sync: Any, server: Any, pushes: int) -> tuple[list[SyncReport], list[float]]:
    """Push `pushes` + 1 times. Returns the report of each push, and the CPU-seconds of this process and the engine."""
    reports, cpu = [], []
    for version in range(pushes + 1):
        before = sum(os.times()[:2]) + server.cpu_seconds()
        reports.append(sync.push(version))
        cpu.append(sum(os.times()[:2]) + server.cpu_seconds() - before)
    sync.close()
    return reports, cpu


def measure_speed(arguments: argparse.Namespace) -> None:
    """Print the duration of pushes of a 0.5B model, by transport and bucket size, and compare it with a memory copy."""
    from parallel import device

    device.patch_megatron_for_cpu()
    import torch
    import torch.distributed as dist

    from models.conversion.hf_reader import HFWeights
    from models.conversion.weight_bridge import WeightBridge
    from models.hf_config import HFConfig
    from models.model_builder import build_model
    from mrl.config.process_schema import WeightSyncConfig
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args
    from mrl.weight_sync.engine_layout import EngineLayout
    from mrl.weight_sync.session import LiveSync
    from parallel import groups
    from parallel.dims import ParallelDims

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        write_half_billion(folder)
        args = default_server_args("bfloat16", 512, max_total_tokens=1024) | {"model_path": str(folder)}
        with EngineServer(args, Path(scratch, "engine.log")) as server:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            groups.initialize(ParallelDims(), seed=0)
            hf = HFConfig.load(folder)
            chunks = build_model(hf, ParallelDims(), torch.bfloat16)
            bridge = WeightBridge(hf, chunks, ParallelDims())
            bridge.load(HFWeights(folder))
            server.wait_ready(300)
            found = []
            table = Table(
                "transport", "bucket, MiB", "GB", "first, s", "median, s", "GB/s", "over one copy", "CPU-s, both"
            )
            for transport in ("shared_memory", "process_group"):
                for mebibytes in arguments.buckets:
                    settings = WeightSyncConfig(transport=transport, bucket_bytes=mebibytes << 20)
                    layout_of = partial(EngineLayout.of, bridge.family, bridge.arch)
                    sync = LiveSync([server.url], bridge, layout_of, settings)
                    reports, cpu = push_repeatedly(sync, server, arguments.pushes)
                    size = reports[0].bytes
                    median = statistics.median(r.seconds for r in reports[1:])
                    copy = copy_seconds(size)
                    ratio = f"{median / copy:.1f}"
                    name, seconds = f"{transport}, {mebibytes} MiB", [report.seconds for report in reports[1:]]
                    found += [
                        measurements.paired_ratio(f"{name}: seconds over one copy", seconds, [copy] * len(seconds)),
                        measurements.of_repeats(f"{name}: CPU-s of both sides", cpu[1:], "CPU-s", "cpu_s"),
                    ]
                    numbers = [f"{reports[0].seconds:.2f}", f"{median:.2f}", f"{size / median / 1e9:.2f}", ratio]
                    cells = [f"{mebibytes}", f"{size / 1e9:.2f}", *numbers, f"{statistics.median(cpu[1:]):.2f}"]
                    table.add_row(transport, *cells)
            dist.destroy_process_group()
    CONSOLE.print(table)
    measurements.write(arguments.json, found)


def measure_delta(arguments: argparse.Namespace) -> None:
    """Print, for training runs, the bytes of the sent differences divided by the bytes of the weights."""
    table, found = Table("run", "steps", "first step", "median", "last", "reward, first and last five"), []
    for name, overrides in (DELTA_RUNS[key] for key in dict.fromkeys(arguments.runs)):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "run")
            fixed = [f"run.dir={folder}", "weight_sync.delta=true", "trainer.stop_reward=null", "trainer.save=false"]
            line = [
                sys.executable,
                "-m",
                "mrl.cli",
                "train",
                *fixed,
                f"trainer.max_steps={arguments.steps}",
                *overrides,
            ]
            env = os.environ | {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
            subprocess.run(line, check=True, env=env, stdout=subprocess.DEVNULL)
            steps = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        sent = [step["weight_sync/compressed_fraction"] for step in steps]
        reward = [np.mean([step["reward/mean"] for step in part]) for part in (steps[:5], steps[-5:])]
        cells = [f"{sent[0]:.4f}", f"{statistics.median(sent):.4f}", f"{sent[-1]:.4f}"]
        table.add_row(name, str(len(steps)), *cells, f"{reward[0]:.3f}, {reward[1]:.3f}")
        found.append(
            Measurement(f"{name}: bytes sent over bytes of weights", statistics.median(sent), "ratio", "ratio")
        )
    CONSOLE.print(table)
    measurements.write(arguments.json, found)


def main() -> None:
    """Parse the arguments and run one of the three measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    count = kinds.add_parser("bytes")
    count.set_defaults(run=count_bytes)
    speed = kinds.add_parser("speed")
    speed.add_argument("--pushes", type=int, default=5)
    speed.add_argument("--buckets", type=int, nargs="+", default=[4, 16, 64, 256], help="MiB")
    speed.set_defaults(run=measure_speed)
    delta = kinds.add_parser("delta")
    delta.add_argument("--steps", type=int, default=20)
    delta.add_argument("--runs", nargs="+", choices=DELTA_RUNS, default=list(DELTA_RUNS), help="trainings to measure")
    delta.set_defaults(run=measure_delta)
    for kind in (count, speed, delta):
        measurements.add_json_option(kind)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
