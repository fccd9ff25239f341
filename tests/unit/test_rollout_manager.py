"""RolloutManager replaces lost engines and repeats the call a limited number of times, and begins to write samples."""

from types import SimpleNamespace

import pytest

from mrl.rollout.client import EngineError
from mrl.rollout.engine_pool import NoEngineError
from mrl.rollout.manager import RolloutManager
from mrl.rollout.worker import RolloutWorker


class WorkerThatLosesEngines:
    """Stands in for the rollout worker's handle and the supply of engines. The first `losses` calls lose all engines."""

    def __init__(self, losses: int) -> None:
        faults = SimpleNamespace(max_response_attempts=3)
        self.spec = SimpleNamespace(fault_tolerance=faults, buffer_capacity=4, evaluations=("sampled", "greedy"))
        self.losses, self.restored, self.loads = losses, [], 0

    def call(self, method, *args):
        lost = len(self.restored) < self.losses
        if method is RolloutWorker.take_failed_engines:
            return {"http://h:1": "hangs (engine_0.log)"} if lost else {}
        if lost:
            raise NoEngineError("none")
        index, step = args
        return {f"eval/{self.spec.evaluations[index]}": step}

    def load(self) -> None:
        self.loads += 1

    def restore(self, failed) -> None:
        self.restored.append(failed)


def test_lost_engines_are_replaced_and_the_call_is_repeated_a_limited_number_of_times():
    worker = WorkerThatLosesEngines(losses=2)
    assert RolloutManager(worker, worker).evaluate(7) == {"eval/sampled": 7, "eval/greedy": 7}
    assert len(worker.restored) == 2
    assert worker.loads == 4, "engines are loaded before each attempt, and the second part is called once"
    worker = WorkerThatLosesEngines(losses=9)
    message = r"all engines were lost 3 times in a row.*http://h:1: hangs \(engine_0.log\)"
    with pytest.raises(EngineError, match=message):
        RolloutManager(worker, worker).evaluate(7)
    assert len(worker.restored) == 3


@pytest.mark.parametrize("kept", [0, 8])
def test_the_worker_is_called_for_samples_only_if_the_run_keeps_some(kept):
    worker, calls = WorkerThatLosesEngines(losses=0), []
    worker.spec.samples_per_step = kept

    def begin(method, *args):
        calls.append((method, *args))
        return lambda: calls.append("waited")

    worker.begin = begin
    wait = RolloutManager(worker, worker).begin_writing_samples(3)
    begun = [(RolloutWorker.write_samples, 3)] if kept else []
    assert calls == begun, "the call does not wait for the worker"
    wait()
    assert calls == begun + (["waited"] if kept else [])
