"""Compares the memory and time of `mrl convert` with those of a plain copy of the same bytes.

    python benchmarks/convert.py [--folder /tmp] [--layers 28] [--max-shard-bytes 1e9] [--repeats 3] [--warm] [--json FILE]

The script writes a random bfloat16 model with the sizes of Qwen3-1.7B (3.4 GB). It converts the model to Megatron and back, in
separate processes, and then removes all files. Memory is the peak resident size of a process, including mapped pages. The table
shows it with and without the memory of the imports. The copy uses shutil and syncs each file, as the conversions do. Before each
run, the source is dropped from the page cache. With --warm, the source stays in the page cache.
"""

import argparse
import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import measurements
from models.conversion.hf_writer import HFFolderWriter
from models.conversion.resumable_folder import ResumableFolder, fsync_path
from models.families import family_of
from models.hf_config import HFConfig

QWEN3_1_7B = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    initializer_range=0.02,
    attention_bias=False,
    attention_dropout=0.0,
    use_sliding_window=False,
)
COPY = """
import shutil, sys
from models.conversion.resumable_folder import fsync_path
from pathlib import Path
source, target = map(Path, sys.argv[1:])
target.mkdir()
for path in source.iterdir():
    shutil.copyfile(path, target / path.name)
    fsync_path(target / path.name)
"""
CONVERT = """
import sys
from mrl.commands.convert import main
assert main(sys.argv[1:]) == 0
"""
BASE = {  # conversion -> the copy with which the conversion is compared
    "to-megatron": "copy of the Hugging Face folder",
    "to-hf": "copy of the Megatron checkpoint",
}
IMPORTS = "import mrl.commands.convert, models.conversion.convert_checkpoint, rich.progress"
PEAK = """
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""  # kB; getrusage would include the memory of the process before exec


def write_model(folder: Path, layers: int, max_shard_bytes: int) -> None:
    """Write random bfloat16 weights, one tensor at a time."""
    config = folder.with_name("config")
    config.mkdir()
    (config / "config.json").write_text(json.dumps(QWEN3_1_7B | {"num_hidden_layers": layers}))
    hf = HFConfig.load(config)
    family = family_of(hf)
    shapes = family.hf_shapes(family.read(hf))
    torch.manual_seed(0)
    with ResumableFolder.beside(folder, {}) as partial:
        writer = HFFolderWriter(partial, {name: ("BF16", shape) for name, shape in shapes.items()}, max_shard_bytes)
        for name, shape in shapes.items():
            writer.write(name, torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02))
        writer.complete(config, {})


def run(code: str, *arguments: str) -> tuple[float, float]:
    """Run `code` in a new process. Returns the seconds and the peak resident MB of this process."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", code + PEAK, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."})
    return time.perf_counter() - begin, int(done.stdout.split()[-1]) * 1024 / 1e6


def drop_from_page_cache(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.iterdir():
        fsync_path(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(methods: dict[str, Sequence[str]], args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Run the methods in turn, `args.repeats` times each. Returns (seconds, MB) of each run, by method.

    The output of a method is removed before the method runs again.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for _ in range(args.repeats):
        for name, command in methods.items():
            source, target = (Path(part.rpartition("=")[2]) for part in command[-2:])
            shutil.rmtree(target, ignore_errors=True)
            if not args.warm:
                drop_from_page_cache(source)
            found[name].append(run(*command))
            if name not in BASE:
                shutil.rmtree(target)
    return found


def report(work: Path, args: argparse.Namespace) -> None:
    """Write the model, measure all methods, and print the table."""
    model, megatron, back = (work / name for name in ("model", "megatron", "back"))
    write_model(model, args.layers, int(args.max_shard_bytes))
    size = f"max_shard_bytes={args.max_shard_bytes}"
    methods = {  # the last two arguments are source and target
        "copy of the Hugging Face folder": [COPY, f"{model}", f"{work}/copy"],
        "to-megatron": [CONVERT, "to-megatron", size, f"model.path={model}", f"output={megatron}"],
        "copy of the Megatron checkpoint": [COPY, f"{megatron}", f"{work}/copy"],
        "to-hf": [CONVERT, "to-hf", size, f"model.path={model}", f"checkpoint={megatron}", f"output={back}"],
    }
    imports = run(IMPORTS)
    found = measure(methods, args)
    shards = sorted(model.glob("*.safetensors"))
    assert all(filecmp.cmp(path, back / path.name, shallow=False) for path in shards), (
        "the files differ after the round trip"
    )
    measurements.write(args.json, measurements_of(found, max(path.stat().st_size for path in shards)))
    show(found, imports, [path.stat().st_size for path in shards])


def measurements_of(found: dict[str, list[tuple[float, float]]], largest: int) -> list[measurements.Measurement]:
    """Return the seconds of conversions divided by those of copies, and the memory divided by the size of the largest file."""
    result = []
    for name, base in BASE.items():
        seconds = ([s for s, _ in found[method]] for method in (name, base))
        result.append(measurements.paired_ratio(f"{name}: seconds over a copy", *seconds))
        memory = [megabytes * 1e6 / largest for _, megabytes in found[name]]
        result.append(measurements.of_repeats(f"{name}: memory over the largest file", memory, "ratio", "ratio"))
    return result


def show(found: dict[str, list[tuple[float, float]]], imports: tuple[float, float], sizes: list[int]) -> None:
    largest = max(sizes) / 1e6
    title = f"{sum(sizes) / 1e9:.2f} GB, largest file {largest:.0f} MB; imports {imports[0]:.1f} s, {imports[1]:.0f} MB"
    heads = ("", "s", "over a copy", "MB", "over largest file", "MB without imports", "over largest file")
    table = Table(*heads, title=title)
    for name, runs in found.items():
        seconds, base = (statistics.median(s for s, _ in found[method]) for method in (name, BASE.get(name, name)))
        row = [f"{seconds:.1f} ({min(runs)[0]:.1f} to {max(runs)[0]:.1f})", f"{seconds / base:.2f}"]
        if name in BASE:
            peak = max(mb for _, mb in runs)
            row += [text for mb in (peak, peak - imports[1]) for text in (f"{mb:.0f}", f"{mb / largest:.2f}")]
        table.add_row(name, *row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder on a disk with room for four models")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model")
    parser.add_argument("--max-shard-bytes", type=float, default=1e9, help="bytes of the largest file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="do not drop the source from the page cache")
    measurements.add_json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="mrl_convert_") as work:
        report(Path(work), args)


if __name__ == "__main__":
    main()
