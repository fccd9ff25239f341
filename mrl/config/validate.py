"""Checks of a composed config beyond types: bounds, rules between keys, and hints for unknown keys."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from mrl.config.counterparts import counterpart_of
from mrl.config.process_schema import ClusterConfig, RoleConfig
from mrl.config.ray_settings import check_ray_settings
from mrl.config.schema import Config, GenerateConfig, Node, ParallelConfig
from mrl.config.secrets import refuse_plain_secrets
from parallel.trainer_config import check_ddp_settings, check_optimizer_settings

LAYOUT_OVERRIDES = ("critic.parallel",)
"""Keys whose value overrides fields of the section `parallel`. The value may have any field of ParallelConfig.

The schema has no types for these entries, so this module checks them. `check` also checks roles.NAME.parallel, which overrides
fields of the section `parallel` for one role.
"""
RENAMED_KEYS = {
    "teacher.path": "roles.teacher.path",
    "teacher.parallel": "roles.teacher.parallel",
    "tracking.wandb": "tracking.backends",
    "critic.value_clip": "critic.loss.clip",
    "algorithm.lr": "optim.lr",
    "algorithm.lr_schedule": "optim.lr_schedule",
    "algorithm.lr_decay_steps": "optim.lr_decay_steps",
    "algorithm.lr_min": "optim.lr_min",
    "algorithm.betas": "optim.betas",
    "algorithm.eps": "optim.eps",
    "algorithm.weight_decay": "optim.weight_decay",
    "algorithm.clip_grad": "optim.clip_grad",
    "algorithm.warmup_steps": "optim.warmup_steps",
    "rollout.order": "rollout.group_order",
    "rollout.over_sampling": "rollout.over_sample_rate",
    "rollout.start_timeout_s": "cluster.start_timeout_s",
    "checkpoint.timeout_s": "trainer.timeout_s",
    "generate.max_response_tokens": "rollout.max_response_tokens",
    "weight_sync.tries": "weight_sync.max_attempts",
    "capsule.steps": "step_dump.steps",
    "capsule.spike": "step_dump.spike_factor",
    "capsule.window": "step_dump.spike_window",
    "capsule.keep": "step_dump.max_spikes",
    "faults.max_restarts": "fault_tolerance.max_restarts",
    "faults.engine_stall_s": "fault_tolerance.engine_stall_timeout_s",
    "faults.engine_tries": "fault_tolerance.max_response_attempts",
    "faults.grace_s": "fault_tolerance.preemption_grace_s",
    "plan.send_gb_per_s": "plan.weight_sync_gb_per_s",
    "plan.receive_gb_per_s": "plan.weight_sync_gb_per_s",
    "plan.matmul_efficiency": "plan.efficiency.matmul",
    "plan.attention_efficiency": "plan.efficiency.attention",
    "plan.expert_efficiency": "plan.efficiency.experts",
    "plan.bandwidth_efficiency": "plan.efficiency.bandwidth",
    "sweep.params": "hydra.sweeper.params",
    "sweep.at_once": "hydra.launcher.n_jobs",
    "sweep.trials": "hydra.sweeper.n_trials",
    "sweep.maximize": "sweep.direction",
    "cluster.partition": "cluster.slurm.partition",
    "cluster.time": "cluster.slurm.time",
    **{f"{section}.{name}": f"{section}.optim.{name}" for section in ("critic", "sft")
       for name in ("lr", "betas", "eps", "weight_decay", "clip_grad")},
    "sft.warmup_steps": "sft.optim.warmup_steps",
}  # fmt: skip
"""Former name of a key -> its current name. Only hints for unknown keys use this table."""


def section_type(annotation: Any) -> type | None:
    """Return the dataclass if a field with this type annotation is a section; return None if the field is a key."""
    return annotation if isinstance(annotation, type) and is_dataclass(annotation) else None


def key_fields(schema: type = Config, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Yield (dotted key, dataclass field) for every key. Sections themselves are not yielded."""
    for field in fields(schema):
        inner = section_type(field.type)
        if inner:
            yield from key_fields(inner, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field


def known_keys() -> list[str]:
    """Return the dotted names of all sections and keys."""
    keys = [key for key, _ in key_fields()]
    sections = {key.rpartition(".")[0] for key in keys} | {key.partition(".")[0] for key in keys}
    return [*keys, *sorted(sections - {""} - set(keys))]


def is_known(key: str) -> bool:
    """Return whether `key` is a section, a key, or an entry of a free-form key (sglang, megatron, arguments of plug-ins)."""
    if key in known_keys():
        return True
    for layout in LAYOUT_OVERRIDES:
        if key.startswith(f"{layout}."):
            return key.removeprefix(f"{layout}.") in ParallelConfig.__dataclass_fields__
    free_form_keys = {name for name, field in key_fields() if _is_free_form(field)}
    parts = key.split(".")
    return any(".".join(parts[:n]) in free_form_keys for n in range(1, len(parts)))


def _is_free_form(field: Field) -> bool:
    return field.type is Any or "dict" in str(field.type).lower()


def unknown_key_message(key: str, groups: Sequence[str] = ()) -> str:
    """Return the error message for an unknown key. The message names known keys or config groups with similar names, if any."""
    candidates = [*groups, *known_keys()]
    for layout in LAYOUT_OVERRIDES:
        if key.startswith(f"{layout}."):
            candidates = [f"{layout}.{name}" for name in ParallelConfig.__dataclass_fields__]
    leaves = {name.rpartition(".")[2] for name in candidates}
    if key not in RENAMED_KEYS and key.rpartition(".")[2] not in leaves and (counterpart := counterpart_of(key)):
        target, source = counterpart
        return f"unknown key {key!r}; did you mean {target!r}? (`mrl import` translates whole configs of {source})"
    near = _keys_with_last_name(key, candidates) or difflib.get_close_matches(
        key, [*candidates, *RENAMED_KEYS], n=1, cutoff=0.5
    )
    names = list(dict.fromkeys(RENAMED_KEYS.get(name, name) for name in near))
    hint = f"; did you mean {' or '.join(map(repr, names))}?" if names else ""
    return f"unknown key {key!r}{hint} (`mrl config` lists every key)"


COMMON_NAMES = {
    "group_size": "rollout.responses_per_prompt",
    "max_new_tokens": "rollout.max_response_tokens",
}
"""Name of a key that is common in other trainers -> mrl key. The hint for an unknown key uses this table.

mrl/config/counterparts.py has no rule for these names.
"""


def _keys_with_last_name(key: str, candidates: Iterable[str]) -> list[str]:
    """Return at most 3 keys that the last part of `key` suggests: seed -> run.seed. A renamed key gives no keys.

    If the last part is in COMMON_NAMES, the result is its mrl key. Otherwise, if `key` has a section, the result is the keys
    with the same last part, or none if there are more than 3. If `key` has no section, the result is the keys whose last part
    is `key`, or, if there are none, the keys with a similar last part.
    """
    if key in RENAMED_KEYS:
        return []
    section, _, leaf = key.rpartition(".")
    if leaf in COMMON_NAMES:
        return [COMMON_NAMES[leaf]]
    by_leaf: dict[str, list[str]] = {}
    for name in candidates:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    if section:
        found = by_leaf.get(leaf, [])  # the right name in a wrong section
        return [] if len(found) > 3 else found
    near = [leaf] if leaf in by_leaf else difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)
    return [name for each in near for name in by_leaf[each]][:3]


