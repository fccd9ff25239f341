"""Measures peak memory and CPU time of log-probabilities and their gradients, with all logits at once and in chunks of logits.

    python benchmarks/logprobs_memory.py [--positions 8192] [--hidden 512] [--vocab 32000] [--entropy] [--repeats 1]

Each method runs one forward and one backward pass, in a new process with one thread. The memory of a method is the peak resident
size of the process minus its peak resident size before the measurement. By then, the process has imported all modules, and has
created the inputs and zeroed gradients. The methods alternate.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import measurements
from mrl.bench.device_rates import whole_logprobs
from parallel.logprobs import linear_logprobs

METHODS = {"whole logits": 0, "chunks of 1024": 1024, "chunks of 256": 256}  # rows of logits in a chunk; 0: all rows


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run one forward and one backward pass in this process.

    Returns the peak memory minus the inputs (MiB), the CPU-seconds, and the sum of the log-probabilities as a checksum.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(args.positions, args.hidden).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden) / args.hidden**0.5).requires_grad_()
    hidden.grad, weight.grad = torch.ones_like(hidden).zero_(), torch.ones_like(weight).zero_()
    targets = torch.randint(args.vocab, (args.positions,))
    before = resource.getrusage(resource.RUSAGE_SELF)
    if args.chunk:
        group = dist.distributed_c10d._get_default_group()
        result = linear_logprobs(hidden, weight, targets, group, args.vocab, 1.0, args.chunk, args.entropy)
    else:
        result = whole_logprobs(hidden, weight, targets, args.entropy)
    (result[0].sum() + result[1].sum()).backward()
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"mib": (after.ru_maxrss - before.ru_maxrss) / 1024, "cpu_s": seconds, "sum": result[0].sum().item()}


def measure_in_new_process(chunk: int) -> dict[str, float]:
    """Run `measure` in a new process, with the command-line arguments of this process."""
    command = [sys.executable, *sys.argv, "--chunk", str(chunk)]
    environment = os.environ | measurements.MEMORY_ENVIRONMENT
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout)


def report(args: argparse.Namespace) -> None:
    """Measure every method and print the table."""
    logits = args.positions * args.vocab * 4 / 2**20
    title = (
        f"L={args.positions} H={args.hidden} V={args.vocab} float32, logits {logits:.0f} MiB, entropy {args.entropy}"
    )
    runs = {name: [] for name in METHODS}
    for _ in range(args.repeats):
        for name, chunk in METHODS.items():
            runs[name].append(measure_in_new_process(chunk))
    table = Table("method", "MiB", "over whole", "CPU-s", "over whole", "sum of log-probabilities", title=title)
    middle = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }
    base = middle["whole logits"]
    for name, result in middle.items():
        ratios = [f"{result[key] / base[key]:.3f}" for key in ("mib", "cpu_s")]
        numbers = [f"{result['mib']:.0f}", ratios[0], f"{result['cpu_s']:.2f}", ratios[1], f"{result['sum']:.2f}"]
        table.add_row(name, *numbers)
    Console().print(table)
    measurements.write(args.json, measurements_of(runs))


def measurements_of(runs: dict[str, list[dict[str, float]]]) -> list[measurements.Measurement]:
    """Return the CPU-seconds of "whole logits", and the memory and CPU-seconds of chunks divided by those of "whole logits"."""
    found = {name: {key: [run[key] for run in of_name] for key in of_name[0]} for name, of_name in runs.items()}
    base = found.pop("whole logits")
    result = [measurements.of_repeats("whole logits: CPU-s", base["cpu_s"], "CPU-s", "cpu_s")]
    for name, of_name in found.items():
        for key, what in (("mib", "memory"), ("cpu_s", "CPU-s")):
            result.append(measurements.paired_ratio(f"{name}: {what} over whole logits", of_name[key], base[key]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=8192, help="L: number of positions")
    parser.add_argument("--hidden", type=int, default=512, help="H: hidden size")
    parser.add_argument("--vocab", type=int, default=32000, help="V: size of the vocabulary")
    parser.add_argument("--entropy", action="store_true", help="also compute entropies and their gradient")
    parser.add_argument("--chunk", type=int, help="measure only this chunk size, in this process; 0: whole logits")
    parser.add_argument("--repeats", type=int, default=1)
    measurements.add_json_option(parser)
    args = parser.parse_args()
    if args.chunk is None:
        report(args)
    else:
        print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
