"""`mrl generate`: samples and scores responses to all prompts of a plan. The command also continues interrupted generations."""

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

from models.conversion.resumable_folder import ByteProgress
from mrl.data.tokenizer import load_tokenizer
from mrl.evaluation.engines import EngineWatcher, engine_group, running_engines
from mrl.evaluation.evaluation_prompts import EvaluationPrompt, prompts_digest
from mrl.evaluation.generation_plan import CONVERTED_MODEL, GenerationPlan
from mrl.evaluation.response_store import JsonObject
from mrl.rewards.scorer import Scorer
from mrl.rollout.client import Completion, SamplingParams
from mrl.rollout.engine_pool import deadline_error

FILES_AHEAD = 2
"""Number of output files whose responses are requested in advance, in addition to the files that fill the engines.

So the engines stay busy while the slowest responses of a file are sampled, and while the responses of a file are scored. An
output file contains the responses to generate.prompts_per_file prompts.
"""

MAX_POSTS = 64
"""Largest number of concurrent HTTP requests to one engine.

If generate.requests_in_flight is larger, one HTTP request carries several prompts.
"""

GenerationRequest = tuple[list[int], SamplingParams]  # prompt tokens and sampling parameters of one response
PendingResponses = list[Future[list[Completion]]]  # one future per HTTP request


class GenerationProgress(Protocol):
    """Display of the progress of a generation."""

    def begin(self, total: int, done: int) -> None:
        """Start the display. Of `total` responses, `done` exist already."""

    def advance(self, responses: int, tokens: int) -> None:
        """Add newly finished responses to the display. `responses` and `tokens` are their counts."""


def generate(
    plan: GenerationPlan, progress: GenerationProgress, converting: AbstractContextManager[ByteProgress]
) -> JsonObject:
    """Sample all missing responses. Return the totals that are written to _generate.json.

    The totals are the numbers of responses, prompts and files, and the duration of this run in seconds.

    Args:
        converting: context that shows the progress of the conversion of a Megatron checkpoint.

    Raises:
        ValueError: the input files have an error (raised before engines start), or the reward gives no scores.
        EngineError: no engine is left, or an engine refused a request. Finished files are kept.
    """
    prompts, settings = plan.prompts(), plan.config.generate
    with plan.store as store:
        store.check_prompts(prompts_digest(prompts))
        scratch = store.folder / CONVERTED_MODEL  # only used if the model is a Megatron checkpoint
        folder = plan.model.prepare_engine_folder(scratch, converting)
        group = engine_group(plan.config, plan.server_args, folder)
        with running_engines(plan.config, group, logprobs=settings.logprobs) as watcher:
            dispatcher = RequestDispatcher(watcher, settings.requests_in_flight)
            totals = Generation(plan, prompts, dispatcher, progress).run()
        shutil.rmtree(scratch, ignore_errors=True)
        store.finish(totals)
    return totals


class RequestDispatcher:
    """Distributes requests over engines, with a limit on the responses that each engine samples at the same time.

    Each HTTP request goes to the engine with the least expected work (see EnginePool).
    """

    def __init__(self, watcher: EngineWatcher, in_flight: int) -> None:
        """`in_flight`: largest number of GenerationRequests that an engine computes at the same time."""
        # Number of responses that all engines together sample at the same time.
        self.capacity = in_flight * len(watcher.pool.engines)
        self._watcher, self._posts = watcher, min(MAX_POSTS, in_flight)
        self._per_post = in_flight // self._posts

    def submit(self, requests: Sequence[GenerationRequest]) -> PendingResponses:
        """Send the requests in another thread. Returns one future per HTTP request, with its responses in order."""
        parts = [requests[at : at + self._per_post] for at in range(0, len(requests), self._per_post)]
        pool = self._watcher.pool
        return [pool.submit(self._watcher.call(partial(self._sample, part), self._posts)) for part in parts]

    async def _sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        pool = self._watcher.pool
        timeout_s, (prompts, params) = pool.spec.request_timeout_s, zip(*requests, strict=True)
        try:
            async with asyncio.timeout(timeout_s):
                return await pool.generate(range(len(requests)), prompts, params)
        except TimeoutError:
            raise deadline_error(timeout_s) from None


class Generation:
    """Samples the responses of a plan's missing output files, scores the responses and writes the files."""

    def __init__(
        self,
        plan: GenerationPlan,
        prompts: Sequence[EvaluationPrompt],
        dispatcher: RequestDispatcher,
        progress: GenerationProgress,
    ) -> None:
        self.plan, self.dispatcher, self.progress = plan, dispatcher, progress
        self.settings = plan.config.generate
        size = self.settings.prompts_per_file
        self.files = [prompts[at : at + size] for at in range(0, len(prompts), size)]  # prompts of each output file

    def run(self) -> JsonObject:
        """Write every missing output file, in order, and return the totals."""
        start, samples = time.monotonic(), self.settings.samples
        missing = [index for index in range(len(self.files)) if not self.plan.store.has(index)]
        num_prompts = sum(map(len, self.files))
        num_missing = sum(len(self.files[index]) for index in missing)
        self.progress.begin(num_prompts * samples, (num_prompts - num_missing) * samples)
        ahead = FILES_AHEAD + self.dispatcher.capacity // (self.settings.prompts_per_file * samples)
        pending: deque[tuple[int, PendingResponses]] = deque()
        rewards = self.plan.rewards
        with rewards.open_scorer(self.plan.config.scoring) if rewards else nullcontext() as scorer:
            for index in missing:
                pending.append((index, self.dispatcher.submit(self._requests(index))))
                if len(pending) > ahead:
                    self._complete(*pending.popleft(), scorer)
            while pending:
                self._complete(*pending.popleft(), scorer)
        seconds = round(time.monotonic() - start, 3)
        return dict(responses=num_prompts * samples, prompts=num_prompts, files=len(self.files), last_run_s=seconds)

    def _requests(self, file_index: int) -> list[GenerationRequest]:
        seed, sampling = self.plan.config.run.seed, self.plan.sampling
        return [
            (prompt.tokens, replace(sampling, seed=prompt.seed(seed, sample)))
            for prompt, sample in self._samples(file_index)
        ]

    def _samples(self, file_index: int) -> list[tuple[EvaluationPrompt, int]]:
        """Return (prompt, index of the response among the responses to this prompt) for each response of a file, in order."""
        return [(prompt, sample) for prompt in self.files[file_index] for sample in range(self.settings.samples)]

    def _complete(self, file_index: int, pending: PendingResponses, scorer: Scorer | None) -> None:
        """Wait for the responses of one output file, score the responses and write the file."""
        completions: list[Completion] = []
        for future in pending:
            completions += future.result()
            self.progress.advance(len(future.result()), sum(len(c.token_ids) for c in future.result()))
        texts = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        rows = [
            prompt.to_row(sample, completion, text, logprobs=self.settings.logprobs)
            for (prompt, sample), completion, text in zip(self._samples(file_index), completions, texts, strict=True)
        ]
        if scorer and self.plan.rewards:
            rows = self.plan.rewards.add_scores(rows, scorer)
        self.plan.store.write(file_index, rows)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.plan.model.folder)
