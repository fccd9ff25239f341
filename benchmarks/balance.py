"""Measures how evenly a batch is balanced over replicas, and how many tokens are padding. It needs only lengths, and no GPU.

    python benchmarks/balance.py [--seeds 10] [--json FILE]

A batch has 512 sequences. Their lengths are log-normal (median, sigma) and clipped to 512..32768 tokens. A micro-batch has at
most 32768 tokens. The cost of a sequence is the FLOPs of training Qwen2.5-7B on it. This model has 7.07e9 parameters in matrix
products, 28 layers, and 28 heads of size 128. A sequence of L tokens costs `6 * 7.07e9 * L` for matrix products and
`6 * 28 * 3584 * L**2` for causal attention. Every number except milliseconds is a ratio. The table has the median over seeds,
and the largest value.

The schedulers of verl and slime in this file were written from their descriptions, because verl 0.9.1 cannot be installed beside
SGLang, and slime is not on PyPI. All schedulers get the same lengths.

    verl           Karmarkar-Karp with equal numbers of sequences; cost `24576 * L + L**2` for every model
    verl, greedy   each sequence, in sampled order, goes to the lightest of the replicas that have the fewest sequences
    slime          first-fit packs of at most 32768 tokens; the largest packs are split until their number is a multiple of the
                   number of replicas; Karmarkar-Karp with equal numbers of packs, by their FLOPs
"""

import argparse
import heapq
import statistics
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks import measurements
from mrl.data.batching import CostModel, PackingUnit, make_units, partition_units, plan_micro_batches

SEQUENCES, SHORTEST, LONGEST, MAX_TOKENS = 512, 512, 32768, 32768
LENGTHS = (  # (median, sigma) of the lengths
    (2048, 0.6),  # lengths differ little
    (4096, 0.9),  # a few sequences reach the largest length
    (2048, 1.3),  # most sequences are short, and one or two reach the largest length
)
COST = CostModel(linear=6 * 7.07e9, quadratic=6 * 28 * 3584)
GROUP, PROMPTS = 8, (256, 2048)  # responses per prompt; smallest and largest number of tokens in a prompt (uniform)
CP, TP = 2, 8  # sizes of context and tensor parallelism
PADDED_SIZE = 4  # number of sequences in a padded micro-batch
VERL_COST = CostModel(linear=24576, quadratic=1)  # verl's function calculate_workload
Lengths = NDArray[np.int64]
type Rows = list[int]


def imbalance(loads: Sequence[float]) -> float:
    """Return the largest load divided by the mean load."""
    return max(loads) / statistics.fmean(loads)


def round_robin(costs: Sequence[float], parts: int) -> list[float]:
    """Return the load of each part if sequence number n goes to part `n % parts`."""
    return [sum(costs[part::parts]) for part in range(parts)]


def longest_first(costs: Sequence[float], parts: int) -> list[float]:
    """Return the load of each part under the greedy rule LPT (longest processing time first).

    The most expensive sequence comes first. Each sequence goes to the part with the smallest load.
    """
    loads = [0.0] * parts
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return loads


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[float]:
    """Return the load of each part under the largest differencing method of Karmarkar and Karp.

    The method repeatedly joins the two most uneven partial solutions. The heaviest part of one solution is joined with the
    lightest part of the other solution.
    """
    heap = [(-cost, number, [0.0] * (parts - 1) + [cost]) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    for number in range(len(costs), 2 * len(costs) - 1):
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = sorted(a + b for a, b in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (joined[0] - joined[-1], number, joined))
    return heap[0][2]


def equal_karmarkar_karp(costs: Sequence[float], parts: int) -> list[Rows]:
    """Return the items of each part under the method of Karmarkar and Karp if all parts have the same number of items.

    Each initial partial solution has one item in every part. The items are sorted by cost, and `parts` neighbors form a
    solution.
    """
    assert len(costs) % parts == 0, f"{parts} parts cannot have the same number of {len(costs)} items"
    order = sorted(range(len(costs)), key=lambda item: costs[item])
    heap = []
    for first in range(0, len(costs), parts):
        solution = [(costs[item], [item]) for item in order[first : first + parts]]
        heap.append((solution[0][0] - solution[-1][0], first, solution))  # ordered by the difference, the largest first
    heapq.heapify(heap)
    for number in range(len(costs), len(costs) + len(heap) - 1):
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sorted((a + b, rows + more) for (a, rows), (b, more) in zip(one, reversed(other), strict=True))
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], number, joined))
    return [rows for _, rows in heap[0][2]]


