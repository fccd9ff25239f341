"""Measures the cost of the driver at scale: the real loop with 1,024 trainer ranks and 256 engines that compute nothing.

    python benchmarks/controller.py [--prompts 1024] [--tokens 512] [--ranks 1024] [--engines 256] [--steps 3] [--json FILE]
    python benchmarks/controller.py --all
    python benchmarks/controller.py --profile driver.prof

There are four processes. This process is the driver, with the real trainer, rollout manager, worker group, weight sync and
ledger. The second process is the real rollout worker. The third answers all HTTP requests to engines without delay. The fourth
is a Ray actor that answers for all trainer ranks. Each call to a rank is a separate Ray call, as if each rank had its own
process. CPU-seconds count all threads of the driver.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import ray
from aiohttp import web

from benchmarks import measurements
from benchmarks.driver_traffic import Traffic
from benchmarks.measurements import Measurement
from benchmarks.simulated_engine import LogNormalScript, SimulatedEngine, start
from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.advantages import GRPO
from mrl.algorithms.corrections import MISMATCH_SUMS
from mrl.algorithms.losses import PPOClip
from mrl.algorithms.objective import Objective, TokenWeighting
from mrl.algorithms.parts import Coefficients
from mrl.checkpoint.run_dir import SampleLedger
from mrl.config.process_schema import WeightSyncConfig
from mrl.controller.colocation import MemoryScheduler
from mrl.controller.engine_lifecycle import EngineLifecycle
from mrl.controller.loop_parts import Phases
from mrl.controller.trainer import Trainer, TrainingSchedule
from mrl.core.types import ColumnPart, Handle, RankColumns, ReplicaBatch, SyncReport, TokenBlock, UpdateReport
from mrl.data.batching import CostModel
from mrl.data.columns import PromptExample
from mrl.data.prompts import MixtureSource, PromptDataset
from mrl.data.row_files import RowReport
from mrl.planner.engine_time import EngineSpeeds
from mrl.rewards.reward_types import Response
from mrl.rollout.client import SamplingParams
from mrl.rollout.manager import FixedEngines, RolloutManager, RolloutWorkerHandle
from mrl.rollout.spec import RolloutSpec
from mrl.tracking.console import Startup
from mrl.tracking.tracker import JsonlSink, Tracker
from mrl.workers.dp_partition import Packing
from mrl.workers.group import WorkerGroup
from mrl.workers.model_trainers import ActorTrainer, UpdateRunner
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

SIGMA = 0.5  # standard deviation of the logarithm of a response's length
LONGEST = 4  # length of the longest response, divided by the mean length
ALL = [  # prompts, tokens, ranks
    *((prompts, 512, 1024) for prompts in (128, 256, 512, 1024)),
    *((1024, tokens, 1024) for tokens in (128, 2048, 8192)),
    *((1024, 512, ranks) for ranks in (64, 256)),
]
HEAD = (
    "| samples | tokens | ranks | CPU-s | CPU-s, main thread | CPU-s in ray.wait | step, s | outside ray.wait, s | "
    "Ray calls | MB sent | MB received | peak RSS, MB |\n" + "|---" * 12 + "|"
)


@dataclass(frozen=True)
class Size:
    """Size of one measurement."""

    prompts: int
    responses: int  # responses to each prompt
    tokens: int  # mean number of tokens in a response
    ranks: int
    engines: int
    steps: int


class InstantEngine(SimulatedEngine):
    """Engine that answers without delay. Its answers have about as many bytes as the answers of a real engine."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer with tokens 7 and log-probabilities -1. Both are small integers, which Python stores only once."""
        body = orjson.loads(await request.read())
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        for place, prompt in enumerate(body["input_ids"]):
            self.counts[tuple(prompt)] += 1
            tokens = self.script.length(prompt, self.counts[tuple(prompt)])
            await answer.write((b"," if place else b"[") + self._completion_of(tokens))
        await answer.write(b"]")
        return answer

    def _completion_of(self, tokens: int) -> bytes:
        return b'{"output_ids":[%s],"meta_info":{"finish_reason":{"type":"stop"},"weight_version":"%s",%s[%s]}}' % (
            b",".join([b"7"] * tokens),
            self.version.encode(),
            b'"output_token_logprobs":',
            b",".join([b"[-1,7,null]"] * tokens),
        )


