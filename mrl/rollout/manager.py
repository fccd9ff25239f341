"""RolloutManager: the part of the driver that draws prompts and calls the rollout worker.

The driver sees lengths and rewards, but no tokens. mrl.core.types explains the letters G and N, and shapes such as [B].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Protocol

import numpy as np
import ray
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage
from mrl.algorithms.losses import Loss
from mrl.core.metrics import Metrics
from mrl.core.types import AdvantageResult, Handle, Rollouts
from mrl.data.prompts import PromptStream
from mrl.hang_report.process_registry import registry_folder, unregister_processes
from mrl.hang_report.ray_wait import RayWaiter
from mrl.rollout.client import EngineError
from mrl.rollout.engine_pool import NoEngineError
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.worker import RolloutWorker


class ControllerSideEngines(Protocol):
    """Operations on the memory and the weights of the engines. The controller implements them (EngineLifecycle).

    The rollout manager calls them.
    """

    def load(self) -> None:
        """Load the engines onto their GPUs, with their model weights. Does nothing if the engines are loaded already."""
        ...

    def restore(self, failed: Mapping[str, str]) -> None:
        """Replace failed engines by engines that serve the current weight version. `failed`: URL -> reason of failure."""
        ...


class FixedEngines:
    """ControllerSideEngines of a run without a trainer.

    The engines of such a run stay loaded, and failed engines are not replaced.
    """

    def load(self) -> None:
        """Do nothing."""

    def restore(self, failed: Mapping[str, str]) -> None:
        """Raise EngineError, because only a trainer can give new engines their model weights."""
        raise EngineError(f"engines failed, and there is no trainer that can push weights to new ones: {dict(failed)}")


class RolloutWorkerHandle:
    """Calls the methods of the rollout worker, a Ray actor, with deadlines.

    Another object, which implements ControllerSideEngines, manages the memory and the model weights of the engines.

    `call` and the functions that `begin` returns raise StalledError if the deadline passes, and RolloutWorkerLostError if the
    worker died (see mrl.hang_report). They also raise the errors that the worker raises.
    """

    def __init__(self, spec: RolloutSpec, options: Mapping[str, Any], timeout_s: float) -> None:
        """Create the Ray actor, which starts its engines. Returns before the engines are ready.

        `options`: options of the Ray actor. The deadline of a call is `timeout_s` plus twice the deadline of the scorer.
        """
        self.spec = spec
        self._create = lambda: ray.remote(RolloutWorker).options(**options).remote(spec)
        self.actor = self._create()
        self._waiter = RayWaiter(Path(spec.run_dir), "rollout")
        self.timeout_s = timeout_s + 2 * spec.scoring.timeout_s  # so that the scorer's own deadline passes first
        self._start_timeout_s = 600.0  # deadline for the start of engines; `wait_ready` sets it

    def call[T](
        self, method: Callable[Concatenate[RolloutWorker, ...], T], *args: Any, timeout_s: float | None = None
    ) -> T:
        """Call a method of the worker and wait for its result. `method`: for example `RolloutWorker.collect`."""
        return self.begin(method, *args, timeout_s=timeout_s)()

    def begin[T](
        self, method: Callable[Concatenate[RolloutWorker, ...], T], *args: Any, timeout_s: float | None = None
    ) -> Callable[[], T]:
        """Call a method of the worker, and return a function that waits for its result."""
        future = getattr(self.actor, method.__name__).remote(*args)
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        return lambda: self._waiter.get([future], deadline_s, f"{method.__name__}() on the rollout worker")[0]

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait until all engines and all served models take requests; return the URLs of all engines."""
        self._start_timeout_s = timeout_s
        return self.call(RolloutWorker.wait_ready, timeout_s, timeout_s=timeout_s + 60)

    def replace_engines(self, urls: Sequence[str]) -> list[str]:
        """Replace these engines by new engines, and wait until all engines take requests. Returns the URLs of all engines."""
        start_s = self._start_timeout_s
        return self.call(RolloutWorker.replace_engines, list(urls), start_s, timeout_s=start_s + 60)

    def begin_step(self, step: int) -> None:
        """Tell the worker, for its timeline, which step begins. The first step is 1. Does not wait for the worker."""
        self.actor.begin_step.remote(step)

    def record_paused(self, paused: bool) -> None:
        """Tell the worker whether the engines are paused. A paused engine that computes nothing does not count as failed."""
        self.call(RolloutWorker.record_paused, paused)

    def set_adapter(self, name: str, urls: Sequence[str]) -> None:
        """Let all further requests to these engines use the LoRA adapters `name`, which the engines have loaded."""
        self.call(RolloutWorker.set_adapter, name, list(urls))

    @contextmanager
    def recorded_as_paused(self) -> Iterator[None]:
        """Return a context in which the worker regards the engines as paused, for example during a weight push."""
        self.record_paused(True)
        try:
            yield
        finally:
            self.record_paused(False)

    def rollout_worker_answers(self, timeout_s: float = 30.0) -> bool:
        """Return whether the actor answers."""
        try:
            ray.get(self.actor.cpu_seconds.remote(), timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    def restart(self) -> None:
        """Kill the actor, which ends its engines, and create a new actor. Call `wait_ready` next."""
        ray.kill(self.actor)
        self.actor = self._create()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the engines and the actor."""
        # If this call fails, the supervisor of each engine ends the engine after the actor has ended.
        with suppress(ray.exceptions.RayError, TimeoutError):
            ray.get(self.actor.close.remote(), timeout=timeout_s)
        ray.kill(self.actor)
        unregister_processes(registry_folder(self._waiter.run_dir), "rollout")
        unregister_processes(registry_folder(self._waiter.run_dir), "engine_*")


class RolloutManager:
    """Keeps the staleness buffer of the rollout worker filled with prompts, and takes the groups of each step from the buffer.

    Methods that wait for the worker raise the errors of RolloutWorkerHandle.call.
    """

    def __init__(self, worker: RolloutWorkerHandle, engines: ControllerSideEngines) -> None:
        """`engines` loads the engines before sampling and replaces failed engines."""
        spec = worker.spec
        self.worker, self._engines = worker, engines
        self._max_attempts = spec.fault_tolerance.max_response_attempts
        self._buffer_capacity = spec.buffer_capacity
        self._step = 0  # index of the next step
        self._num_drawn = 0  # number of prompts drawn so far
        # The prompt requests that no step has taken, each as a tuple that RolloutWorker.resume takes
        self._untrained: Sequence[tuple[int, ...]] = ()

    def generate(self, prompts: PromptStream, step: int) -> Rollouts:
        """Return the groups on which `step` trains: G scored responses to each of N prompts (see mrl.rollout.staleness_buffer).

        Draws as many prompts as the staleness buffer has room for, and more prompts if the rollout filter rejects groups. The
        groups of later steps stay in the buffer, and the engines continue to sample them while the step trains.
        """
        missing = max(0, self._buffer_capacity - len(self._untrained))
        while True:
            first_number, self._num_drawn = self._num_drawn, self._num_drawn + missing
            rows = prompts.take(missing)
            sizes = prompts.group_sizes(rows, self.worker.spec.responses_per_prompt)
            missing = self._call_engines(RolloutWorker.sample, first_number, rows, step, sizes)
            if not missing:
                break
        rollouts = self.worker.call(RolloutWorker.collect, step)
        self._step = step + 1
        self._num_drawn, self._untrained = rollouts.num_drawn_requests, rollouts.untrained_requests
        prompts.record_rewards(rollouts.prompt_rewards)
        passes = {"rollout/epoch": (sum(prompts.drawn) - len(self._untrained)) / prompts.num_rows}
        return replace(rollouts, sampling_metrics={**rollouts.sampling_metrics, **passes})

    def evaluate(self, step: int) -> Metrics:
        """Evaluate the policy on the held-out prompts. Returns the metrics eval/*; {} if there are no held-out prompts.

        `step`: number of finished steps.
        """
        metrics: Metrics = {}
        for index in range(len(self.worker.spec.evaluations)):
            metrics |= self._call_engines(RolloutWorker.evaluate, index, step)
        return metrics

    def _call_engines[T](self, method: Callable[Concatenate[RolloutWorker, ...], T], *args: Any) -> T:
        """Call a worker method that needs engines, and then replace the engines that failed during the call.

        Repeats the call if all engines were lost. Raises EngineError if all engines are lost in each of
        `fault_tolerance.max_response_attempts` calls.
        """
        lost, failed = None, {}
        for _ in range(self._max_attempts):
            self._engines.load()
            try:
                result = self.worker.call(method, *args)
            except NoEngineError as error:
                lost, failed = error, self._replace_failed()
            else:
                self._replace_failed()
                return result
        raise EngineError(
            f"all engines were lost {self._max_attempts} times in a row (fault_tolerance.max_response_attempts), although "
            "they were replaced each time; the last failures: "
            f"{'; '.join(f'{url}: {reason}' for url, reason in failed.items())}"
        ) from lost

    def _replace_failed(self) -> dict[str, str]:
        """Replace the engines that failed since the last call. Returns URL -> reason of failure."""
        if failed := self.worker.call(RolloutWorker.take_failed_engines):
            self._engines.restore(failed)
        return failed

    def estimate(
        self,
        columns: Mapping[str, list[Handle]],
        kl_coef: float,
        step: int,
        *,
        rows: NDArray[np.bool_] | None = None,
        advantage: Advantage | None = None,
        loss: Loss | None = None,
    ) -> AdvantageResult:
        """Compute the advantages of the groups that `generate` has returned last, and the columns that the losses need.

        Args:
            columns: name of a column -> handles of its parts; each data-parallel replica computed one part.
            kl_coef: coefficient of the KL penalty in the reward.
            step: index of the training step.
            rows: [B] mask of the responses that get advantages; all other responses are excluded. Default: all responses.
            advantage: estimator that replaces algorithm.advantage.
            loss: policy loss that replaces algorithm.loss. Here, only its `precomputed_columns` are computed.
        """
        return self.worker.call(RolloutWorker.estimate, columns, kl_coef, step, rows, advantage, loss)

    def begin_writing_samples(self, step: int) -> Callable[[], None]:
        """Begin to write samples of the newest groups to samples.jsonl, with the columns that `estimate` has computed for them.

        The newest groups are those that `generate` has returned last. Returns a function that waits until the samples are
        written. Does not call the worker if the run keeps no samples.
        """
        if not self.worker.spec.samples_per_step:
            return lambda: None
        return self.worker.begin(RolloutWorker.write_samples, step)

    def discard_log(self, before_step: int) -> None:
        """Delete the rollout log of the steps before `before_step`, which a checkpoint covers. Does not wait for the worker."""
        self.worker.actor.discard_log.remote(before_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the next step, the number of drawn prompts, and the untrained prompt requests."""
        return dict(step=self._step, drawn=self._num_drawn, waiting=[list(request) for request in self._untrained])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state that `state_dict` returned. Running requests are cancelled.

        The completions of untrained requests are used again, if rollout_log.CompletionCache holds them.
        """
        self._step, self._num_drawn = state["step"], state["drawn"]
        self._untrained = tuple(map(tuple, state["waiting"]))
        self.worker.call(RolloutWorker.resume, self._num_drawn, self._untrained, self._step)
