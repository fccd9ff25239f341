"""Plans the steps of a run before any process starts: the training step, and the data that each step uses.

`trainer._target_` names the training step (StepPlan). The data of a step depends on the sampling parameters, the sampler of
prompts, the group sizes, the offline rows and the number of epochs.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np

from mrl.algorithms.inputs import required_inputs_of
from mrl.algorithms.objective import Objective
from mrl.algorithms.parts import AlgorithmParts
from mrl.config.instantiate import import_target, instantiate_arguments, instantiate_callable
from mrl.config.schema import Config, Node
from mrl.controller.example_steps import by_source, check_sources
from mrl.controller.plan_models import ModelPlan, chat_template, max_prompt_length
from mrl.controller.trainer import Trainer
from mrl.core.code_locations import describe_error
from mrl.data.offline import OfflineRows, TokenLimits, check_groups
from mrl.data.prompts import PromptDataset, PromptDrawing, PromptStream
from mrl.data.tokenizer import tokenizer_is_code
from mrl.rollout.client import SAMPLING_KEYS, SamplingParams
from mrl.rollout.engines.server_args import NO_TOKENIZER
from mrl.rollout.response_metrics import HeldOutEvaluation, response_limit_section
from mrl.tracking.console import show_warning

KEY = "trainer"


@dataclass(frozen=True)
class StepPlan:
    """What runs a training step: `Trainer.train_step`, the same method of a subclass, or a function."""

    trainer: type[Trainer] = Trainer
    function: Callable[[Trainer], None] | None = None  # None: the method `train_step` of the class
    fields: Mapping[str, Any] = field(default_factory=dict)  # values of the fields that a subclass adds
    # config key of the step or of one of its arguments -> columns that `Trainer.score` must compute for this step or argument
    required_inputs: Mapping[str, frozenset[str]] = field(default_factory=dict)

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
    required_inputs = {f"{KEY}._target_": required_inputs_of(factory) | {"old_logprobs"}}
    required_inputs |= {key: required_inputs_of(value) for key, value in _values(arguments, f"{KEY}.arguments")}
    if isinstance(factory, type):
        _check_class(factory, arguments)
        return StepPlan(factory, None, arguments, required_inputs)
    _check_function(factory, arguments)
    return StepPlan(Trainer, partial(factory, **arguments), {}, required_inputs)


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


def _values(arguments: object, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (config key, value) for the values in nested dicts and lists. `key`: config key of `arguments`."""
    if isinstance(arguments, Mapping):
        for name, value in arguments.items():
            yield from _values(value, f"{key}.{name}")
    elif isinstance(arguments, Sequence) and not isinstance(arguments, str):
        for index, value in enumerate(arguments):
            yield from _values(value, f"{key}.{index}")
    else:
        yield key, arguments


