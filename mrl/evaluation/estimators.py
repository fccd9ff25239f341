"""pass@k and maj@k of one prompt, from n of its responses: expectations over the k-subsets, without simulation."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 1000
"""Responses to a prompt: binomial coefficients of more do not fit float64."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that k of the n responses, drawn without replacement, hold one that passed: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: unbiased for every n >= k.
    """
    assert 0 <= num_passed <= num_samples and 1 <= k <= num_samples, f"n={num_samples}, c={num_passed}, k={k}"
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], passed: Sequence[bool], k: int) -> float:
    """Probability that the majority's answer passes, when k of the n responses, drawn without replacement, vote.

    Each drawn response votes for its answer; None has no vote, and where nobody votes nothing passes. Of answers with equally
    many votes each wins with the same probability. An answer passes as often as the responses that give it do. This is the
    exact mean over all subsets and ties, by counting.
    """
    return majorities(answers, passed, [k])[k]


def majorities(answers: Sequence[str | None], passed: Sequence[bool], ks: Sequence[int]) -> dict[int, float]:
    """`majority_at_k` for each k, counted once."""
    assert len(answers) == len(passed) and min(ks) >= 1 and max(ks) <= len(answers), f"{len(answers)} answers, k={ks}"
    votes, passing = Counter(answers), Counter(a for a, p in zip(answers, passed, strict=True) if p)
    silent = votes.pop(None, 0)
    passing.pop(None, None)
    needed = frozenset(votes[answer] for answer in passing)
    wins = _win_probabilities(tuple(sorted(votes.values())), silent, needed, max(ks))
    totals = {k: float(sum(wins[votes[a]][k] * count / votes[a] for a, count in passing.items())) for k in ks}
    return {k: min(1.0, total) for k, total in totals.items()}  # rounding may leave a certain pass above 1


@lru_cache(maxsize=4096)
def _win_probabilities(
    counts: tuple[int, ...], silent: int, needed: frozenset[int], most: int
) -> dict[int, NDArray[np.float64]]:
    """For each needed size of a class of answers: [most + 1] probability that one such class wins a vote of k, by k.

    `counts`: responses per answer; `silent`: responses without one.
    """
    total = sum(counts) + silent
    draws = np.array([float(comb(total, k)) for k in range(most + 1)])
    won = {size: np.zeros(most + 1) for size in needed}
    for votes in range(1, min(max(needed, default=0), most) + 1):
        for size, shared_m in _others(counts, silent, votes, needed, most - votes):
            won[size][votes:] += comb(size, votes) * shared_m
    return {size: ways / draws for size, ways in won.items()}


def _others(
    counts: tuple[int, ...], silent: int, votes: int, needed: frozenset[int], most: int
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """For each needed size: [most + 1] ways to draw m of the others, none with more than `votes`; by m.

    A way in which t others have exactly `votes` counts as 1 / (t + 1), the integral of y**t from 0 to 1: each such class
    carries a factor y, and Gauss-Legendre nodes integrate the product over y without error.
    """
    rivals = Counter(size for size in counts if size >= votes)
    free = sum(size for size in counts if size < votes) + silent  # can be drawn in any number
    nodes_y, weights_y = _legendre((rivals.total() + 1) // 2 + 1)
    free_m = np.array([float(comb(free, m)) for m in range(min(free, most) + 1)])
    for size, ways_ym in _all_but_one(sorted(rivals.items()), needed, nodes_y, votes, most, np.ones((len(nodes_y), 1))):
        yield size, _fit(np.convolve(weights_y @ ways_ym, free_m), most + 1)


def _all_but_one(
    rivals: list[tuple[int, int]],
    needed: frozenset[int],
    nodes_y: NDArray[np.float64],
    votes: int,
    most: int,
    ways_ym: NDArray[np.float64],
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """`ways_ym` times the polynomials of all rivals (size, number of them) but one of each needed size in turn, by halves."""
    if not any(size in needed for size, _ in rivals):
        return
    if len(rivals) == 1:
        ((size, number),) = rivals
        yield size, _times(ways_ym, [(size, number - 1)], nodes_y, votes, most)
        return
    half = len(rivals) // 2
    for mine, others in ((rivals[:half], rivals[half:]), (rivals[half:], rivals[:half])):
        if any(size in needed for size, _ in mine):
            grown = _times(ways_ym, others, nodes_y, votes, most)
            yield from _all_but_one(mine, needed, nodes_y, votes, most, grown)


def _times(
    ways_ym: NDArray[np.float64],
    rivals: list[tuple[int, int]],
    nodes_y: NDArray[np.float64],
    votes: int,
    most: int,
) -> NDArray[np.float64]:
    """More classes, of which at most `votes` may be drawn; exactly so many are a tie, and count y."""
    for size, number in rivals:
        if votes == 1:  # (1 + size x y)**number, by the binomial theorem: where answers differ, there are many of these
            drawn_j = np.array([float(comb(number, j) * size**j) for j in range(min(number, most) + 1)])
            power = drawn_j * nodes_y[:, None] ** np.arange(len(drawn_j))
            grown = [np.convolve(ways, row)[: most + 1] for ways, row in zip(ways_ym, power, strict=True)]
            ways_ym = np.array(grown)
            continue
        drawn_d = np.array([float(comb(size, d)) for d in range(votes + 1)])
        for _ in range(number):
            grown = np.zeros((len(nodes_y), min(ways_ym.shape[1] + votes, most + 1)))
            for d in range(min(votes, most) + 1):
                ways = ways_ym[:, : grown.shape[1] - d] * drawn_d[d]
                grown[:, d : d + ways.shape[1]] += ways * nodes_y[:, None] if d == votes else ways
            ways_ym = grown
    return ways_ym


def _fit(values: NDArray[Any], length: int) -> NDArray[np.float64]:
    """Cut, or filled with zeros."""
    return np.pad(values[:length], (0, max(0, length - len(values))))


@lru_cache(maxsize=1024)
def _legendre(number: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nodes and weights that integrate polynomials of degree 2 number - 1 from 0 to 1 exactly."""
    from scipy.special import roots_legendre  # not needed to start

    nodes, weights = roots_legendre(number)
    return (nodes + 1) / 2, weights / 2