def equal_greedy(costs: Sequence[float], parts: int) -> list[Rows]:
    """Return the items of each part if each item goes to the lightest of the parts that have the fewest items.

    The items keep their order.
    """
    heap: list[tuple[int, float, int]] = [(0, 0.0, part) for part in range(parts)]
    rows: list[Rows] = [[] for _ in range(parts)]
    for item, cost in enumerate(costs):
        count, load, part = heap[0]
        rows[part].append(item)
        heapq.heapreplace(heap, (count + 1, load + cost, part))
    return rows


def slime_partition(lengths: Lengths, parts: int) -> list[Rows]:
    """Return the sequences of each part in slime's schedule, which first makes packs and then distributes the packs."""
    packs: list[Rows] = []
    loads: list[int] = []
    for item, tokens in enumerate(lengths.tolist()):
        place = next((n for n, load in enumerate(loads) if load + tokens <= MAX_TOKENS), len(packs))
        if place == len(packs):
            packs.append([])
            loads.append(0)
        packs[place].append(item)
        loads[place] += tokens
    while len(packs) % parts:
        largest = max((pack for pack in packs if len(pack) > 1), key=lambda pack: lengths[pack].sum())
        packs.remove(largest)
        packs += halves(largest, lengths)
    costs = [sum(COST(float(lengths[item])) for item in pack) for pack in packs]
    return [[item for pack in part for item in packs[pack]] for part in equal_karmarkar_karp(costs, parts)]


def halves(pack: Rows, lengths: Lengths) -> list[Rows]:
    """Split a pack into two parts with about equal tokens. Each sequence goes to the smaller part, the longest first."""
    found: list[Rows] = [[], []]
    for item in sorted(pack, key=lambda item: -lengths[item]):
        min(found, key=lambda half: lengths[half].sum()).append(item)
    return found


def loads_of(partition: Sequence[Rows], costs: Sequence[float]) -> list[float]:
    """Return the load of each part."""
    return [sum(costs[item] for item in part) for part in partition]


def mrl_partition(units: Sequence[PackingUnit], parts: int) -> list[float]:
    """Return the load of each part in mrl's partition."""
    return [sum(unit.cost for unit in part) for part in partition_units(units, parts)]


