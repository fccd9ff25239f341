"""Measures two savings in a training step that do not change the gradient, and compares the gradients.

    python benchmarks/compute_only_what_matters.py [--hidden 256] [--layers 4] [--vocab 8192] [--repeats 5] [--json FILE]

    zero advantage   groups with advantage 0 are skipped (`algorithm.skip_zero_advantage`); otherwise the step trains on them
    shared prompts   the prompt of 16 responses is computed once (`Packing.share_prompts`); otherwise 16 times

Each ratio compares a batch with the saving to the same batch without it, in computed tokens and in CPU-seconds of one
`MegatronActor.update` (packing, forward, backward, optimizer step). Both variants alternate in one process. Gradients are
compared tensor by tensor: the largest difference of two elements is divided by the largest element of the tensor.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import one_process
from one_process import Sizes, gradients_of, interleaved, largest_difference, ratio
from rich.console import Console
from rich.table import Table

from benchmarks import measurements
from benchmarks.measurements import Measurement
from mrl.core.types import TokenBlock, TrainBatch
from mrl.workers.dp_partition import StepPartition

LR = 1e-9
TOLERANCE = 2e-5  # largest allowed difference of gradients, as in the parity tests
MAX_TOKENS = 4096  # largest number of tokens in one micro-batch
ZERO_FRACTIONS = (0.0, 0.25, 0.45)
RATIOS = {"1:8": (28, 228), "1:1": (128, 128), "8:1": (228, 28)}  # tokens of each prompt and of each response


@dataclass(frozen=True)
class Case:
    """A batch, partitioned with a saving and without it."""

    name: str
    block: TokenBlock
    with_saving: StepPartition
    without_saving: StepPartition


def zero_advantage(sizes: Sizes, fraction: float) -> Case:
    """Return 20 groups of 8 responses. `fraction` of the groups have advantage 0. Both partitions share prompts.

    Without skipping, about 8k tokens are computed.
    """
    sizes = replace(sizes, groups=20, responses=8, prompt=(16, 48), response=(8, 88))
    block, batch = one_process.make_batch(sizes, fraction)
    every = replace(batch, rows=batch.denominator_rows)
    return Case(f"{fraction:.0%} of groups have advantage 0", block, *_plans(batch, every, (True, True)))


def shared_prompts(sizes: Sizes, name: str) -> Case:
    """Return 2 prompts with 16 responses each. Without shared prompts, 8192 tokens are computed."""
    prompt, response = RATIOS[name]
    sizes = replace(sizes, groups=2, responses=16, prompt=(prompt, prompt), response=(response, response))
    block, batch = one_process.make_batch(sizes)
    return Case(f"prompt:response {name}, 16 responses", block, *_plans(batch, batch, (True, False)))


def _plans(with_saving: TrainBatch, without_saving: TrainBatch, share: tuple[bool, bool]) -> Iterator[StepPartition]:
    for batch, share_prompts in zip((with_saving, without_saving), share, strict=True):
        yield one_process.partition(batch, MAX_TOKENS, share_prompts)


def measure(actor, case: Case, repeats: int) -> tuple[list[str], list[Measurement]]:
    """Return the table row and the measurements of a case. Raises AssertionError if the gradients differ."""
    from mrl.algorithms.losses import PPOClip

    found = [
        gradients_of(actor, case.block, plan.replica_batches[0], PPOClip())
        for plan in (case.without_saving, case.with_saving)
    ]
    difference = largest_difference(*found)
    assert difference <= TOLERANCE, f"{case.name}: gradients differ by {difference:.1e}, more than {TOLERANCE}"

    def update(plan: StepPartition) -> Callable:
        return lambda: actor.update(case.block, [plan.replica_batches[0]], PPOClip(), [LR])

    seconds = interleaved(
        {"without_saving": update(case.without_saving), "with_saving": update(case.with_saving)}, repeats
    )
    tokens = np.array([plan.metrics["batch/computed_tokens"] for plan in (case.without_saving, case.with_saving)])
    row = [
        case.name,
        f"{tokens[0]:.0f} -> {tokens[1]:.0f}",
        f"{tokens[1] / tokens[0]:.3f}",
        " -> ".join(f"{statistics.median(taken):.2f}" for taken in seconds.values()),
        ratio(seconds["with_saving"], seconds["without_saving"]),
        f"{difference:.1e}",
    ]
    return row, [
        Measurement(f"{case.name}: tokens over without the saving", tokens[1] / tokens[0], "ratio", "count"),
        measurements.paired_ratio(f"{case.name}: CPU-s over without the saving", *reversed(seconds.values())),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    measurements.add_json_option(parser)
    args = parser.parse_args()
    one_process.start()
    from mrl.workers.actor_critic import MegatronActor  # imports Megatron, so it must come after start()

    sizes = Sizes(args.hidden, args.layers, args.vocab, groups=0, responses=0, prompt=(0, 0), response=(0, 0))
    actor = MegatronActor(one_process.spec_of(one_process.write_model(sizes)))
    table = Table(
        "batch", "tokens", "ratio", "CPU-s", "ratio", "gradients", title="without the saving -> with the saving"
    )
    cases = [zero_advantage(sizes, fraction) for fraction in ZERO_FRACTIONS]
    cases += [shared_prompts(sizes, name) for name in RATIOS]
    found = []
    for case in cases:
        row, of_case = measure(actor, case, args.repeats)
        table.add_row(*row)
        found += of_case
    Console(width=140).print(table)
    measurements.write(args.json, found)


if __name__ == "__main__":
    main()
