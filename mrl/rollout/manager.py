"""Driver side of rollout: draws prompts, asks one rollout worker for samples, and sees lengths and rewards, never tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, Protocol

import ray

from mrl.core.types import AdvantageResult, Handle, Rollouts
from mrl.data.prompts import PromptStream
from mrl.hang_report.process_registry import registry_folder, unregister_processes
from mrl.hang_report.ray_wait import RayWaiter
from mrl.rollout.client import EngineError
from mrl.rollout.engine_pool import NoEngineError
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.worker import RolloutWorker


class EngineOwner(Protocol):
    """Owner of the engines' memory and weights, as the rollout manager uses it (the controller's EngineLifecycle)."""

    def load(self) -> None:
        """Load the engines' GPU memory and weights. Do nothing if they are loaded."""
        ...

    def restore(self, failed: Mapping[str, str]) -> None:
        """Replace failed engines (URL -> reason) by engines that serve the current weight version."""
        ...


class FixedEngines:
    """Engines of a run without a trainer: never offloaded and never replaced."""

    def load(self) -> None:
        """Do nothing."""

    def restore(self, failed: Mapping[str, str]) -> None:
        """Raise EngineError."""
        raise EngineError(f"engines failed, and there is no trainer to push weights to new ones: {dict(failed)}")


