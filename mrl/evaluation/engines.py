"""SGLang servers for one command, without Ray: started, asked with a bound on what is under way, and always ended."""

import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from mrl.evaluation.plan import GenerationPlan
from mrl.rollout.client import Completion, EngineClient, EngineError, SamplingParams
from mrl.rollout.outside import OutsideEngine, check_seeds
from mrl.rollout.server import EngineServer

MAX_POSTS = 64
"""Requests that one engine has at one time; each carries as many responses as generate.requests_in_flight asks for."""

Request = tuple[list[int], SamplingParams]


@contextmanager
def engines(plan: GenerationPlan, folder: Path) -> Iterator[list[EngineClient]]:
    """Clients of engines that serve `folder` and are ready; our own engines end with the context.

    Raises: EngineError where one does not start, ValueError where one of rollout.engine_urls cannot do what is asked.
    """
    config = plan.config
    with ExitStack() as stack:
        servers: list[EngineServer | OutsideEngine] = [OutsideEngine(url) for url in config.rollout.engine_urls]
        for number in range(0 if servers else config.rollout.num_engines):
            ours: dict[str, Any] = dict(model_path=str(folder.resolve()), random_seed=config.run.seed + number)
            if plan.server_args["device"] == "cuda":  # the engines of a machine side by side
                ours["base_gpu_id"] = config.sglang.get("base_gpu_id", 0) + number * config.rollout.engine_tp
            log = Path(config.run.dir).resolve() / "logs" / f"engine_{number}.log"
            servers.append(stack.enter_context(EngineServer(plan.server_args | ours, log)))
        deadline = time.monotonic() + config.rollout.start_timeout_s
        for server in servers:
            try:
                server.wait_ready(max(1.0, deadline - time.monotonic()))
            except (RuntimeError, TimeoutError) as error:
                raise EngineError(str(error)) from None
        clients = [stack.enter_context(EngineClient(s.url, config.rollout.request_timeout_s)) for s in servers]
        if config.rollout.engine_urls and config.generate.deterministic:
            for client in clients:
                check_seeds(client, "generate.deterministic")
        yield clients


class Asker:
    """Spreads requests over engines, to each no more at one time than it should have. A context: at its end nothing waits."""

    def __init__(self, clients: Sequence[EngineClient], in_flight: int, *, logprobs: bool) -> None:
        """`in_flight`: responses per engine; `logprobs`: of every token."""
        posts = min(MAX_POSTS, in_flight)
        self._per_post, self._logprobs = in_flight // posts, logprobs
        self._free: queue.SimpleQueue[EngineClient] = queue.SimpleQueue()
        for _ in range(posts):
            for client in clients:
                self._free.put(client)
        self._pool = ThreadPoolExecutor(posts * len(clients), thread_name_prefix="ask")

    def ask(self, requests: Sequence[Request]) -> list[Future[list[Completion]]]:
        """Responses to come, in the order of the requests, several to each future."""
        size = self._per_post
        return [self._pool.submit(self._post, requests[at : at + size]) for at in range(0, len(requests), size)]

    def _post(self, requests: Sequence[Request]) -> list[Completion]:
        client = self._free.get()
        try:
            done = client.generate([r[0] for r in requests], [r[1] for r in requests], logprobs=self._logprobs)
        except httpx.HTTPError as error:
            raise EngineError(f"the engine at {client.url} failed: {type(error).__name__}: {error}") from error
        finally:
            self._free.put(client)
        for completion in done:
            if completion.finish_reason == "abort" or not completion.token_ids:
                raise EngineError(f"the engine at {client.url} gave a response up ({completion.finish_reason}).")
        return done

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)  # what is under way ends with its engine or deadline