@cache
def structured_schema() -> DictConfig:
    """Return the schema as a typed OmegaConf node with all defaults.

    All callers get the same node, so they must not change it, but may copy or merge it. OmegaConf makes nodes of frozen
    dataclasses read-only, and copies of a read-only node are read-only too. This function makes the node writable again, because
    Hydra sets values in a copy.
    """

    def clear_readonly(node: DictConfig) -> None:
        OmegaConf.set_readonly(node, None)
        for name in node:
            child = node._get_node(name)
            if isinstance(child, DictConfig) and not (child._is_none() or child._is_missing()):
                clear_readonly(child)

    schema = OmegaConf.structured(Config)
    clear_readonly(schema)
    return schema


def from_hydra(composed: DictConfig) -> Config:
    """Convert a composed config to the schema's dataclasses.

    Raises:
        PlainSecretError: The config contains a secret in plain text.
        ValueError: A value is wrong. The message names the key and the expected value.
    """
    written = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(written, dict), f"config is a {type(written)}"
    refuse_plain_secrets(written)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(structured_schema(), composed))
    except OmegaConfBaseException as error:
        raise ValueError(type_error_message(error)) from None
    assert isinstance(config, Config), f"config is a {type(config)}"
    check(config)
    return config


def type_error_message(error: OmegaConfBaseException) -> str:
    """Return OmegaConf's error as one line. The line names the key and the expected value."""
    key, text = error.full_key or "config", str(error).splitlines()[0]
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return unknown_key_message(key)
    if "missing mandatory value" in text.lower():
        return f"{key} must be set: {key}=VALUE"
    if choices := re.fullmatch(r"Invalid value '(.*)', expected one of \[(.*)\]", text):
        value, expected = choices[1], choices[2].split(", ")
        near = difflib.get_close_matches(value, expected, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        return f"{key}={value!r}: expected {' or '.join(filter(None, [', '.join(expected[:-1]), expected[-1]]))}{hint}"
    return f"{key}: {text}"


def check(config: Config) -> None:
    """Raise ValueError if a value is outside its bounds or if keys contradict each other."""
    _check_bounds(config)
    _check_generate(config.generate)
    check_cluster(config.cluster)
    _check_megatron(config)
    _check_layout_overrides("critic.parallel", config.critic.parallel)
    for name, role in roles_of(config).items():
        _check_layout_overrides(f"roles.{name}.parallel", role.parallel)
    if unknown := config.plan.efficiency.keys() - type(config.plan)().efficiency.keys():
        raise ValueError(unknown_key_message(f"plan.efficiency.{min(unknown)}"))


def _check_megatron(config: Config) -> None:
    """Check the settings of Megatron's data parallelism and of its optimizers."""
    overlap = config.trainer.overlap_grad_reduce
    check_ddp_settings(config.trainer.ddp, "trainer.ddp", overlap)
    check_ddp_settings(config.trainer.ddp | config.critic.ddp, "critic.ddp", overlap)
    for section, optim in (
        ("optim", config.optim),
        ("critic.optim", config.critic.optim),
        ("sft.optim", config.sft.optim),
    ):
        check_optimizer_settings(optim.megatron, section)


def _check_bounds(section: Any, prefix: str = "") -> None:
    """Check every number against the bounds in the metadata of its field: above, below, least, most."""
    for field in fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        if section_type(field.type):
            _check_bounds(value, f"{key}.")
            continue
        for number in _numbers(value):
            bounds = field.metadata
            inside = (
                number > bounds.get("above", -float("inf"))
                and number < bounds.get("below", float("inf"))
                and bounds.get("least", number) <= number <= bounds.get("most", number)
            )
            if not inside:
                raise ValueError(f"{key}={value}: must be {bounds_text(field)}{_or_null(field)}.")


def _numbers(value: Any) -> list[float]:
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]