def up_to(multiple: int, tokens: Lengths) -> Lengths:
    """Round numbers of tokens up to a multiple."""
    return -(-tokens // multiple) * multiple


def packed_over_real(units: list[PackingUnit], lengths: Lengths, parts: int) -> float:
    """Return the number of processed tokens divided by the number of real tokens, if sequences are packed.

    Each sequence is padded to a multiple of 2 * CP tokens, and each pack to a multiple of TP tokens.
    """
    replicas = plan_micro_batches(units, parts, MAX_TOKENS, equal_counts=True, multiple_of=1)
    packs = [up_to(TP, up_to(2 * CP, lengths[rows]).sum()) for replica in replicas for rows in replica]
    return float(sum(packs) / lengths.sum())


def padded_over_real(lengths: Lengths) -> float:
    """Return the number of processed tokens divided by the number of real tokens, if sequences are padded.

    Each micro-batch has PADDED_SIZE sequences, which are padded to the longest of them.
    """
    return float(lengths.reshape(-1, PADDED_SIZE).max(axis=1).sum() * PADDED_SIZE / lengths.sum())


def sharing(prompts: Lengths, responses: Lengths, parts: int) -> tuple[float, float, float]:
    """Compare shared prompts with whole sequences.

    Returns three ratios for shared prompts: the total cost divided by the total cost with whole sequences, the heaviest part
    divided by the heaviest part with whole sequences, and the heaviest part divided by the mean part.
    """
    rows = np.arange(len(responses))
    whole, shared = (
        mrl_partition(make_units(prompts, responses, rows // GROUP, rows, COST, MAX_TOKENS, parts, share), parts)
        for share in (False, True)
    )
    return sum(shared) / sum(whole), max(shared) / max(whole), imbalance(shared)


def measure(median: int, sigma: float, parts: int, seed: int) -> dict[str, float]:
    """Draw one batch and partition it with every method. Returns the numbers of one table column by name."""
    draw = np.random.default_rng(seed)
    lengths = draw.lognormal(np.log(median), sigma, SEQUENCES).clip(SHORTEST, LONGEST).astype(np.int64)
    rows = np.arange(SEQUENCES)
    units = make_units(np.zeros_like(rows), lengths, rows, rows, COST, MAX_TOKENS, parts, False)
    costs = [unit.cost for unit in units]
    verl_costs = [VERL_COST.linear * tokens + VERL_COST.quadratic * tokens**2 for tokens in lengths.tolist()]
    start = time.perf_counter()
    loads = mrl_partition(units, parts)
    seconds = time.perf_counter() - start
    prompts = draw.integers(*PROMPTS, SEQUENCES // GROUP).repeat(GROUP)
    total, heaviest, even = sharing(prompts, lengths, parts)
    return {
        "bound": max(1.0, max(costs) / statistics.fmean(loads)),
        "mrl": imbalance(loads),
        "mrl / bound": max(loads) / max(statistics.fmean(loads), max(costs)),
        "Karmarkar-Karp": imbalance(karmarkar_karp(costs, parts)),
        "LPT": imbalance(longest_first(costs, parts)),
        "verl": imbalance(loads_of(equal_karmarkar_karp(verl_costs, parts), costs)),
        "verl, greedy": imbalance(loads_of(equal_greedy(verl_costs, parts), costs)),
        "slime": imbalance(loads_of(slime_partition(lengths, parts), costs)),
        "round robin": imbalance(round_robin(costs, parts)),
        "ms": 1000 * seconds,
        "packed": packed_over_real(units, lengths, parts),
        "padded": padded_over_real(lengths),
        "padded, sorted": padded_over_real(np.sort(lengths)),
        "shared: cost": total,
        "shared: heaviest": heaviest,
        "shared: max / mean": even,
    }


def summary(values: list[float]) -> str:
    """Return "median (largest)"."""
    return f"{statistics.median(values):.4f} ({max(values):.4f})"


def main() -> None:
    """Parse the arguments, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    measurements.add_json_option(parser)
    args = parser.parse_args()
    seeds = range(args.seeds)
    cases = [(*lengths, parts) for lengths in LENGTHS for parts in (8, 64)]
    results = [[measure(*case, seed) for seed in seeds] for case in cases]
    table = Table(
        "", *(f"{median}, {sigma}, dp {parts}" for median, sigma, parts in cases), title="median (worst) over seeds"
    )
    for name in results[0][0]:
        table.add_row(name, *(summary([result[name] for result in of_case]) for of_case in results))
    Console(width=150).print(table)
    measurements.write(args.json, measurements_of(cases, results))


def measurements_of(
    cases: list[tuple[int, float, int]], results: list[list[dict[str, float]]]
) -> list[measurements.Measurement]:
    """Return the balance of mrl, verl and slime, and the padding, as medians over seeds. Equal seeds give equal numbers."""
    return [
        measurements.Measurement(
            f"{name}: {median}, {sigma}, dp {parts}", statistics.median(one[name] for one in of_case), "ratio", "count"
        )
        for name in ("mrl", "verl", "slime", "packed", "shared: heaviest")
        for (median, sigma, parts), of_case in zip(cases, results, strict=True)
    ]


if __name__ == "__main__":
    main()
