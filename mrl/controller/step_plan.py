"""StepPlan: the training step that `trainer._target_` names, checked before any process starts."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

from mrl.algorithms.inputs import needs_of
from mrl.config.instantiate import import_target, instantiate_arguments
from mrl.config.schema import Config
from mrl.controller.example_steps import by_source, check_sources
from mrl.controller.trainer import Trainer

KEY = "trainer"


@dataclass(frozen=True)
class StepPlan:
    """What runs a training step: `Trainer.train_step`, the same method of a subclass, or a function."""

    trainer: type[Trainer] = Trainer
    function: Callable[[Trainer], None] | None = None  # None: the method `train_step` of the class
    fields: Mapping[str, Any] = field(default_factory=dict)  # values of the fields that a subclass adds
    needs: frozenset[str] = frozenset()  # columns that `Trainer.score` must compute for the step

    def build(self, **parts: Any) -> Trainer:
        """Return the trainer. `parts` are the fields of Trainer."""
        return self.trainer(**parts, **self.fields, step_function=self.function)


def plan_step(config: Config) -> StepPlan:
    """Return the step that the config selects. Raises ValueError if it cannot be imported or its arguments are wrong.

    A step that `trainer._target_` names may train on a rollout in several updates, so it always needs old_logprobs.
    """
    target = config.trainer._target_
    if not target:
        if config.trainer.arguments:
            raise ValueError("trainer.arguments: there is no trainer._target_ that takes them; set it, or remove them.")
        return StepPlan()
    node = {"_target_": target, **config.trainer.arguments}
    factory = import_target(node, KEY)
    arguments = instantiate_arguments(factory, node, f"{KEY}.arguments")
    needs = frozenset({"old_logprobs"}).union(needs_of(factory), *map(needs_of, _values(arguments)))
    if isinstance(factory, type):
        _check_class(factory, arguments)
        return StepPlan(factory, None, arguments, needs)
    _check_function(factory, arguments)
    return StepPlan(Trainer, partial(factory, **arguments), {}, needs)


def check_step_sources(step: StepPlan, sources: Iterable[str]) -> None:
    """Raise ValueError if the step is `by_source` and has no algorithm for one of the data sources of the run."""
    if isinstance(step.function, partial) and step.function.func is by_source:
        check_sources(step.function.keywords["algorithms"], sources)


def _check_class(factory: type, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if the class is no subclass of Trainer, or if an argument is missing or is a field of Trainer itself."""
    target = f"trainer._target_={factory.__module__}.{factory.__qualname__}"
    if not issubclass(factory, Trainer) or not is_dataclass(factory):
        raise ValueError(f"{target}: expected a function, or a subclass of mrl.controller.trainer.Trainer.")
    own = {each.name for each in fields(Trainer)}
    if taken := sorted(own & arguments.keys()):
        raise ValueError(f"trainer.arguments.{taken[0]}: mrl sets this field of Trainer; give your field another name.")
    parameters = inspect.signature(factory).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty} - own
    if missing := sorted(required - arguments.keys()):
        raise ValueError(f"trainer.arguments.{missing[0]} is missing: {target} needs it.")


def _check_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if the function cannot be called with one trainer and these arguments."""
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise ValueError(
            f"trainer._target_={function.__module__}.{function.__qualname__}: is called with the Trainer and trainer.arguments; "
            f"{error}."
        ) from None


def _values(arguments: object) -> Iterator[Any]:
    """Yield the values in nested dicts and lists."""
    if isinstance(arguments, Mapping):
        for value in arguments.values():
            yield from _values(value)
    elif isinstance(arguments, Sequence) and not isinstance(arguments, str):
        for value in arguments:
            yield from _values(value)
    else:
        yield arguments
