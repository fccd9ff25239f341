"""Asks a teacher that SGLang serves for the k most probable tokens, with their log-probabilities, at each sampled token."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
from numpy.typing import NDArray

from mrl.core.types import TeacherOutputs, TokenBlock
from mrl.rollout.client import EngineClient
from parallel.trainer_config import MIN_REST_PROB

CONCURRENCY = 32  # number of concurrent requests to each server
RETRY_PAUSE_S = 1.0  # pause before a failed request is repeated, because a new server needs time to start


def top_k_of_rows(
    urls: Callable[[], Sequence[str]], block: TokenBlock, rows: NDArray[np.int64], k: int, timeout_s: float
) -> TeacherOutputs:
    """Return the k most probable tokens at each sampled token of these rows of `block` (see TeacherOutputs).

    `urls()` returns the URLs of the teacher's servers, which may change when a server is replaced. The rows are distributed over
    the servers. If a server cannot be reached, its requests are repeated on the next server until `timeout_s` seconds have
    passed.

    Raises:
        EngineError: a server refuses a request.
        TimeoutError: a row has no answer within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with ThreadPoolExecutor(CONCURRENCY * len(urls()), thread_name_prefix="teacher") as pool:
        calls = [
            pool.submit(_top_k_of_row, urls, number, block, row, k, deadline)
            for number, row in enumerate(rows.tolist())
        ]
        answers = [call.result() for call in calls]
    logprobs, ids = (np.concatenate(arrays) for arrays in zip(*answers, strict=True))
    rest = np.maximum(1 - np.exp(logprobs, dtype=np.float64).sum(1, keepdims=True), MIN_REST_PROB)
    return {"top_logprobs": np.concatenate([logprobs, np.log(rest)], 1).astype(np.float32), "top_ids": ids}


def _top_k_of_row(
    urls: Callable[[], Sequence[str]], number: int, block: TokenBlock, row: int, k: int, deadline: float
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return log-probabilities [n, k] and token ids [n, k] for the n sampled tokens of a row.

    Attempt i sends the request to the server with the index `number` + i, modulo the number of servers.
    """
    start, end = block.cu_seqlens[row], block.cu_seqlens[row + 1]
    sampled = block.sampled_index[(block.sampled_index >= start) & (block.sampled_index < end)] - start
    if not len(sampled):
        return np.empty((0, k), np.float32), np.empty((0, k), np.int32)
    tokens, first = block.tokens[start:end].tolist(), int(sampled[0])
    while True:
        servers = urls()
        url, left_s = servers[number % len(servers)], deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(
                "the teacher did not answer in time; raise rollout.request_timeout_s, or use more servers."
            )
        try:
            with EngineClient(url, left_s) as client:
                logprobs, ids = client.top_logprobs(tokens, first, k)
            return logprobs[sampled - first], ids[sampled - first]
        except httpx.TransportError:
            number += 1
            time.sleep(RETRY_PAUSE_S)
