"""Measures peak memory and CPU time of distillation losses with gradients, relative to log-probabilities of sampled tokens.

    python benchmarks/distillation_memory.py [--positions 8192] [--hidden 128] [--vocab 151936] [--dtype bfloat16] [--repeats 1]

Each method runs one forward and one backward pass, in a new process with one thread. The memory of a method is the peak resident
size of the process minus its peak resident size before the measurement. By then, the process has imported all modules, and has
created the hidden states and the output layer of the policy, with zeroed gradients. So the memory includes the hidden states and
the output layer of the teacher, which have the same sizes. "sampled tokens" has no teacher. It computes log-probabilities and
entropies, as a policy loss does. "whole logits" computes the divergence from the logits of all positions. The methods alternate.
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
from torch import Tensor

from benchmarks import measurements
from parallel.distillation import divergence_of, linear_divergence, linear_top_k, linear_top_k_rest_logprobs
from parallel.logprobs import linear_logprobs
from parallel.trainer_config import Divergence

BASE = "sampled tokens"
METHODS = (BASE, "forward_kl", "reverse_kl", "js", "top 64", "whole logits")


def divergence_loss(method: str, policy: list[Tensor], teacher: list[Tensor], vocab: int) -> Tensor:
    """Return the loss of a method, summed over positions. `policy`, `teacher`: hidden states and output layer."""
    group = dist.distributed_c10d._get_default_group()
    if method == BASE:
        targets = torch.zeros(len(policy[0]), dtype=torch.int64)
        return linear_logprobs(policy[0], policy[1], targets, group, vocab, needs_entropy=True)[0].sum()
    if method == "top 64":
        log_t, ids = linear_top_k(*teacher, group, vocab, 64)
        return divergence_of(Divergence(), log_t, linear_top_k_rest_logprobs(*policy, ids, group, vocab)).sum()
    if method == "whole logits":
        log_t, log_s = ((hidden @ weight.T).float().log_softmax(1) for hidden, weight in (teacher, policy))
        return (log_s.exp() * (log_s - log_t)).sum()
    return linear_divergence(*policy, *teacher, group, vocab, Divergence(method)).sum()  # type: ignore[bad-argument-type]


def make_model(args: argparse.Namespace) -> list[Tensor]:
    """Return random hidden states and a random output layer, whose logits have the standard deviation 1."""
    shapes, dtype = ((args.positions, args.hidden), (args.vocab, args.hidden)), getattr(torch, args.dtype)
    return [torch.randn(shape, dtype=dtype).mul_(args.hidden**-0.25) for shape in shapes]


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run one forward and one backward pass in this process.

    Returns the peak memory minus the inputs of the policy (MiB), the CPU-seconds, and the loss per position as a checksum.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = make_model(args)
    for tensor in policy:
        tensor.requires_grad_().grad = torch.ones_like(tensor).zero_()
    inputs_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    teacher = [] if args.method == BASE else make_model(args)
    before = resource.getrusage(resource.RUSAGE_SELF)
    loss = divergence_loss(args.method, policy, teacher, args.vocab)
    loss.backward()
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"mib": (after.ru_maxrss - inputs_kib) / 1024, "cpu_s": seconds, "loss": loss.item() / args.positions}


def measure_in_new_process(method: str) -> dict[str, float]:
    """Run `measure` in a new process, with the command-line arguments of this process."""
    command = [sys.executable, *sys.argv, "--method", method]
    environment = os.environ | measurements.MEMORY_ENVIRONMENT
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout)


def report(args: argparse.Namespace) -> None:
    """Measure every method and print the table."""
    logits = args.positions * args.vocab * 4 / 2**20
    whole = logits * 8 < args.max_mib  # "whole logits" needs several tensors of this size
    methods = [method for method in METHODS if whole or method != "whole logits"]
    runs: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for _ in range(args.repeats):
        for method in methods:
            runs[method].append(measure_in_new_process(method))
    title = f"L={args.positions} H={args.hidden} V={args.vocab} {args.dtype}, float32 logits {logits:.0f} MiB"
    table = Table("method", "MiB", f"over {BASE}", "CPU-s", f"over {BASE}", "loss per position", title=title)
    middle = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }
    for name, result in middle.items():
        ratios = [f"{result[key] / middle[BASE][key]:.3f}" for key in ("mib", "cpu_s")]
        table.add_row(
            name, f"{result['mib']:.0f}", ratios[0], f"{result['cpu_s']:.2f}", ratios[1], f"{result['loss']:.4f}"
        )
    Console().print(table)
    measurements.write(args.json, measurements_of(runs))


def measurements_of(runs: dict[str, list[dict[str, float]]]) -> list[measurements.Measurement]:
    """Return the memory and the CPU-seconds of each method, divided by those of the method BASE."""
    found = {name: {key: [run[key] for run in of_name] for key in of_name[0]} for name, of_name in runs.items()}
    base = found.pop(BASE)
    return [
        measurements.paired_ratio(f"{name}: {what} over {BASE}", of_name[key], base[key])
        for name, of_name in found.items()
        for key, what in (("mib", "memory"), ("cpu_s", "CPU-s"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=8192, help="L: number of positions")
    parser.add_argument("--hidden", type=int, default=128, help="H: hidden size of policy and teacher")
    parser.add_argument("--vocab", type=int, default=151_936, help="V: size of the vocabulary")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype of the inputs")
    parser.add_argument("--max-mib", type=float, default=12_000, help="leave out whole logits above this memory")
    parser.add_argument("--method", choices=METHODS, help="measure only this method, in this process")
    parser.add_argument("--repeats", type=int, default=1)
    measurements.add_json_option(parser)
    args = parser.parse_args()
    if args.method is None:
        report(args)
    else:
        print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
