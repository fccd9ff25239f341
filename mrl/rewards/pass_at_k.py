"""Estimators of pass@k and maj@k from n responses to a prompt and their correctness. maj@k also uses the responses' answers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import comb
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mrl.rewards.reward_types import Response, Reward, single_rewards

MAX_SAMPLES = 1000
"""Largest number of responses to a prompt. From 1030 responses on, binomial coefficients overflow float64."""

# The letters after the last underscore of an array's name are its axes, as in `ways_ym`: y is a node of the quadrature over y in
# _ways_of_other_answers, m is a number of drawn responses, d is a number of drawn responses that have the same answer, and j is a
# number of answers that are given by equally many responses.


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of k responses passed: 1 - C(n-c, k) / C(n, k).

    The k responses are drawn without replacement from n = `num_samples` responses, of which c = `num_passed` passed. The
    estimate is unbiased for every n >= k (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).
    """
    assert 0 <= num_passed <= num_samples and 1 <= k <= num_samples, f"n={num_samples}, c={num_passed}, k={k}"
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def default_ks(num_samples: int) -> list[int]:
    """Return the powers of 2 up to `num_samples`, and `num_samples`, in ascending order."""
    return sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})


def majority_at_k(answers: Sequence[str | None], passed: Sequence[bool], k: int) -> float:
    """Return the probability that the majority answer of k responses passes.

    The k responses are drawn without replacement from n responses. Each drawn response votes for its answer. A response
    without an answer (None) does not vote. If no drawn response has an answer, the majority does not pass. Tied answers win with
    equal probability. If an answer wins, it passes with a probability equal to the fraction of correct responses among all
    responses with this answer. The result is the exact mean over all subsets of k responses and all ways to break ties.
    """
    return majority_at_ks(answers, passed, [k])[k]


def majority_at_ks(answers: Sequence[str | None], passed: Sequence[bool], ks: Sequence[int]) -> dict[int, float]:
    """Return majority_at_k for each k in `ks`. The votes are counted only once."""
    assert len(answers) == len(passed) and min(ks) >= 1 and max(ks) <= len(answers), f"{len(answers)} answers, k={ks}"
    votes, passing = Counter(answers), Counter(a for a, p in zip(answers, passed, strict=True) if p)
    num_without_answer = votes.pop(None, 0)
    passing.pop(None, None)
    sizes = frozenset(votes[answer] for answer in passing)
    wins = _win_probabilities(tuple(sorted(votes.values())), num_without_answer, sizes, max(ks))
    totals = {k: float(sum(wins[votes[a]][k] * count / votes[a] for a, count in passing.items())) for k in ks}
    return {k: min(1.0, total) for k, total in totals.items()}  # rounding may give a value slightly above 1


@lru_cache(maxsize=4096)
def _win_probabilities(
    all_sizes: tuple[int, ...], num_without_answer: int, sizes: frozenset[int], max_k: int
) -> dict[int, NDArray[np.float64]]:
    """Return a dict: size of an answer -> probabilities [max_k + 1] that an answer of this size wins the vote.

    The size of an answer is the number of responses that have this answer. The probabilities are indexed by k, the number of
    drawn responses. `all_sizes` are the sizes of all answers. The keys of the dict are `sizes`. `num_without_answer` responses
    have no answer.
    """
    total = sum(all_sizes) + num_without_answer
    draws = np.array([float(comb(total, k)) for k in range(max_k + 1)])
    won = {size: np.zeros(max_k + 1) for size in sizes}
    for votes in range(1, min(max(sizes, default=0), max_k) + 1):
        for size, ways_m in _ways_of_other_answers(all_sizes, num_without_answer, votes, sizes, max_k - votes):
            won[size][votes:] += comb(size, votes) * ways_m
    return {size: ways / draws for size, ways in won.items()}


