"""Parts of the training loop: the interfaces that the loop calls, the phases of a step, and what a step records.

mrl.core.types explains the letters of array dimensions, such as B and R.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage
from mrl.algorithms.losses import Loss
from mrl.core.metrics import Metrics
from mrl.core.run_errors import ProcessesLostError
from mrl.core.types import AdvantageResult, Handle, Rollouts, TeacherPart
from mrl.data.prompts import PromptStream
from parallel.spans import record

if TYPE_CHECKING:  # these modules import Ray, which `mrl plan` does not need
    from mrl.workers.group import PendingCall
    from mrl.workers.model_trainers import ActorUpdate, CriticUpdate

State = dict[str, Any]  # plain JSON values


class RolloutSource(Protocol):
    """Samples and scores responses. Their tokens stay in Ray's object store and never reach the driver."""

    def generate(self, prompts: PromptStream, step: int) -> Rollouts:
        """Return the B scored responses on which the step trains."""
        ...

    def estimate(
        self,
        columns: Mapping[str, list[Handle]],
        kl_coef: float,
        step: int,
        *,
        rows: NDArray[np.bool_] | None,
        advantage: Advantage | None,
        loss: Loss | None,
    ) -> AdvantageResult:
        """Compute advantages [R] of the responses that the last `generate` returned.

        The advantages depend on rewards and on columns. `columns`: name of a column -> Ray references to its values [R].
        `kl_coef` is the coefficient of the KL penalty in the reward, and `step` is the index of the training step. `rows` [B]
        selects responses; None: all responses. If `advantage` or `loss` is not None, it replaces the estimator or the loss of the
        config.
        """
        ...

    def begin_writing_samples(self, step: int) -> Callable[[], None]:
        """Begin to write samples of the step as text, with the columns of all earlier calls of `estimate` in this step.

        Returns a function that waits until the samples are written, and that raises an error if writing them failed. If samples
        of the step were written before, the new samples replace them.
        """
        ...

    def evaluate(self, step: int) -> Metrics:
        """Evaluate on the held-out prompts after `step` steps. Returns the metrics eval/*."""
        ...

    def state_dict(self) -> State:
        """Return the state for a checkpoint, including the prompts that were drawn from the data but not used by a step yet."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore a state that `state_dict` returned."""
        ...


class PolicyUpdater(Protocol):
    """Runs optimizer steps of the actor."""

    def begin_update(
        self,
        rollouts: Rollouts,
        advantages: AdvantageResult | None,
        step: int,
        coefs: Mapping[str, float],
        *,
        rows: NDArray[np.bool_] | None,
        loss: Loss | None,
        update_index: int,
    ) -> PendingCall[ActorUpdate]:
        """Begin to train on the responses that `rows` [B] selects; None: on all responses.

        `step`: number of earlier steps in which the actor was trained. `coefs`: name of a term of the loss (kl_loss, entropy) ->
        its coefficient. `update_index`: number of earlier updates of the actor in this step.
        """
        ...

    def metrics(self, updates: Sequence[ActorUpdate]) -> Metrics:
        """Return the metrics of all updates of a step."""
        ...


class ValueUpdater(Protocol):
    """Runs optimizer steps of the critic."""

    def begin_update(
        self, rollouts: Rollouts, advantages: AdvantageResult, step: int, *, rows: NDArray[np.bool_] | None
    ) -> PendingCall[CriticUpdate]:
        """Begin to train on the returns of the responses that `rows` [B] selects; None: on the returns of all responses.

        `step`: number of earlier steps of the run.
        """
        ...

    def metrics(self, updates: Sequence[CriticUpdate]) -> Metrics:
        """Return the metrics of all updates of a step."""
        ...


class WeightPusher(Protocol):
    """Pushes the actor's weights to all engines."""

    def push(self, version: int) -> Metrics:
        """Push the actor's weights, and return when every engine serves them as `version`."""
        ...