class RolloutWorkerHandle:
    """Calls the Ray actor of the rollout worker with deadlines. Does not manage the engines' memory or weights.

    Every call raises StalledError when its deadline passes, RolloutWorkerLostError when the worker died (see mrl.hang_report),
    and the errors that the worker raises.
    """

    def __init__(self, spec: RolloutSpec, options: Mapping[str, Any], timeout_s: float) -> None:
        """Ask Ray for the actor, which starts its engines. Returns at once.

        `options`: options of the Ray actor. `timeout_s`: deadline of a call.
        """
        self.spec = spec
        self._create = lambda: ray.remote(RolloutWorker).options(**options).remote(spec)
        self.actor = self._create()
        self._waiter = RayWaiter(Path(spec.run_dir), "rollout")
        self.timeout_s = timeout_s + 2 * spec.scoring.timeout_s  # the scorer reaches its own deadline first
        self._start_timeout_s = 600.0  # deadline for engines to start; `wait_ready` sets it

    def call[T](
        self, method: Callable[Concatenate[RolloutWorker, ...], T], *args: Any, timeout_s: float | None = None
    ) -> T:
        """Call a method of the worker, given as `RolloutWorker.method`, and wait for its result."""
        future = getattr(self.actor, method.__name__).remote(*args)
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        return self._waiter.get([future], deadline_s, f"{method.__name__}() on the rollout worker")[0]

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait until all engines take requests; return their URLs."""
        self._start_timeout_s = timeout_s
        return self.call(RolloutWorker.wait_ready, timeout_s, timeout_s=timeout_s + 60)

    def replace_engines(self, urls: Sequence[str]) -> list[str]:
        """Replace these engines by new ones and wait for them; return the URLs of all engines."""
        start_s = self._start_timeout_s
        return self.call(RolloutWorker.replace_engines, list(urls), start_s, timeout_s=start_s + 60)

    def set_paused(self, paused: bool) -> None:
        """Tell the worker whether engines are paused on purpose: meanwhile, an engine that computes nothing has not failed."""
        self.call(RolloutWorker.set_paused, paused)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Mark the engines as paused on purpose inside this context, for example during a weight push."""
        self.set_paused(True)
        try:
            yield
        finally:
            self.set_paused(False)

    def alive(self, timeout_s: float = 30.0) -> bool:
        """Return whether the actor answers."""
        try:
            ray.get(self.actor.cpu_seconds.remote(), timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    def restart(self) -> None:
        """Kill the actor, which ends its engines, and ask Ray for another. Call `wait_ready` next."""
        ray.kill(self.actor)
        self.actor = self._create()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the engines and the actor."""
        with suppress(
            ray.exceptions.RayError, TimeoutError
        ):  # each engine's supervisor ends the engine when the actor ends
            ray.get(self.actor.close.remote(), timeout=timeout_s)
        ray.kill(self.actor)
        unregister_processes(registry_folder(self._waiter.run_dir), "rollout")
        unregister_processes(registry_folder(self._waiter.run_dir), "engine_*")


class RolloutManager:
    """Keeps the staleness buffer of the rollout worker filled with prompts and takes one step's groups at a time.

    A call raises what RolloutWorkerHandle raises.
    """

    def __init__(self, worker: RolloutWorkerHandle, engines: EngineOwner) -> None:
        """`engines`: loads the engines before sampling and replaces failed ones."""
        spec = worker.spec
        self.worker, self._engines = worker, engines
        self._tries = spec.fault_tolerance.max_response_attempts
        self._capacity = spec.buffer_capacity
        self._step, self._drawn = 0, 0  # number of the next step; prompts drawn so far
        # (number, row, admitted version) of the prompt requests that no step has consumed
        self._waiting: Sequence[tuple[int, ...]] = ()

    def generate(self, prompts: PromptStream, step: int) -> Rollouts:
        """Return the groups that `step` trains: G scored responses to each of N prompts (see mrl.rollout.staleness_buffer).

        Draws as many prompts as the buffer has room for, and more if the group filter rejects groups. The other groups stay
        in the buffer, and their sampling continues while the step is trained.
        """
        missing = max(0, self._capacity - len(self._waiting))
        while True:
            first, self._drawn = self._drawn, self._drawn + missing
            missing = self._call_engines(RolloutWorker.sample, first, prompts.take(missing), step)
            if not missing:
                break
        rollouts = self.worker.call(RolloutWorker.collect, step)
        self._step, self._drawn, self._waiting = step + 1, rollouts.drawn, rollouts.waiting
        return rollouts

    def evaluate(self, temperature: float) -> dict[str, float]:
        """Evaluate on the held-out prompts. Returns the mean reward by name of the test set; the name "" stands for all sets."""
        return self._call_engines(RolloutWorker.evaluate, temperature)

    def _call_engines[T](self, method: Callable[Concatenate[RolloutWorker, ...], T], *args: Any) -> T:
        """Call a worker method that needs engines, and replace engines that failed during the call.

        Repeats the call if all engines were lost. Raises EngineError after `fault_tolerance.max_response_attempts` such losses.
        """
        lost, failed = None, {}
        for _ in range(self._tries):
            self._engines.load()
            try:
                result = self.worker.call(method, *args)
            except NoEngineError as error:
                lost, failed = error, self._replace_failed()
            else:
                self._replace_failed()
                return result
        raise EngineError(
            f"all engines were lost {self._tries} times in a row (fault_tolerance.max_response_attempts), although they were "
            f"replaced each time; the last failures: {'; '.join(f'{url}: {reason}' for url, reason in failed.items())}"
        ) from lost

    def _replace_failed(self) -> dict[str, str]:
        if failed := self.worker.call(RolloutWorker.take_failed_engines):
            self._engines.restore(failed)
        return failed

    def estimate(self, columns: Mapping[str, list[Handle]], kl_coef: float, step: int) -> AdvantageResult:
        """Compute the advantages of the last generated groups, and the columns [R] that the losses need."""
        return self.worker.call(RolloutWorker.estimate, columns, kl_coef, step)

    def discard_log(self, before_step: int) -> None:
        """Delete the rollout log of the steps before `before_step`, which a checkpoint covers. Return at once."""
        self.worker.actor.discard_log.remote(before_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the prompt requests that are drawn and not trained, as plain values."""
        return dict(step=self._step, drawn=self._drawn, waiting=[list(request) for request in self._waiting])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to this state. Running requests are cancelled; cached completions of waiting requests are used again."""
        self._step, self._drawn = state["step"], state["drawn"]
        self._waiting = tuple(map(tuple, state["waiting"]))
        self.worker.call(RolloutWorker.resume, self._drawn, self._waiting, self._step)
