"""The driver's side of sampling: asks a rollout worker, sees lengths and rewards, never a token."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from mrl.core.types import Estimates, Handle, Rollouts
from mrl.data.prompts import PromptStream
from mrl.hang_report.register import forget, stacks
from mrl.hang_report.waiting import Waiter
from mrl.rollout.asking import NoEngineError
from mrl.rollout.client import EngineError
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.worker import RolloutWorker


class RolloutGenerator:
    """One rollout worker behind deadlines.

    Any call raises Stalled when its deadline passes, WorkerLost when the worker died (see mrl.hang_report), and what it raised.
    """

    def __init__(self, spec: RolloutSpec, options: dict[str, Any], timeout_s: float) -> None:
        """Ask Ray for the worker, which starts its engines; returns at once."""
        self._capacity = (spec.staleness + 1) * spec.prompts_per_step + spec.window_extra
        self._step, self._drawn = 0, 0  # the next step; tickets so far
        self._waiting: Sequence[tuple[int, ...]] = ()  # those that no step has taken: (number, row, version)
        self._make = lambda: ray.remote(RolloutWorker).options(**options).remote(spec)
        self.worker = self._make()
        self._waiter = Waiter(Path(spec.run_dir), "rollout")
        self.timeout_s = timeout_s + 2 * spec.scoring.timeout_s  # the scorer ends by itself before
        self.tries = spec.faults.engine_tries
        self.restore: Callable[[Mapping[str, str]], object] = (
            _no_restore  # failed engines, and why: others with their weights
        )
        self.before: Callable[[], object] = lambda: None  # is called before engines are asked for samples
        self.start_timeout_s = 600.0  # of an engine; `wait_ready` says how long

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait for the engines; returns their URLs."""
        self.start_timeout_s = timeout_s
        return self._wait("wait_ready", [timeout_s], timeout_s + 60)

    def alive(self, timeout_s: float = 30.0) -> bool:
        """Whether the worker answers."""
        try:
            ray.get(self.worker.cpu_seconds.remote(), timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    def renew(self) -> None:
        """End the worker at once, its engines with it, and ask Ray for another; `wait_ready` comes next."""
        ray.kill(self.worker)
        self.worker = self._make()

    def replace_engines(self, urls: Sequence[str]) -> list[str]:
        """Start other engines in place of these; returns the URLs of all."""
        deadline = self.start_timeout_s
        return self._wait("replace_engines", [list(urls), deadline], deadline + 60)

    def generate(self, prompts: PromptStream, step: int) -> Rollouts:
        """The groups that the step trains: G responses to each of N prompts, scored (see mrl.rollout.window).

        As many prompts are drawn as may be in the making; more, in place of groups that a filter refuses. What the step does
        not train stays in the making while it is trained.
        """
        missing = max(0, self._capacity - len(self._waiting))
        while True:
            first, self._drawn = self._drawn, self._drawn + missing
            missing = self._sampled("gather", first, prompts.take(missing), step)
            if not missing:
                break
        rollouts: Rollouts = self._ask("collect", step)
        self._step, self._drawn, self._waiting = step + 1, rollouts.drawn, rollouts.waiting
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        """The prompts that are drawn and not trained, as plain values."""
        return dict(step=self._step, drawn=self._drawn, waiting=[list(ticket) for ticket in self._waiting])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: what is in the making is given up, and what was answered of it meanwhile is taken up again."""
        self._step, self._drawn = state["step"], state["drawn"]
        self._waiting = tuple(map(tuple, state["waiting"]))
        self._ask("restart", self._drawn, self._waiting, self._step)

    def hold(self, held: bool) -> None:
        """Whether engines are paused on purpose, so that nobody takes them for stuck."""
        self._ask("hold", held)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While engines are paused for a push."""
        self.hold(True)
        try:
            yield
        finally:
            self.hold(False)

    def forget(self, before: int) -> None:
        """What was sampled for the steps before this one is not needed again. Nobody waits for it."""
        self.worker.forget.remote(before)

    def estimate(self, columns: Mapping[str, list[Handle]], kl_coef: float, step: int) -> Estimates:
        """Advantages and the columns [R] that losses need, of what was generated last."""
        return self._ask("estimate", columns, kl_coef, step)

    def _sampled(self, method: str, *arguments: Any) -> Any:
        """Ask for what engines are needed for. Those that fail are replaced afterwards; where none was left, it is asked again.

        Raises EngineError where none was left `faults.engine_tries` times.
        """
        lost, failed = None, {}
        for _ in range(self.tries):
            self.before()
            try:
                answer = self._ask(method, *arguments)
            except NoEngineError as error:
                lost, failed = error, self._replace_failed()
            else:
                self._replace_failed()
                return answer
        raise EngineError(
            f"no engine was left {self.tries} times in a row (faults.engine_tries), although all were replaced; the last: "
            f"{'; '.join(f'{url}: {why}' for url, why in failed.items())}"
        ) from lost

    def _replace_failed(self) -> dict[str, str]:
        if failed := self._ask("failed_engines"):
            self.restore(failed)
        return failed

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._wait(method, arguments, self.timeout_s)

    def _wait(self, method: str, arguments: Sequence[Any], timeout_s: float) -> Any:
        future = getattr(self.worker, method).remote(*arguments)
        return self._waiter.get([future], timeout_s, f"{method}() on the rollout worker")[0]

    def evaluate(self, temperature: float) -> dict[str, float]:
        """Mean reward on the held-out prompts, of each named set, and of all under ""."""
        return self._sampled("evaluate", temperature)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the engines and their worker."""
        with suppress(ray.exceptions.RayError, TimeoutError):  # engines end with their worker: a supervisor watches it
            ray.get(self.worker.close.remote(), timeout=timeout_s)
        ray.kill(self.worker)
        forget(stacks(self._waiter.run_dir), "rollout")
        forget(stacks(self._waiter.run_dir), "engine_*")


def _no_restore(failed: Mapping[str, str]) -> None:
    raise EngineError(f"engines failed, and nobody brings weights to others: {dict(failed)}")
