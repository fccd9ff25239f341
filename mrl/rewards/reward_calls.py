"""Calls of rewards whose exceptions become failures, and concurrent coroutines with time limits."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mrl.rewards.reward_types import Response, Reward, Score, as_score

CallResult = list[Score] | str
"""The scores of a call, or the reason why it failed."""


def call_reward(reward: Reward, responses: list[Response]) -> CallResult:
    """Call a reward, sync or async, and return its scores, or the reason of its failure. Not callable from an event loop."""
    try:
        found: Any = reward(responses)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        found = list(found)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # user code may raise anything
        return describe_error(error)
    if len(found) != len(responses):
        return f"the reward gave {len(found)} values for {len(responses)} responses."
    return [as_score(value, response) for value, response in zip(found, responses, strict=True)]


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


async def _awaited(result: Any) -> Any:
    return await result


async def gather_scores(
    calls: Sequence[Callable[[], Awaitable[Score]]],
    *,
    concurrency: int,
    timeout_s: float | None = None,
    deadline_s: float | None = None,
) -> list[Score]:
    """Run coroutines concurrently and return their scores in order. A call that raises or exceeds a limit gives a failed Score.

    Args:
        concurrency: number of concurrent calls.
        timeout_s: limit of one call, from its start.
        deadline_s: limit of all calls together.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(call: Callable[[], Awaitable[Score]]) -> Score:
        async with slots:
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    return await call()
            except (Exception, asyncio.CancelledError) as error:  # user code and the network may raise anything
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                    raise  # cancelled by the deadline, not by the call itself
                late = limit.expired()
                return Score.failed(f"no answer within {timeout_s} s." if late else f"{type(error).__name__}: {error}")

    tasks = [asyncio.create_task(one(call)) for call in calls]
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=deadline_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    return [
        Score.failed(f"not scored within {deadline_s} s of the whole batch.") if task.cancelled() else task.result()
        for task in tasks
    ]
