"""Many waits at a time, each with a limit: for rewards that ask somebody else."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mrl.rewards.reward_types import Response, Reward, Score, as_score

CallResult = list[Score] | str
"""Scores of a call, or why there are none."""


def call_reward(reward: Reward, responses: list[Response]) -> CallResult:
    """Call a reward, sync or async, with a list of responses; what it raises becomes text. Not for a running event loop."""
    try:
        found: Any = reward(responses)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        found = list(found)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # anything a user's code can raise
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
    """The score of each call, in order; one that raises or is late is a failed Score.

    `concurrency`: calls at a time. `timeout_s`: for one call, from its start. `deadline_s`: for all of them together.
    """
    turns = asyncio.Semaphore(concurrency)

    async def one(call: Callable[[], Awaitable[Score]]) -> Score:
        async with turns:
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    return await call()
            except (Exception, asyncio.CancelledError) as error:  # whatever a user's coroutine or the network can raise
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                    raise  # by the deadline, not by the call itself
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
