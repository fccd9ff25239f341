"""`mrl generate`: samples and scores responses to all prompts of a plan. It continues where an earlier process stopped."""

import queue
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import httpx

from models.conversion.resumable_folder import ByteProgress
from mrl.data.tokenizer import load_tokenizer
from mrl.evaluation.evaluation_prompts import EvaluationPrompt, prompts_digest
from mrl.evaluation.generation_plan import CONVERTED_MODEL, GenerationPlan
from mrl.evaluation.response_store import JsonObject
from mrl.rewards.scorer import Scorer
from mrl.rollout.client import Completion, EngineClient, EngineError, SamplingParams
from mrl.rollout.engines.server import EngineServer, ExternalEngine, check_seed_support

FILES_AHEAD = 2
"""Number of output files whose responses are requested before the current output file is complete.

Engines stay busy while the slowest responses of the current file are sampled. An output file contains the responses to
generate.prompts_per_file prompts.
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

    The totals are the numbers of responses, prompts and files, and the seconds of this run.

    Args:
        converting: context that shows the progress of the conversion of a Megatron checkpoint.

    Raises:
        ValueError: the input files have an error (raised before engines start), or the reward gives no scores.
        EngineError: an engine failed. Finished files are kept.
    """
    prompts, settings = plan.prompts(), plan.config.generate
    with plan.store as store:
        store.check_prompts(prompts_digest(prompts))
        scratch = store.folder / CONVERTED_MODEL  # only used if the model is a Megatron checkpoint
        folder = plan.model.prepare_engine_folder(scratch, converting)
        with (
            running_engines(plan, folder) as clients,
            RequestDispatcher(clients, settings.requests_in_flight, logprobs=settings.logprobs) as dispatcher,
        ):
            totals = Generation(plan, prompts, dispatcher, progress).run()
        shutil.rmtree(scratch, ignore_errors=True)
        store.finish(totals)
    return totals


@contextmanager
def running_engines(plan: GenerationPlan, folder: Path) -> Iterator[list[EngineClient]]:
    """Start SGLang engines that serve the model in `folder`. When all engines are ready, yield a client for each engine.

    The engines are stopped when the context exits. If rollout.engine_urls is set, no engines are started. The clients then
    connect to the servers at these URLs, which keep running.

    Raises:
        EngineError: an engine does not start.
        ValueError: a server of rollout.engine_urls does not support seeds.
    """
    config = plan.config
    with ExitStack() as stack:
        servers: list[EngineServer | ExternalEngine] = [ExternalEngine(url) for url in config.rollout.engine_urls]
        for index in range(0 if servers else config.rollout.num_engines):
            arguments: dict[str, Any] = dict(model_path=str(folder.resolve()), random_seed=config.run.seed + index)
            if plan.server_args["device"] == "cuda":  # every engine of the machine gets its own GPUs
                arguments["base_gpu_id"] = config.sglang.get("base_gpu_id", 0) + index * config.rollout.engine_tp
            log = Path(config.run.dir).resolve() / "logs" / f"engine_{index}.log"
            servers.append(stack.enter_context(EngineServer(plan.server_args | arguments, log)))
        deadline = time.monotonic() + config.cluster.start_timeout_s
        for server in servers:
            try:
                server.wait_ready(max(1.0, deadline - time.monotonic()))
            except (RuntimeError, TimeoutError) as error:
                raise EngineError(str(error)) from None
        clients = [stack.enter_context(EngineClient(s.url, config.rollout.request_timeout_s)) for s in servers]
        if config.rollout.engine_urls and config.generate.deterministic:
            for client in clients:
                check_seed_support(client, "generate.deterministic")
        yield clients


class RequestDispatcher:
    """Distributes requests over engines, with a limit on the responses that each engine samples at the same time.

    When the context of the dispatcher exits, requests that have not been sent are cancelled.
    """

    def __init__(self, clients: Sequence[EngineClient], in_flight: int, *, logprobs: bool) -> None:
        """`in_flight` limits the GenerationRequests that an engine computes at the same time. A request asks for one response.

        If `logprobs`, log-probabilities are requested.
        """
        posts = min(MAX_POSTS, in_flight)
        self._per_post, self._logprobs = in_flight // posts, logprobs
        self._free: queue.SimpleQueue[EngineClient] = queue.SimpleQueue()
        for _ in range(posts):
            for client in clients:
                self._free.put(client)
        self._pool = ThreadPoolExecutor(posts * len(clients), thread_name_prefix="generate")

    def submit(self, requests: Sequence[GenerationRequest]) -> PendingResponses:
        """Send the requests in other threads. Returns one future per HTTP request, with its responses in order."""
        size = self._per_post
        return [self._pool.submit(self._post, requests[at : at + size]) for at in range(0, len(requests), size)]

    def _post(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        client = self._free.get()
        try:
            completions = client.generate([r[0] for r in requests], [r[1] for r in requests], logprobs=self._logprobs)
        except httpx.HTTPError as error:
            raise EngineError(f"the engine at {client.url} failed: {type(error).__name__}: {error}") from error
        finally:
            self._free.put(client)
        for completion in completions:
            if completion.finish_reason == "abort" or not completion.token_ids:
                raise EngineError(f"the engine at {client.url} aborted a response ({completion.finish_reason}).")
        return completions

    def __enter__(self) -> "RequestDispatcher":
        return self

    def __exit__(self, *error: object) -> None:
        # A request that has been sent is not cancelled: it ends with its engine or at its timeout.
        self._pool.shutdown(wait=False, cancel_futures=True)


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
        pending: deque[tuple[int, PendingResponses]] = deque()
        rewards = self.plan.rewards
        with rewards.open_scorer(self.plan.config.scoring) if rewards else nullcontext() as scorer:
            for index in missing:
                pending.append((index, self.dispatcher.submit(self._requests(index))))
                if len(pending) > FILES_AHEAD:
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