def bounds_text(field: Field) -> str:
    """Return the bounds of a key in words, or "" if it has no bounds."""
    words = {"above": "greater than {:g}", "least": "{:g} or more", "below": "less than {:g}", "most": "at most {:g}"}
    return " and ".join(text.format(field.metadata[name]) for name, text in words.items() if name in field.metadata)


def _or_null(field: Field) -> str:
    return ", or null" if field.default is None else ""


def _check_generate(generate: GenerateConfig) -> None:
    if generate.top_k == 0:
        raise ValueError("generate.top_k=0: expected a number of tokens, or -1 for all.")
    if generate.temperature == 0 and generate.samples > 1:
        raise ValueError(
            f"generate.samples={generate.samples} with generate.temperature=0: with temperature 0 all samples are equal; "
            "set one of the two keys to 1."
        )


_JOB_KEYS = ("slurm", "components", "dry_run")  # keys of the section cluster that apply only to a Slurm job


def check_cluster(cluster: ClusterConfig) -> None:
    """Raise ValueError if keys of a Slurm job are set without cluster=slurm, or if a time limit or a setting of Ray is wrong."""
    default = ClusterConfig()
    for name in _JOB_KEYS if cluster.scheduler is None else ():
        if (value := vars(cluster)[name]) != vars(default)[name]:
            raise ValueError(
                f"cluster.{name}={value}: applies only to a Slurm job, but this run starts on this machine; add cluster=slurm."
            )
    check_ray_settings(cluster.ray, slurm=cluster.scheduler is not None, address=cluster.address)
    time = cluster.slurm.get("time")
    if time is not None and not (isinstance(time, str) and _SLURM_TIME.fullmatch(time)):
        raise ValueError(
            f"cluster.slurm.time={time!r}: expected hours:minutes:seconds, days-hours or days-hours:minutes:seconds, such as "
            "4:00:00 or 2-12, or UNLIMITED; in a yaml file, put quotes around it, because yaml reads 4:00:00 as a number."
        )


_SLURM_TIME = re.compile(r"\d+:\d\d:\d\d|\d+-\d+(:\d\d(:\d\d)?)?|UNLIMITED", re.IGNORECASE)