async def serve(engines: int, tokens: int) -> None:
    """Print the URLs of all engines, then serve them until stdin closes."""
    script = LogNormalScript(tokens * math.exp(-(SIGMA**2) / 2), SIGMA, LONGEST * tokens)
    counts: Counter[tuple[int, ...]] = Counter()
    urls, _ = await start([InstantEngine(EngineSpeeds(0.0, 0.0, 0.0, 1), script, counts) for _ in range(engines)])
    print("\n".join(urls), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the driver ends


@contextmanager
def engines(size: Size) -> Iterator[list[str]]:
    """Start all engines in one process. Yields their URLs."""
    command = [sys.executable, __file__, "--serve", "--engines", str(size.engines), "--tokens", str(size.tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout, "it is piped"
        try:
            yield [process.stdout.readline().strip() for _ in range(size.engines)]
        finally:
            process.terminate()


class SimulatedRanks:
    """Ray actor that answers for all trainer ranks as mrl.workers.worker.TrainWorker does, but without a model."""

    def __init__(self, dims: ParallelDims, urls: Sequence[str]) -> None:
        self.dims, self.urls = dims, urls

    def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the answer of one rank to a method call."""
        return getattr(self, method)(rank, *args, **kwargs)

    def compute_columns(
        self,
        rank: int,
        block: TokenBlock,
        replica_batches: Sequence[ReplicaBatch],
        temperature: float,
        names: Sequence[str],
    ) -> RankColumns:
        """Return columns of zeros on the one rank of a replica that has results (tp 0, cp 0, last pp), else no columns."""
        at = self.dims.coords(rank)
        if at.tp or at.cp or at.pp < self.dims.pp - 1:
            return RankColumns({}, 0.0)
        rows = np.concatenate([np.empty(0, np.int64), *replica_batches[at.dp].micro_batches])
        values = np.zeros(block.sampled_lengths[rows].sum(), np.float32)
        return RankColumns({name: ray.put(ColumnPart(rows, values)) for name in names}, 0.0)

    def update(
        self, rank: int, block: TokenBlock, replica_batches: Sequence[Sequence[ReplicaBatch]], **options: Any
    ) -> list[UpdateReport]:
        """Return a report with as many numbers as the report of a real actor."""
        sums = dict.fromkeys([*MISMATCH_SUMS, "loss", "mismatch_abs", "entropy", "tokens", "weight"], 1.0)
        at = self.dims.coords(rank)
        last = at.pp == self.dims.pp - 1
        maxima = {"optim/grad_norm": 1.0, "seconds": 0.0, **({"mismatch_abs": 0.0} if last else {})}
        return [UpdateReport(sums if last else {}, maxima) for _ in replica_batches[at.dp]]

    def push_weights(self, rank: int, version: int, engines_were_offloaded: bool) -> SyncReport:
        """On rank 0, send the weight version to all engines."""
        if rank == 0:
            with httpx.Client(trust_env=False) as http:
                for url in self.urls:
                    http.post(f"{url}/update_weight_version", json=dict(new_version=str(version))).raise_for_status()
        return SyncReport()


@dataclass(frozen=True)
class RemoteMethod:
    """A method of one rank. Its calls go to the actor that answers for all ranks."""

    actor: Any
    rank: int
    method: str

    def remote(self, *args: Any, **kwargs: Any) -> Handle:
        return self.actor.call.remote(self.rank, self.method, *args, **kwargs)


@dataclass(frozen=True)
class RankProxy:
    """Replaces the Ray actor of one rank."""

    actor: Any
    rank: int

    def __getattr__(self, method: str) -> RemoteMethod:
        return RemoteMethod(self.actor, self.rank, method)


class SimulatedGroup(WorkerGroup):
    """Worker group in which one actor answers for all ranks."""

    def __init__(self, dims: ParallelDims, run_dir: str, actor: Any) -> None:
        self.actor = actor
        super().__init__(dims, run_dir, 3600.0, list)

    def create_workers(self) -> list[Any]:
        return [RankProxy(self.actor, rank) for rank in range(self.dims.world_size)]


class Prompts(PromptDataset):
    """Random prompts. Every response is decoded as an empty text."""

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        return [""] * len(responses)


def random_prompts(rows: int) -> Prompts:
    """Return prompts of 32 to 95 tokens."""
    rng = np.random.default_rng(0)
    cu_seqlens = np.cumsum([0, *rng.integers(32, 96, rows)])
    tokens = rng.integers(1000, 50000, cu_seqlens[-1]).astype(np.int32)
    examples = [PromptExample([], "", "", {})] * rows
    return Prompts(examples, np.arange(rows), tokens, cu_seqlens, (MixtureSource("", rows),), RowReport(rows, rows), "")


class RandomReward:
    """Gives random rewards, so that the advantages of every group differ from 0."""

    in_process = True

    def __call__(self, responses: list[Response]) -> list[float]:
        return np.random.default_rng(len(responses)).random(len(responses)).tolist()


class NoSaver:
    """Replaces the checkpoint saver, and writes nothing."""

    def between_steps(self, state: object, metrics: object) -> None: ...

    def finish(self, state: object) -> None: ...


class DriverMeter:
    """Tracker sink that measures the driver in each step: CPU-seconds, time in `ray.wait`, and Ray traffic."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic, self.waited_s, self.waited_cpu_s, self.steps = traffic, 0.0, 0.0, []
        self._wait, ray.wait = ray.wait, self._waiting
        self.begin()

    def begin(self) -> None:
        """Start the measurement of a step."""
        self._last = self._read()

    def _waiting(self, *args: Any, **kwargs: Any) -> Any:
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            return self._wait(*args, **kwargs)
        finally:
            self.waited_s += time.perf_counter() - start
            self.waited_cpu_s += time.thread_time() - cpu

    def _read(self) -> np.ndarray:
        now, traffic = time.perf_counter(), self.traffic
        cpu = time.process_time(), time.thread_time(), self.waited_cpu_s
        return np.array([*cpu, now, now - self.waited_s, traffic.calls, traffic.sent_bytes, traffic.received_bytes])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(self._read() - self._last)
        self.begin()

    def rewind(self, last_step: int, evaluated: bool) -> None: ...

    def close(self, failed: bool = False) -> None:
        ray.wait = self._wait

    def row(self, size: Size) -> str:
        """Return the table row: medians over all steps except the first."""
        cpu, main, waiting, wall, busy, calls, sent, received = np.median(self.steps[1:], axis=0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        seconds = f"{cpu:.2f} | {main:.2f} | {waiting:.2f} | {wall:.1f} | {busy:.2f}"
        numbers = f"{seconds} | {calls:.0f} | {sent / 1e6:.3f} | {received / 1e6:.3f}"
        return f"| {size.prompts * size.responses} | {size.tokens} | {size.ranks} | {numbers} | {peak:.0f} |"

    def measurements(self, size: Size) -> list[Measurement]:
        """Return the CPU-seconds, Ray calls and bytes of a step, over all steps except the first."""
        cpu, _, _, _, _, calls, sent, received = np.transpose(self.steps[1:]).tolist()
        place = f"{size.prompts * size.responses} samples, {size.ranks} ranks"
        return [
            measurements.of_repeats(f"{place}: CPU-s", cpu, "CPU-s", "cpu_s"),
            measurements.of_repeats(f"{place}: Ray calls", calls, "calls", "count"),
            measurements.of_repeats(f"{place}: MB sent", [value / 1e6 for value in sent], "MB", "ratio"),
            measurements.of_repeats(f"{place}: MB received", [value / 1e6 for value in received], "MB", "ratio"),
        ]


def layout(ranks: int) -> ParallelDims:
    """Return a layout with 16 ranks per replica."""
    return ParallelDims(tp=4, pp=4, dp=ranks // 16)


def rollout_spec(size: Size, objective: Objective, prompts: Prompts, urls: Sequence[str], run_dir: str) -> RolloutSpec:
    return RolloutSpec(
        model_path="",
        run_dir=run_dir,
        train=prompts,
        test=None,
        reward=RandomReward(),
        advantage_pipeline=AdvantagePipeline(GRPO(), objective),
        rollout_filter=None,
        needs_greedy=False,
        rollout_logprobs_as_old=False,
        prompts_per_step=size.prompts,
        responses_per_prompt=size.responses,
        sampling=SamplingParams(LONGEST * size.tokens),
        num_engines=0,
        engine_urls=tuple(urls),
        engine_tp=1,
        seed=0,
        evaluations=(),
        request_timeout_s=3600.0,
        record=False,
        replay=None,
    )


@contextmanager
def cluster(store_bytes: int) -> Iterator[None]:
    """Start a local Ray cluster with an object store of this size."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", RAY_worker_niceness="0")
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=store_bytes,
        logging_level="error",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def trainer(size: Size, run_dir: str, sinks: Sequence[Any]) -> Iterator[Trainer]:
    """Build the trainer as mrl.controller.build does, but with simulated engines and trainer ranks."""
    with ExitStack() as stack:
        urls = stack.enter_context(engines(size))
        samples = size.prompts * size.responses
        stack.enter_context(cluster(256 * 2**20 + 40 * samples * size.tokens))
        prompts, objective = random_prompts(size.prompts * (size.steps + 1)), Objective(PPOClip())
        group = SimulatedGroup(layout(size.ranks), run_dir, ray.remote(SimulatedRanks).remote(layout(size.ranks), urls))
        spec = rollout_spec(size, objective, prompts, urls, run_dir)
        worker = RolloutWorkerHandle(spec, dict(num_cpus=0), 3600.0)
        stack.callback(worker.close)
        worker.wait_ready(300.0)
        updates = UpdateRunner(OptimConfig(), Packing(32768, True, CostModel(1.0, 1e-5)), TokenWeighting())
        actor = ActorTrainer(group, objective, updates, 1.0, skip_zero_advantage=True)
        ledger = SampleLedger(Path(run_dir) / "ledger.jsonl", 0)
        stack.callback(ledger.close)
        yield Trainer(
            prompts=prompts.stream(size.prompts, 0, True),
            rollout=RolloutManager(worker, FixedEngines()),
            scorers=[partial(actor.begin_columns, names=["old_logprobs"])],
            actor=actor,
            critic=None,
            coefs=Coefficients({}),
            weight_sync=_lifecycle(worker, group, run_dir),
            phase=Phases(),
            tracker=stack.enter_context(Tracker([JsonlSink(Path(run_dir) / "metrics.jsonl"), *sinks])),
            ledger=ledger,
            saver=NoSaver(),  # type: ignore[arg-type]
            recover=_raise,
            preemption_requested=lambda: False,
            schedule=TrainingSchedule(size.steps),
        )


def _lifecycle(worker: RolloutWorkerHandle, group: SimulatedGroup, run_dir: str) -> EngineLifecycle:
    """Return the lifecycle of engines that share no devices. The simulated ranks answer the pushes."""
    lifecycle = EngineLifecycle(
        engine_processes=worker,
        actor=group,
        scheduler=MemoryScheduler(frozenset()),
        settings=WeightSyncConfig(),
        startup_display=Startup(),
        weights_dir=run_dir,
        start_timeout_s=300.0,
        marks_pushes_as_pauses=False,
    )
    lifecycle.scheduler.register_model("actor", group)
    return lifecycle


def _raise(error: BaseException, state: object) -> Any:
    raise error


def measure(size: Size, profile: Path | None = None) -> tuple[str, list[Measurement]]:
    """Run one measurement. Returns its row of the table and its measurements."""
    with tempfile.TemporaryDirectory() as run_dir, Traffic() as traffic:
        meter = DriverMeter(traffic)
        with (
            trainer(size, run_dir, [meter]) as built,
            cProfile.Profile(time.thread_time) if profile else nullcontext() as profiler,
        ):
            meter.begin()
            built.fit()
        if profile and profiler:
            profiler.dump_stats(profile)
        return meter.row(size), meter.measurements(size)


def main() -> None:
    """Parse the arguments, measure, and print rows of a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(prompts=1024, responses=8, tokens=512, ranks=1024, engines=256, steps=3).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", type=Path, help="file for a profile of the main thread's CPU-seconds")
    parser.add_argument("--all", action="store_true", help="measure all sizes of the table, each in a new process")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    measurements.add_json_option(parser)
    known = parser.parse_args()
    if known.all and known.json:
        parser.error("--json is for one size; leave out --all")
    if known.serve:
        asyncio.run(serve(known.engines, known.tokens))
        return
    if known.all:
        print(HEAD, flush=True)
        for prompts, tokens, ranks in ALL:
            sizes = ["--prompts", str(prompts), "--tokens", str(tokens), "--ranks", str(ranks)]
            subprocess.run([sys.executable, __file__, *sizes], check=True)
        return
    size = Size(known.prompts, known.responses, known.tokens, known.ranks, known.engines, known.steps)
    row, found = measure(size, known.profile)
    print(row, flush=True)
    measurements.write(known.json, found)


if __name__ == "__main__":
    main()
