"""Which tickets share a request to an engine, and in which order requests are made."""

from collections.abc import Callable, Sequence

import numpy as np

POST_RESPONSES = 64
"""Responses asked for in one request: so many at most are lost with an engine although they were done. A request each would
cost the engine's HTTP server a millisecond of CPU each."""


def apart[T](tickets: Sequence[T], expected: Callable[[T], float]) -> list[T]:
    """Each is asked for by itself, those first whose responses are `expected` to be longest."""
    return sorted(tickets, key=lambda ticket: -expected(ticket))


def together[T](tickets: Sequence[T], num_engines: int, responses_per_prompt: int) -> list[list[T]]:
    """Even shares for the engines, each in parts of one request: for groups that a step waits for anyway."""
    shares = np.array_split(np.arange(len(tickets)), max(1, num_engines))
    most = max(1, POST_RESPONSES // responses_per_prompt)
    parts = [share[at : at + most] for share in shares for at in range(0, len(share), most)]
    return [[tickets[place] for place in part.tolist()] for part in parts]