def _ways_of_other_answers(
    all_sizes: tuple[int, ...], num_without_answer: int, votes: int, sizes: frozenset[int], max_m: int
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield `(size, ways [max_m + 1])` for each size in `sizes`.

    Suppose that an answer of this size gets `votes` votes. `ways[m]` is the number of ways to draw m of the responses that do not
    have this answer, such that no other answer gets more than `votes` votes. If t other answers get exactly `votes` votes in one
    of these ways, the way counts as 1 / (t + 1) instead of 1, because 1 / (t + 1) is the probability that this answer wins the
    tie. 1 / (t + 1) is the integral of y**t over y from 0 to 1. So each tied answer contributes a factor y to a polynomial in y,
    which Gauss-Legendre quadrature integrates exactly.
    """
    # Size -> count of the answers of this size that can get `votes` votes.
    contenders = Counter(size for size in all_sizes if size >= votes)
    num_free = sum(size for size in all_sizes if size < votes) + num_without_answer  # responses that cannot cause a tie
    nodes_y, weights_y = _legendre((contenders.total() + 1) // 2 + 1)  # quadrature over y from 0 to 1
    free_m = np.array([float(comb(num_free, m)) for m in range(min(num_free, max_m) + 1)])
    ones_ym = np.ones((len(nodes_y), 1))
    for size, ways_ym in _products_without_one_contender(
        sorted(contenders.items()), sizes, nodes_y, votes, max_m, ones_ym
    ):
        yield size, _fit_length(np.convolve(weights_y @ ways_ym, free_m), max_m + 1)


def _products_without_one_contender(
    contenders: list[tuple[int, int]],
    sizes: frozenset[int],
    nodes_y: NDArray[np.float64],
    votes: int,
    max_m: int,
    ways_ym: NDArray[np.float64],
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield `(size, product)` for each size in `sizes`: `ways_ym` times the polynomials of all contenders but one of this size.

    A contender is an answer that can get `votes` votes. The omitted contender is the answer whose ways to win are counted. For
    the polynomial of a contender, see _multiply_by_contenders. `ways_ym` has a row for each node of y and a column for each
    number m of drawn responses. `contenders` are pairs (size, count of contenders of this size). The list is halved
    recursively: the product of one half is computed once, for all contenders that the other half omits.
    """
    if not any(size in sizes for size, _ in contenders):
        return
    if len(contenders) == 1:
        ((size, count),) = contenders
        yield size, _multiply_by_contenders(ways_ym, [(size, count - 1)], nodes_y, votes, max_m)
        return
    half = len(contenders) // 2
    for kept, others in ((contenders[:half], contenders[half:]), (contenders[half:], contenders[:half])):
        if any(size in sizes for size, _ in kept):
            product = _multiply_by_contenders(ways_ym, others, nodes_y, votes, max_m)
            yield from _products_without_one_contender(kept, sizes, nodes_y, votes, max_m, product)


def _multiply_by_contenders(
    ways_ym: NDArray[np.float64],
    contenders: list[tuple[int, int]],
    nodes_y: NDArray[np.float64],
    votes: int,
    max_m: int,
) -> NDArray[np.float64]:
    """Multiply `ways_ym` by the polynomials of `contenders`, which are pairs (size, count of contenders of this size).

    A contender's polynomial has one coefficient for each d from 0 to `votes`: the number of ways to draw d of the contender's
    responses. If d equals `votes`, the contender is tied, and the coefficient is multiplied by y.
    """
    for size, count in contenders:
        if votes == 1:  # there may be many contenders, so their product is computed with the binomial theorem
            ways_j = np.array([float(comb(count, j) * size**j) for j in range(min(count, max_m) + 1)])
            power = ways_j * nodes_y[:, None] ** np.arange(len(ways_j))
            grown = [np.convolve(ways, row)[: max_m + 1] for ways, row in zip(ways_ym, power, strict=True)]
            ways_ym = np.array(grown)
            continue
        ways_d = np.array([float(comb(size, d)) for d in range(votes + 1)])
        for _ in range(count):
            grown = np.zeros((len(nodes_y), min(ways_ym.shape[1] + votes, max_m + 1)))
            for d in range(min(votes, max_m) + 1):
                ways = ways_ym[:, : grown.shape[1] - d] * ways_d[d]
                grown[:, d : d + ways.shape[1]] += ways * nodes_y[:, None] if d == votes else ways
            ways_ym = grown
    return ways_ym


def _fit_length(values: NDArray[Any], length: int) -> NDArray[np.float64]:
    """Return `values` cut or zero-padded to `length`."""
    return np.pad(values[:length], (0, max(0, length - len(values))))


@lru_cache(maxsize=1024)
def _legendre(num_nodes: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and weights that integrate polynomials up to degree 2 * num_nodes - 1 from 0 to 1 exactly."""
    from scipy.special import roots_legendre  # the import is slow

    nodes, weights = roots_legendre(num_nodes)
    return (nodes + 1) / 2, weights / 2


@runtime_checkable
class GivesAnswers(Protocol):
    """A reward that can extract the answer from a response. In maj@k, each response votes for its answer."""

    def answer(self, response: Response) -> str | None:
        """Return the answer in a canonical form: equal answers have the same text. None: the response has no answer."""


def voted_answers(reward: Reward | None, responses: Sequence[Response]) -> list[str | None]:
    """Return the answer for which each response votes in maj@k, or None if the response has no answer.

    The first reward that scores the response and has the method `answer` finds the answer. If there is no such reward, the
    stripped text of the response is the answer.
    """
    return [_answer(reward, response) for response in responses]


def _answer(reward: Reward | None, response: Response) -> str | None:
    for each in single_rewards(reward, response) if reward else ():
        if isinstance(each, GivesAnswers):
            return each.answer(response)
    return response.text.strip() or None
