"""Spans of the batches that an SGLang scheduler computes, for the timeline of a run.

Hooks in SGLang's scheduler note when a batch is launched and when its result has been processed. A GPU computes the batch between
these times. If SGLang launches a batch while the GPU still computes the previous batch, the spans of the two batches overlap.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from parallel import spans

logger = logging.getLogger(__name__)
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class _Launch(NamedTuple):
    """A batch that was launched."""

    name: str  # prefill or decode
    started_at: float  # time.time()
    responses: int
    tokens: int  # tokens that the batch computes
    waiting: int  # requests in the queue of the scheduler


# The batches that are computed now, oldest first. SGLang launches at most one batch ahead.
_launched: deque[_Launch] = deque(maxlen=2)


def register_hooks() -> None:
    """Register the hooks if the run records a timeline. Must be called in each process before SGLang applies the hooks there."""
    if spans.PROCESS_ENV not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # imports SGLang, which takes seconds

    HookRegistry.register(f"{SCHEDULER}.run_batch", note_launch, HookType.BEFORE)
    HookRegistry.register(f"{SCHEDULER}.process_batch_result", record_batch, HookType.AFTER)


def log_first_error(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook so that it logs its first error and then does nothing. An uncaught error would end the SGLang server."""
    failed = False

    @wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> None:
        nonlocal failed
        try:
            if not failed:
                hook(*args, **kwargs)
        except Exception:  # the engine must continue, even without its timeline
            failed = True
            logger.exception("this engine records no more batches in its timeline")

    return guarded


@log_first_error
def note_launch(scheduler: Any, batch: Any, *_: object, **__: object) -> None:
    """Note the start of a batch. Hook that runs before Scheduler.run_batch."""
    is_prefill, responses = batch.forward_mode.is_extend(), len(batch.reqs)
    tokens = batch.extend_num_tokens if is_prefill else responses
    name = "prefill" if is_prefill else "decode"
    _launched.append(_Launch(name, time.time(), responses, tokens or 0, len(scheduler.waiting_queue)))


@log_first_error
def record_batch(result: None, scheduler: Any, batch: Any, *_: object, **__: object) -> None:
    """Record the oldest batch that was launched. Hook that runs after Scheduler.process_batch_result."""
    from sglang.srt.runtime_context import get_parallel  # can be imported only inside SGLang

    spans.start_from_environment(get_parallel().tp_rank)
    if _launched:
        launch = _launched.popleft()
        seconds = time.time() - launch.started_at
        counts = dict(batches=1, tokens=launch.tokens, responses=launch.responses, waiting=launch.waiting)
        spans.record(launch.name, "engine_batch", launch.started_at, seconds, **counts)