TRUNCATING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Key of the section rollout that restricts sampling to likely tokens -> value with which the key has no effect."""


def plan_sampling(config: Config) -> SamplingParams:
    """Return the sampling parameters of the training responses. Raises ValueError for an invalid value."""
    rollout = config.rollout
    node = {name: getattr(rollout, name) for name in SAMPLING_KEYS if name != "n"}
    return SamplingParams.of(node, "rollout", SamplingParams(rollout.max_response_tokens))


def check_sampling(
    config: Config, sampling: SamplingParams, evaluations: Sequence[HeldOutEvaluation], vocab_size: int
) -> None:
    """Raise ValueError if the engines cannot sample as the config says. `evaluations`: how held-out sets are evaluated."""
    sections = [(response_limit_section(next(iter(each.sets))), each.sampling) for each in evaluations]
    for section, params in [*sections, ("rollout", sampling)]:
        if outside := [token for token in params.stop_token_ids if token >= vocab_size]:
            raise ValueError(
                f"{section}.stop_token_ids={list(params.stop_token_ids)}: token {outside[0]} is outside the vocabulary of the "
                f"model, which ends at {vocab_size - 1}."
            )
        if params.min_p and config.rollout.deterministic:
            raise ValueError(
                f"{section}.min_p={params.min_p} with rollout.deterministic=true: SGLang cannot sample with min_p and a seed; "
                "use top_p instead, or set rollout.deterministic=false."
            )


def tokenizer_args(
    config: Config, sampling: SamplingParams, evaluations: Sequence[HeldOutEvaluation]
) -> dict[str, Any]:
    """Return the server arguments with which engines find stop texts (keys `stop`); {} if there are no stop texts.

    Raises ValueError if the config section `sglang` contradicts these arguments, or if the engines cannot load the tokenizer.
    """
    keys = ["rollout.stop"] if sampling.stop else []
    keys += [f"{response_limit_section(next(iter(each.sets)))}.stop" for each in evaluations if each.sampling.stop]
    if keys and config.sglang.get(NO_TOKENIZER):
        raise ValueError(
            f"sglang.{NO_TOKENIZER}=true: engines without a tokenizer cannot find the texts of {keys[0]}; leave {NO_TOKENIZER} "
            "out, or use stop_token_ids."
        )
    if keys and tokenizer_is_code(config.model.path) and not config.sglang.get("trust_remote_code"):
        raise ValueError(
            f"{keys[0]}: engines need the tokenizer to find stop texts, but tokenizer_config.json in {config.model.path} names a "
            "tokenizer that is code (auto_map), and engines run no code of the folder; remove auto_map from this file, or use "
            "stop_token_ids."
        )
    return {NO_TOKENIZER: False} if keys else {}


def warn_of_sampling(config: Config, objective: Objective) -> None:
    """Warn if the engines sample from another distribution than the one whose log-probabilities training uses.

    SGLang returns log-probabilities at the sampling temperature, after the repetition penalty, and before top_p, top_k and min_p.
    So a correction by importance sampling compensates for the penalty, but not for the tokens that top_p, top_k or min_p
    exclude.
    """
    rollout = config.rollout
    values = {name: getattr(rollout, name) for name in TRUNCATING}
    changed = [f"rollout.{name}={value}" for name, value in values.items() if value != TRUNCATING[name]]
    if changed:
        show_warning(
            f"{', '.join(changed)}: the engines leave out unlikely tokens, but training uses the log-probabilities of the whole "
            "distribution. The policy is trained only on tokens that are likely already, and nothing corrects for this "
            "(docs/concepts/algorithms.md)."
        )
    is_corrected = objective.correction is not None or objective.rollout_logprobs_as_old
    if rollout.repetition_penalty != 1 and not is_corrected:
        show_warning(
            f"rollout.repetition_penalty={rollout.repetition_penalty}: the engines sample from a distribution with the penalty, "
            "but training uses the distribution without it. Set algorithm.correction (docs/concepts/corrections.md), which "
            "corrects for it, or rollout.repetition_penalty=1."
        )


def prompt_stream(config: Config, train: PromptDataset, prompt_drawing: PromptDrawing) -> PromptStream:
    """Return a new stream of the training prompts of a run. No prompt is drawn from it yet."""
    return train.stream(config.rollout.prompts_per_step, config.run.seed, config.data.shuffle, prompt_drawing)


def plan_prompt_drawing(config: Config, train: PromptDataset) -> PromptDrawing:
    """Build the sampler and the group-size function that the config names, and call both once, as the first step does.

    Raises ValueError if one of the two cannot be built, fails, or returns an invalid result.
    """
    sampler, sizes = config.data.sampler, config.rollout.group_sizes
    if sampler and not config.data.shuffle:
        raise ValueError(
            "data.shuffle=false: only the default sampler reads this key; remove it, or remove data.sampler."
        )
    prompt_drawing = PromptDrawing(
        instantiate_callable(sampler, "data.sampler") if sampler else None,
        json.dumps(sampler, sort_keys=True) if sampler else "",  # identifies the sampler in checkpoints
        instantiate_callable(sizes, "rollout.group_sizes") if sizes else None,
    )
    rows = np.zeros(config.rollout.prompts_per_step, np.int64)
    if sampler:
        rows = _call("data.sampler", sampler, lambda: prompt_stream(config, train, prompt_drawing).take(len(rows)))
    if sizes:
        stream = prompt_stream(config, train, prompt_drawing)
        _call("rollout.group_sizes", sizes, lambda: stream.group_sizes(rows, config.rollout.responses_per_prompt))
    return prompt_drawing


def _call[T](key: str, node: Node, call: Callable[[], T]) -> T:
    """Return the result of user code. Raises ValueError with the config key if the code fails."""
    try:
        return call()
    except Exception as error:  # user code may raise anything
        text = str(error) if isinstance(error, ValueError) else describe_error(error)
        raise ValueError(text if text.startswith(key) else f"{key}: {node['_target_']} failed: {text}") from error


def plan_offline(config: Config, actor: ModelPlan, algorithm: AlgorithmParts) -> OfflineRows | None:
    """Read the rows of data.offline.path, if it is set. Raises ValueError if the run cannot train on these rows."""
    offline = config.data.offline
    if not offline.path:
        if offline != type(offline)():
            raise ValueError("data.offline.path must name a file, because other keys of data.offline are set.")
        return None
    if config.rollout.routing_replay:
        raise ValueError(
            "rollout.routing_replay=true: the rows of data.offline.path have no experts of an engine; set it to false."
        )
    if "greedy_rewards" in algorithm.required_inputs:
        raise ValueError(
            "data.offline.path: algorithm.advantage compares with greedy responses, which the rows of a file do not have; use "
            "another algorithm, such as algorithm=grpo."
        )
    limits = TokenLimits(
        max_prompt_length(config, actor.context), config.rollout.max_response_tokens, actor.arch.vocab_size
    )
    try:
        rows = OfflineRows.load(
            offline,
            actor.model_path,
            limits,
            seed=config.run.seed,
            system=config.data.system,
            chat=chat_template(config),
        )
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith("data.offline") else f"data.offline.path: {text}") from None
    if config.algorithm.old_logprobs == "rollout" and not rows.has_all_logprobs:
        raise ValueError(
            f"data.offline.path={offline.path}: some rows have no logprobs, which algorithm.old_logprobs=rollout needs; set "
            "algorithm.old_logprobs=recompute, or add the column."
        )
    advantage = algorithm.advantage_pipeline.advantage
    if warning := check_groups(rows, getattr(advantage, "group_relative", False), type(advantage).__name__):
        show_warning(warning)
    return rows


def num_steps(config: Config, num_rows: int) -> int:
    """Return the largest number of steps of a run: trainer.max_steps, or the number for trainer.epochs if that is smaller.

    With a rollout filter or over-sampling, a step uses more than prompts_per_step prompts, so the epochs may end after fewer
    steps.
    """
    epochs, limit = config.trainer.epochs, config.trainer.max_steps
    if epochs is None:
        return limit
    return min(limit, math.ceil(num_prompts(epochs, num_rows) / config.rollout.prompts_per_step))


def num_prompts(epochs: float, num_rows: int) -> float:
    """Return how many prompts this number of passes over the data uses, without the rounding error of the product."""
    return round(epochs * num_rows, 6)


def check_epochs(config: Config, num_rows: int) -> None:
    """Raise ValueError for trainer.epochs in a run that draws no prompts, and warn if trainer.max_steps ends the run earlier."""
    if config.trainer.epochs is None:
        return
    if config.rollout.replay:
        raise ValueError(
            f"trainer.epochs={config.trainer.epochs}: a run with rollout.replay draws no prompts; set trainer.max_steps only."
        )
    needed = math.ceil(num_prompts(config.trainer.epochs, num_rows) / config.rollout.prompts_per_step)
    if config.trainer.max_steps < needed:
        show_warning(
            f"trainer.epochs={config.trainer.epochs} takes {needed} steps, but trainer.max_steps={config.trainer.max_steps} ends "
            f"the run earlier; set trainer.max_steps={needed} or more to use all prompts."
        )
