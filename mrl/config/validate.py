"""A composed config against the schema of mrl/config/schema.py: unknown keys, wrong types, single values that cannot be."""

import difflib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from mrl.config.schema import ClusterConfig, Config, EvaluateConfig, GenerateConfig, RolloutConfig
from mrl.config.secrets import refuse_literals


def known_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Dotted names of every key, sections included."""
    keys: list[str] = []
    for f in fields(schema):
        keys.append(prefix + f.name)
        inner = _section(f.type)
        if inner:
            keys += known_keys(inner, f"{prefix}{f.name}.")
    return keys


def _section(kind: Any) -> type | None:
    options = getattr(kind, "__args__", (kind,))  # Optional[X] is a typing object at the edge of ours
    return next((o for o in options if isinstance(o, type) and is_dataclass(o)), None)


def is_known(key: str) -> bool:
    """Whether `key` names a section, a key, or something inside a free-form node (plug-ins, sglang, megatron)."""
    keys = set(known_keys())
    sections = {k.rpartition(".")[0] for k in keys}
    parts = key.split(".")
    parents = [".".join(parts[:n]) for n in range(1, len(parts))]
    return key in keys or any(p in keys and p not in sections for p in parents)


def unknown_key_message(key: str) -> str:
    """What to tell a user who set `key`, which nothing reads."""
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown key {key!r}{hint} (`mrl train --cfg job` lists every key)"


def from_hydra(composed: DictConfig) -> Config:
    """Check a composed config against the schema; raises ValueError that names the key and what was expected."""
    written = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(written, dict), f"config is a {type(written)}"
    refuse_literals(written)
    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict), f"config is a {type(plain)}"
    for key in _leaves(plain):
        if not is_known(key):
            raise ValueError(unknown_key_message(key))
    try:
        with _writable(OmegaConf.structured(Config)) as schema:
            config = OmegaConf.to_object(OmegaConf.merge(schema, composed))
    except OmegaConfBaseException as error:
        if error.full_key and "missing mandatory value" in str(error).lower():
            raise ValueError(f"{error.full_key} must be set: {error.full_key}=VALUE") from None
        raise ValueError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Config), f"config is a {type(config)}"
    check(config)
    return config


@contextmanager
def _writable(schema: DictConfig) -> Iterator[DictConfig]:
    """`schema` with the read-only flags gone that OmegaConf takes over from frozen dataclasses."""
    with ExitStack() as stack:
        nodes = [schema]
        while nodes:
            node = nodes.pop()
            stack.enter_context(read_write(node))
            nodes += [child for name in node if isinstance(child := node._get_node(name), DictConfig)]
        yield schema


def _leaves(node: dict, prefix: str = "") -> list[str]:
    found = []
    for name, value in node.items():
        key = f"{prefix}{name}"
        nested = isinstance(value, dict) and value and key in {k.rpartition(".")[0] for k in known_keys()}
        found += _leaves(value, key + ".") if nested else [key]
    return found


_POSITIVE = [
    "rollout.prompts_per_step",
    "rollout.responses_per_prompt",
    "rollout.max_response_tokens",
    "rollout.num_engines",
    "rollout.engine_tp",
    "rollout.temperature",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
    "scoring.sample_timeout_s",
    "scoring.timeout_s",
    "scoring.memory_gb",
    "sft.steps",
    "sft.batch_size",
    "sft.lr",
    "trainer.stop_window",
    "trainer.max_tokens_per_micro_batch",
    "trainer.logprob_chunk",
    "algorithm.mini_batches",
    "algorithm.epochs",
    "rollout.max_sampling_rounds",
    "critic.lr",
    "trainer.timeout_s",
    "generate.samples",
    "generate.top_p",
    "generate.prompts_per_file",
    "generate.requests_in_flight",
    "certify.prompts",
    "certify.responses_per_prompt",
    "certify.prompt_tokens",
    "certify.response_tokens",
    "certify.lr",
    "weight_sync.bucket_bytes",
    "weight_sync.timeout_s",
    "weight_sync.tries",
    "checkpoint.keep_last",
    "checkpoint.timeout_s",
    "faults.engine_stall_s",
    "faults.engine_tries",
    "capsule.window",
    "plan.send_gb_per_s",
    "plan.receive_gb_per_s",
    "plan.expert_imbalance",
    "plan.top",
    "plan.matmul_efficiency",
    "plan.attention_efficiency",
    "plan.expert_efficiency",
    "plan.bandwidth_efficiency",
    "plan.pcie_gb_per_s",
    "cluster.start_timeout_s",
]
_NOT_NEGATIVE = [
    "run.seed",
    "generate.temperature",
    "trainer.max_steps",
    "trainer.eval_every",
    "algorithm.clip_grad",
    "algorithm.warmup_steps",
    "algorithm.lr_decay_steps",
    "algorithm.lr_min",
    "critic.clip_grad",
    "critic.value_clip",
    "critic.warmup_steps",
    "sft.warmup_steps",
    "checkpoint.every",
    "checkpoint.keep_best",
    "checkpoint.export_every",
    "faults.max_restarts",
    "plan.response_sigma",
    "plan.latency_us",
    "faults.grace_s",
    "capsule.spike",
    "capsule.keep",
    "cluster.gpus_per_node",
    "plan.reserve_gb",
]

_ONE_OF = {
    "algorithm.old_logprobs": ("recompute", "rollout"),
    "rollout.mode": ("sync", "one_step_off", "async"),
    "rollout.order": (None, "drawn", "finished"),
    "data.bad_rows": ("error", "skip"),
    "data.overlong": ("error", "skip"),
    "weight_sync.transport": ("auto", "shared_memory", "cuda_ipc", "process_group", "disk"),
    "weight_sync.pause_mode": ("retract", "abort", "in_place"),
}


def check(config: Config) -> None:
    """Rules on single values; raises ValueError naming the key, its value and what fits."""
    for key in (*_POSITIVE, *_NOT_NEGATIVE):
        section, _, name = key.partition(".")
        value = vars(vars(config)[section])[name]
        if value < 0 or (value == 0 and key in _POSITIVE):
            raise ValueError(f"{key}={value}: must be {'greater than 0' if key in _POSITIVE else '0 or more'}.")
    if config.scoring.workers is not None and config.scoring.workers < 1:
        raise ValueError(f"scoring.workers={config.scoring.workers}: must be 1 or more, or null for one each core.")
    if config.trainer.eval_rows is not None and config.trainer.eval_rows < 1:
        raise ValueError(f"trainer.eval_rows={config.trainer.eval_rows}: must be 1 or more, or null for all rows.")
    for name in ("mini_batches", "epochs"):
        if (count := vars(config.critic)[name]) is not None and count < 1:
            raise ValueError(f"critic.{name}={count}: must be 1 or more, or null for the actor's.")
    for key, fits in _ONE_OF.items():
        section, _, name = key.partition(".")
        if (value := vars(vars(config)[section])[name]) not in fits:
            fits = tuple(filter(None, fits))
            near = difflib.get_close_matches(str(value), fits, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ValueError(f"{key}={value!r}: expected {', '.join(fits[:-1])} or {fits[-1]}{hint}")
    _check_asynchrony(config.rollout)
    _check_sampling(config.generate)
    _check_evaluation(config.evaluate)
    _check_cluster(config.cluster)
    if config.model.dtype not in ("bfloat16", "float32"):
        raise ValueError(f"model.dtype={config.model.dtype!r}: expected bfloat16 or float32.")


def _check_asynchrony(rollout: RolloutConfig) -> None:
    if rollout.max_staleness is not None and (rollout.mode != "async" or rollout.max_staleness < 0):
        raise ValueError(
            f"rollout.max_staleness={rollout.max_staleness} with rollout.mode={rollout.mode}: expected 0 or more, with "
            "rollout.mode=async; sync has 0 and one_step_off 1."
        )
    if rollout.over_sampling < 0 or (rollout.over_sampling and rollout.order == "drawn"):
        raise ValueError(
            f"rollout.over_sampling={rollout.over_sampling} with rollout.order={rollout.order}: expected 0 or more, and 0 with "
            "rollout.order=drawn, which waits for every group."
        )


def _check_sampling(generate: GenerateConfig) -> None:
    for name in ("max_response_tokens", "rows"):
        if (value := vars(generate)[name]) is not None and value < 1:
            raise ValueError(f"generate.{name}={value}: must be 1 or more, or null.")
    if generate.top_p > 1 or generate.top_k == 0 or generate.top_k < -1:
        raise ValueError(
            f"generate.top_p={generate.top_p}, generate.top_k={generate.top_k}: expected a probability of at most 1, and a "
            "number of tokens or -1."
        )
    if generate.temperature == 0 and generate.samples > 1:
        raise ValueError(
            f"generate.samples={generate.samples} with generate.temperature=0: all would be the same response; set one of "
            "them to 1."
        )


def _check_evaluation(evaluate: EvaluateConfig) -> None:
    if any(k < 1 for k in evaluate.k):
        raise ValueError(f"evaluate.k={list(evaluate.k)}: expected numbers of responses, 1 or more.")
    if not 0 < evaluate.confidence < 1:
        raise ValueError(f"evaluate.confidence={evaluate.confidence}: expected a probability such as 0.95.")


_OF_A_JOB = ("partition", "time", "slurm", "components", "dry_run")


def _check_cluster(cluster: ClusterConfig) -> None:
    if cluster.scheduler not in (None, "slurm"):
        raise ValueError(
            f"cluster.scheduler={cluster.scheduler!r}: expected slurm, or null for a run that starts here."
        )
    default = ClusterConfig()
    for name in _OF_A_JOB if cluster.scheduler is None else ():
        if (value := vars(cluster)[name]) != vars(default)[name]:
            raise ValueError(f"cluster.{name}={value}: is for a job, and this run starts here; add cluster=slurm.")
    if cluster.nodes is not None and cluster.nodes < 1:
        raise ValueError(f"cluster.nodes={cluster.nodes}: must be 1 or more, or null for as many as the run needs.")
    if cluster.time is not None and not _TIME.fullmatch(cluster.time):
        raise ValueError(
            f"cluster.time={cluster.time!r}: expected hours:minutes:seconds, days-hours or days-hours:minutes:seconds, as in "
            "4:00:00 or 2-12 (in a yaml file in quotes, which else makes a number of it), or UNLIMITED."
        )


_TIME = re.compile(r"\d+:\d\d:\d\d|\d+-\d+(:\d\d(:\d\d)?)?|UNLIMITED", re.IGNORECASE)
