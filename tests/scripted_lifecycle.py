"""An EngineLifecycle whose rollout worker and trainer ranks are replaced by functions of a test."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from mrl.config.process_schema import WeightSyncConfig
from mrl.controller.colocation import ColocatedRoles, MemoryScheduler, OffloadableModel
from mrl.controller.engine_lifecycle import EngineLifecycle

Push = Callable[[int, bool], Sequence[Any]]  # (version, engines were offloaded) -> reports


class ScriptedEngineProcesses:
    """Stand-in for a rollout worker. `replace(failed URLs)` returns the URLs of all engines after the replacement."""

    def __init__(self, urls: Sequence[str], replace: Callable[[Sequence[str]], Sequence[str]]) -> None:
        self.urls, self.replace_engines = urls, replace
        self.pauses: list[bool] = []
        self.adapters: list[tuple[str, Sequence[str]]] = []  # arguments of all calls of set_adapter

    def wait_ready(self, timeout_s: float) -> Sequence[str]:
        return self.urls

    def rollout_worker_answers(self) -> bool:
        return True

    def restart(self) -> None:
        raise AssertionError("tests do not restart the rollout worker")

    def record_paused(self, paused: bool) -> None:
        self.pauses.append(paused)

    def set_adapter(self, name: str, urls: Sequence[str]) -> None:
        self.adapters.append((name, urls))

    @contextmanager
    def recorded_as_paused(self) -> Iterator[None]:
        yield


class ScriptedRanks:
    """Stand-in for trainer ranks whose methods are functions of the test."""

    def __init__(self, **methods: Callable[..., list[Any]]) -> None:
        self.methods = methods

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self.methods[method.__name__](*args)


def scripted_lifecycle(
    push: Push,
    connect: Callable[[Sequence[str]], Mapping[str, str]] = lambda urls: {},
    replace: Callable[[Sequence[str]], Sequence[str]] = lambda urls: [],
    urls: Sequence[str] = (),
    models: Mapping[str, OffloadableModel] | None = None,
    colocated: ColocatedRoles = frozenset(),
    **settings: Any,
) -> EngineLifecycle:
    """Return a lifecycle whose engines at `urls` have started. `settings`: fields of WeightSyncConfig."""
    scheduler = MemoryScheduler(colocated)
    for role, model in (models or {"actor": ScriptedModel()}).items():
        scheduler.register_model(role, model)
        scheduler.mark_started(role)
    lifecycle = EngineLifecycle(
        engine_processes=ScriptedEngineProcesses(urls, replace),
        actor=ScriptedRanks(push_weights=push, connect_engines=lambda urls, *_: [connect(urls)]),
        scheduler=scheduler,
        settings=WeightSyncConfig(**settings),
        startup_display=SimpleNamespace(ready=lambda text: None),  # type: ignore[bad-argument-type]
        weights_dir="unused",
        start_timeout_s=1.0,
        marks_pushes_as_pauses=False,
    )
    lifecycle.wait_started()
    return lifecycle


class ScriptedModel:
    """A model that needs no offloading."""

    def offload(self, keep_weights: bool = False) -> int:
        return 0

    def load_to_device(self) -> None:
        pass
