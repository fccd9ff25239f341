"""A Ray actor that samples: owns engines, prompts and rewards, and keeps tokens off the driver."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import ray
from numpy.typing import NDArray

from mrl.data.prompts import PromptDataset
from mrl.rewards.base import Response
from mrl.rollout import recording
from mrl.rollout.client import Completion, EngineClient, SamplingParams
from mrl.rollout.server import EngineServer
from mrl.rollout.spec import RolloutSpec
from mrl.types import Rollouts, TokenBlock


class RolloutWorker:
    """Samples responses from its engines, scores them, and hands token blocks to the object store."""

    def __init__(self, spec: RolloutSpec) -> None:
        """Start the engines at once; `wait_ready` waits for them."""
        self.spec = spec
        log_dir = Path(spec.run_dir) / "logs"
        logging.basicConfig(
            filename=log_dir / "rollout.log", level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
        )
        ours = dict(model_path=spec.model_path, tp_size=spec.engine_tp)
        if spec.routed_experts:
            ours["enable_return_routed_experts"] = True
        self.servers = [
            EngineServer(dict(spec.server_args, **ours, random_seed=spec.seed + i), log_dir / f"engine_{i}.log")
            for i in range(spec.num_engines)
        ]
        for server in self.servers:
            server.start()
        self.train = PromptDataset.load(spec.train, spec.model_path, spec.max_prompt_tokens)
        self.test = PromptDataset.load(spec.test, spec.model_path, spec.max_prompt_tokens) if spec.test else None
        self.clients: list[EngineClient] = []
        self._last: tuple[TokenBlock, NDArray[np.int64]] | None = None  # block and its rows in self.train
        self._engine_seconds = 0.0  # spent on the last sampling request

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait for the engines; returns their URLs."""
        for server in self.servers:
            server.wait_ready(timeout_s)
        self.clients = [EngineClient(s.url, timeout_s=self.spec.request_timeout_s) for s in self.servers]
        return [s.url for s in self.servers]

    def generate(self, rows: NDArray[np.int64], step: int) -> Rollouts:
        """G responses to each prompt row; the driver gets lengths and a handle."""
        if self.spec.replay:
            block, columns = recording.read(self.spec.replay, step)
        else:
            prompts = [self.train.encode(row) for row in rows.tolist() for _ in range(self.spec.responses_per_prompt)]
            block, columns = self._sample(prompts)
            columns["rows"] = np.repeat(rows, self.spec.responses_per_prompt)
            columns["groups"] = np.repeat(np.arange(len(rows)), self.spec.responses_per_prompt)
        if self.spec.record:
            recording.write(Path(self.spec.run_dir) / "rollouts", step, block, **columns)
        self._last = (block, columns.pop("rows"))
        return Rollouts(
            ray.put(block),
            block.prompt_lengths,
            block.response_lengths,
            **columns,
            engine_seconds=self._engine_seconds,
        )

    def _sample(self, prompts: list[list[int]]) -> tuple[TokenBlock, dict[str, NDArray]]:
        params = SamplingParams(max_new_tokens=self.spec.max_response_tokens, temperature=self.spec.temperature)
        start = time.perf_counter()
        done = self._complete(prompts, params, routed_experts=self.spec.routed_experts)
        self._engine_seconds = time.perf_counter() - start
        for row, completion in enumerate(done):
            if completion.finish_reason == "abort" or not completion.token_ids:
                raise RuntimeError(
                    f"response {row} of {len(done)} came back {completion.finish_reason} and empty or cut."
                )
        routing = [c.routed_experts for c in done if c.routed_experts is not None] if self.spec.routed_experts else None
        block = TokenBlock.from_lists(prompts, [c.token_ids for c in done], [c.logprobs for c in done], routing)
        return block, dict(
            truncated=np.array([c.finish_reason == "length" for c in done]),
            weight_versions=np.array([int(c.weight_version) for c in done]),
        )

    def _complete(
        self, prompts: list[list[int]], params: SamplingParams, *, routed_experts: bool = False
    ) -> list[Completion]:
        """Spread the prompts evenly over the engines, one request each; answers in the order of `prompts`."""
        parts = np.array_split(np.arange(len(prompts)), len(self.clients))
        jobs = [
            (client, [prompts[i] for i in part]) for client, part in zip(self.clients, parts, strict=True) if len(part)
        ]
        with ThreadPoolExecutor(len(jobs)) as pool:
            answers = list(pool.map(lambda job: job[0].generate(job[1], params, routed_experts=routed_experts), jobs))
        return [completion for answer in answers for completion in answer]

    def score(self) -> tuple[NDArray[np.float64], float]:
        """Rewards [B] of the last generated block, and the seconds they took."""
        assert self._last, "score() needs a generate() before it"
        start = time.perf_counter()
        block, rows = self._last
        texts = self.train.decode([block.response(i).tolist() for i in range(len(rows))])
        return self._reward(self.train, rows, texts), time.perf_counter() - start

    def _reward(self, data: PromptDataset, rows: NDArray[np.int64], texts: list[str]) -> NDArray[np.float64]:
        responses = [
            Response(data.data_source(row), text, data.ground_truth(row), data.extra_info(row))
            for row, text in zip(rows.tolist(), texts, strict=True)
        ]
        try:
            rewards = np.array(self.spec.reward(responses), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"reward {self.spec.reward} failed or gave no list of numbers: {error}") from error
        if rewards.shape != (len(texts),) or not np.isfinite(rewards).all():
            raise ValueError(
                f"reward {self.spec.reward} gave {rewards.shape} values, {np.isfinite(rewards).sum()} of them finite; "
                f"expected {len(texts)} finite numbers."
            )
        return rewards

    def evaluate(self, temperature: float) -> float:
        """Mean reward of one response per held-out prompt; 0 is greedy. NaN without a test set or an engine."""
        if self.test is None or not self.clients:
            return float("nan")
        rows = np.arange(min(len(self.test), self.spec.eval_rows or len(self.test)))
        params = SamplingParams(max_new_tokens=self.spec.max_response_tokens, temperature=temperature)
        done = self._complete([self.test.encode(row) for row in rows.tolist()], params)
        texts = self.test.decode([c.token_ids for c in done])
        return float(self._reward(self.test, rows, texts).mean())

    def cpu_seconds(self) -> dict[str, float]:
        """User and system seconds of this process and of the engines' process trees, for benchmarks."""
        times = os.times()
        return dict(rollout=times.user + times.system, engine=sum(s.cpu_seconds() for s in self.servers))

    def close(self) -> None:
        """End every engine."""
        for server in self.servers:
            server.stop()