BUILT_IN_ROLES = ("actor", "critic", "engines")
"""Roles that have their own sections in every config (parallel, critic, rollout). No entry of `roles` may have these names."""
_TAKEN_NAMES = (*BUILT_IN_ROLES, "engine", "trainer")  # the last two occur in names of processes and logs
REFERENCE_ROLE = "reference"  # name of the role that computes ref_logprobs
TEACHER = "teacher"  # name of the role that teaches all prompts that no other role teaches


def roles_of(config: Config) -> dict[str, RoleConfig]:
    """Return name -> RoleConfig for the entries of `roles`. Raises ValueError for a wrong name, unknown field or wrong type."""
    return {name: _role(name, node) for name, node in config.roles.items()}


def teachers_of(config: Config) -> dict[str, RoleConfig]:
    """Return name -> role for the teachers of distillation. Raises ValueError if two roles teach the same data source."""
    teachers = {name: role for name, role in roles_of(config).items() if name == TEACHER or role.teacher_for}
    by_source: dict[str, str] = {}
    for name, role in teachers.items():
        for source in role.teacher_for:
            if other := by_source.get(source):
                raise ValueError(
                    f"roles.{name}.teacher_for={role.teacher_for}: roles.{other} teaches the data source {source!r} too; a data "
                    "source has one teacher."
                )
            by_source[source] = name
    return teachers


@dataclass(frozen=True)
class TokenBudgets:
    """Largest numbers of tokens in a micro-batch of one model."""

    train: int  # limit for passes with gradients
    forward: int  # limit for passes without gradients: log-probabilities, values, losses of held-out rows


def token_budgets(config: Config, role: str) -> TokenBudgets:
    """Return the token budgets of the model `role`.

    A model without a budget of its own uses the actor's budget for the same kind of pass. If the actor's key for forward passes
    is null, these passes use the actor's budget for training.
    """
    trainer, critic = config.trainer, config.critic
    train = trainer.max_tokens_per_micro_batch
    forward = trainer.max_tokens_per_forward_micro_batch or train
    if role == "critic":
        return TokenBudgets(
            critic.max_tokens_per_micro_batch or train, critic.max_tokens_per_forward_micro_batch or forward
        )
    own = None if role == "actor" else roles_of(config)[role].max_tokens_per_micro_batch
    return TokenBudgets(own or train, own or forward)


def _role(name: str, node: Any) -> RoleConfig:
    key = f"roles.{name}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in _TAKEN_NAMES:
        raise ValueError(
            f"{key}: expected a name of a-z, 0-9 and _ that begins with a letter and is none of {', '.join(_TAKEN_NAMES)}."
        )
    if not isinstance(node, dict):
        raise ValueError(f"{key}={node!r}: expected the fields of a model, as in {key}.path=FOLDER.")
    known = [field.name for field in fields(RoleConfig)]
    for field_name in node.keys() - set(known):
        near = difflib.get_close_matches(field_name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"a role has {', '.join(known)}."
        raise ValueError(f"unknown key '{key}.{field_name}'; {hint}")
    try:
        role = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RoleConfig()), node))
    except OmegaConfBaseException as error:
        raise ValueError(f"{key}.{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(role, RoleConfig), "the schema is RoleConfig"
    _check_bounds(role, f"{key}.")
    if role.is_served:
        # Fields of a model whose log-probabilities the trainer ranks compute
        training_side_fields = ("column", "parallel", "max_tokens_per_micro_batch")
        if extra := [field_name for field_name in training_side_fields if node.get(field_name)]:
            raise ValueError(
                f"{key}.{extra[0]}: SGLang serves this model (num_engines={role.num_engines}); remove {extra[0]}."
            )
        if not role.path:
            raise ValueError(f"{key}.path must be set: it names the folder of the model that SGLang serves.")
        return role
    if extra := [field_name for field_name in ("engine_tp", "sglang") if node.get(field_name)]:
        raise ValueError(f"{key}.{extra[0]}: applies only to a model that SGLang serves; set {key}.num_engines too.")
    prefix = "ref" if name == REFERENCE_ROLE else TEACHER if role.teacher_for else name
    # `column` is the name of the batch's column with the log-probabilities that this model computes
    return replace(role, column=role.column or f"{prefix}_logprobs")


def _check_layout_overrides(key: str, layout: Node) -> None:
    try:
        checked = OmegaConf.merge(OmegaConf.structured(ParallelConfig()), layout)
        _check_bounds(OmegaConf.to_object(checked), f"{key}.")
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise ValueError(unknown_key_message(f"{key}.{error.key}")) from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{key}.{error.full_key}: {str(error).splitlines()[0]}") from None