class LostProcessRecovery(Protocol):
    """Restarts lost processes."""

    initial_state: State  # state before the first step, for a run without a checkpoint

    def __call__(self, error: ProcessesLostError, state_after_step: State | None) -> State:
        """Restart the lost processes. Returns the state of the run that matches the trainers' weights.

        `state_after_step` is the state after the last finished step, or None if the weights of that step may be lost. If
        only the rollout worker was lost, and `state_after_step` is not None, this method returns `state_after_step`. Otherwise
        new trainers load the newest checkpoint that is not damaged, and the method returns the state in that checkpoint, or
        `initial_state` if there is no checkpoint. Raises an error if the run cannot continue.
        """
        ...


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one training step."""

    values: Metrics  # all metrics by name, except those that need the duration of the step
    mean_reward: float
    num_tokens: float  # tokens that the policy sampled
    num_samples: float  # responses
    worker_s: float  # seconds spent in engines, Megatron and rewards; the rest of the step is spent in the controller

    @classmethod
    def of(cls, recorded: Metrics, times: Metrics) -> Self:
        """Combine `times`, the times of the phases of a step, with `recorded`, the metrics from its operations.

        The metric `component_time/overlap_s` is the time that the step saved because models worked at the same time.
        """
        values = recorded | times
        # Sum of the durations of both updates. The phase "update" is shorter if actor and critic train at the same time.
        updates = sum(values.get(f"component_time/{name}_s", 0.0) for name in ("megatron", "critic"))
        update_overlap = max(0.0, updates - values.get("time/update_s", 0.0))
        score_overlap = max(0.0, values.get("component_time/score_s", 0.0) - values.get("time/score_s", 0.0))
        values["component_time/overlap_s"] = update_overlap + score_overlap
        others = sum(values.get(f"component_time/{name}_s", 0.0) for name in ("engine", "sync_engine", "reward"))
        worker_s = values.get("time/score_s", 0.0) + others + updates - update_overlap
        return cls(values, values["reward/mean"], values["rollout/tokens"], values["rollout/samples"], worker_s)

    def with_duration(self, seconds: float) -> Metrics:
        """Return all metrics, including those that need the duration of the whole step."""
        return self.values | {
            "time/step_s": seconds,
            "component_time/controller_s": seconds - self.worker_s,
            "throughput/tokens_per_s": self.num_tokens / seconds,
            "throughput/samples_per_s": self.num_samples / seconds,
        }


@dataclass
class StepRecord:
    """Results of the operations that the running step has called so far."""

    step: int = 0  # index of the step, from 0
    metrics: Metrics = field(default_factory=dict)
    rollouts: Rollouts | None = None  # result of `generate`; None before the call
    teachers: dict[str, Sequence[TeacherPart]] = field(default_factory=dict)  # outputs of the teachers, from `score`
    updates: list[ActorUpdate] = field(default_factory=list)
    critic_updates: list[CriticUpdate] = field(default_factory=list)
    # Whether an update has begun; the trainers may then have newer weights than before the step
    has_trained: bool = False
    pushed: bool = False  # whether the engines have the weights of the step
    # Waits until samples of the step are written; None: the call that writes them has not begun
    wait_for_samples: Callable[[], None] | None = None

    def begin(self, step: int, metrics: Metrics) -> None:
        """Begin the step with index `step`, whose first metrics are `metrics`."""
        self.reset()
        self.step, self.metrics = step, dict(metrics)

    def reset(self) -> None:
        """Remove all results of the step."""
        self.__init__(self.step)

    @property
    def token_weights(self) -> list[NDArray[np.float64]]:
        """For each optimizer step, an array [B]: one token weight per response, which all tokens of the response have."""
        return [weights for update in self.updates for weights in update.token_weights]

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add `seconds` to the metric `name`, which counts seconds."""
        self.metrics[name] = self.metrics.get(name, 0.0) + seconds

    def check_generate(self) -> None:
        """Raise ValueError if the step has called `generate` already."""
        if self.rollouts is not None:
            raise ValueError(f"{_IN_STEP} generate() was called twice in one step; call it once.")

    def check_update(self) -> None:
        """Record that an update begins. Raises ValueError if the step has pushed its weights already."""
        if self.pushed:
            raise ValueError(
                f"{_IN_STEP} update() was called after push(), which ends the training of a step; push last."
            )
        self.has_trained = True

    def generated(self) -> Rollouts:
        """Return the rollouts of the step. Raises ValueError if the step has not called `generate`."""
        if self.rollouts is None:
            raise ValueError(f"{_IN_STEP} the step ended without generate(); call generate() once in each step.")
        return self.rollouts


_IN_STEP = "trainer._target_:"  # begins the messages about mistakes in a user's own step


class Phases:
    """Measures the duration of each phase of a step, and records which phase is running or was interrupted."""

    def __init__(self) -> None:
        self.current: str | None = None  # the phase that is running
        self.interrupted: str | None = None  # the phase that is running, or that an exception has ended
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, since = time.time(), time.perf_counter()
        self.current = self.interrupted = name
        try:
            yield
            self.interrupted = None
        finally:
            self.current = None
            seconds = time.perf_counter() - since
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            record(name, "phase", start, seconds)  # the timeline shows the same duration as the metric

    def seconds(self) -> Metrics:
        """Return the metrics time/<phase>_s for the time since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}_s": value for name, value in seconds.items()}
