"""Every key we own: its type, unit, default and effect. The yaml groups in conf/ mirror this file.

A value of type `Node` names a class or function by Hydra's `_target_`; it is built, and its arguments checked, in
mrl/build.py before any process starts. Unknown keys are errors.
"""

import difflib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

Node = dict[str, Any]


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"  # names the run in wandb and in the default folder
    dir: str = MISSING  # everything of a run goes here: metrics, logs, rollouts, checkpoints, picture
    seed: int = 0  # order of prompts, sampling, initialisation


@dataclass(frozen=True)
class ModelConfig:
    path: str = MISSING  # Hugging Face folder: config.json, *.safetensors, tokenizer
    dtype: str = "bfloat16"  # of weights and activations: bfloat16 or float32


@dataclass(frozen=True)
class DataConfig:
    inputs: Node | None = None  # callable run once before anything is read: makes the files named below
    train: list[str] = field(default_factory=list)  # parquet or jsonl files with the five columns
    test: list[str] = field(default_factory=list)  # held-out files; empty: no evaluation
    shuffle: bool = True  # a new order every epoch, from run.seed
    max_prompt_tokens: int | None = None  # longest allowed prompt; default: the model's context less the response


@dataclass(frozen=True)
class RolloutConfig:
    prompts_per_step: int = 32  # N: distinct prompts sampled in one step
    responses_per_prompt: int = 8  # G: responses to each prompt
    max_response_tokens: int = 512  # a longer response is cut
    temperature: float = 1.0  # of sampling, and of the log-probabilities in training
    num_engines: int = 1  # SGLang servers
    engine_tp: int = 1  # tensor-parallel size of each engine
    routing_replay: bool = (
        False  # train with the experts that the engine chose for each token (a mixture of experts only)
    )
    start_timeout_s: float = 600.0  # until every engine answers
    request_timeout_s: float = 600.0  # for one batch of responses
    record: bool = False  # keep each step's tokens in run.dir/rollouts/step_N.npz
    replay: str | None = None  # folder of such files: train on them, without any engine


@dataclass(frozen=True)
class AlgorithmConfig:
    advantage: Node = MISSING  # rewards [B] -> advantages [B]
    loss: Node = MISSING  # loss per response token
    aggregation: str = "token_mean"  # how tokens are averaged: token_mean or sequence_mean
    skip_zero_advantage: bool = True  # leave out responses that cannot change the gradient (same loss, less work)
    mini_batches: int = 1  # optimizer steps on each rollout, over whole groups
    lr: float = 1e-6  # learning rate after warm-up
    lr_schedule: str = (
        "constant"  # after warm-up: constant, linear or cosine, over lr_decay_steps; or wsd: drop at the end
    )
    lr_decay_steps: int = 0  # optimizer steps until the learning rate is lr_min; warm-up included
    lr_min: float = 0.0  # learning rate in the end
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    eps: float = 1e-8  # of AdamW
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # largest gradient norm; 0: no clipping
    warmup_steps: int = 0  # optimizer steps of linear learning-rate warm-up


@dataclass(frozen=True)
class SftConfig:
    train: str | None = None  # parquet or jsonl file with columns prompt (messages), response (text); none: no stage
    output: str | None = None  # Hugging Face folder to write; `mrl train` skips the stage where it exists already
    steps: int = 200  # optimizer steps
    batch_size: int = 128  # rows per step
    lr: float = 1e-5  # learning rate, decaying linearly to a tenth
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = 1  # tensor-parallel size: each layer's matrices are cut over tp processes
    sp: bool | None = None  # sequence parallelism over the same processes; default: where tp > 1
    pp: int = 1  # pipeline stages
    vpp: int = 1  # virtual stages on each pipeline process
    cp: int = 1  # context-parallel size: each sequence is cut over cp processes
    ep: int = 1  # expert-parallel size: a layer's experts are spread over ep processes
    etp: int | None = None  # expert-tensor-parallel size; default: tp
    dp: int | None = None  # data-parallel replicas; default: world_size / (tp * pp * cp), or as few as the experts need
    world_size: int | None = None  # trainer processes in all, in place of dp


@dataclass(frozen=True)
class TrainerConfig:
    max_steps: int = 1000  # steps of rollout and update; fewer end the run early and cleanly
    stop_reward: float | None = None  # end when the mean reward of the last `stop_window` steps reaches this
    stop_window: int = 5  # steps
    max_tokens_per_micro_batch: int = 8192  # tokens in one packed forward pass, per replica
    share_prompts: bool = True  # compute a prompt once for all responses to it in a pack (same gradients, less work)
    logprob_chunk: int = 1024  # tokens whose logits exist at one time
    eval_every: int = 0  # steps between evaluations on data.test; 0: only before and after
    eval_rows: int | None = None  # evaluate on the first rows of data.test only
    save: bool = True  # write checkpoint/ and hf/ at the end
    timeout_s: float = 1800.0  # for any one call to the trainer processes


@dataclass(frozen=True)
class WeightSyncConfig:
    bucket_bytes: int = 512 * 1024 * 1024  # weights travel to the engines in buckets of at most this size
    verify: bool = True  # compare a checksum of every tensor on both sides after each sync
    timeout_s: float = 600.0  # for one sync


@dataclass(frozen=True)
class CertifyConfig:
    """`mrl certify`: one step under the layout, and in one process."""

    prompts: int = 8  # groups of the batch, of random tokens
    responses_per_prompt: int = 4
    prompt_tokens: int = 24  # longest prompt; lengths are drawn
    response_tokens: int = 40  # longest response; lengths are drawn
    critic: bool = False  # a critic with a value head in place of the actor
    lr: float = 1e-4  # of the one step
    dtype: str = "float32"  # of both sides, whatever model.dtype is; bfloat16 hides mistakes in its round-off


@dataclass(frozen=True)
class TrackingConfig:
    wandb: bool = True  # offline unless a key is set; never asks for a login
    project: str = "mrl"  # wandb project


@dataclass(frozen=True)
class ClusterConfig:
    address: str | None = None  # of a running Ray cluster; default: start one on this machine
    start_timeout_s: float = 600.0  # until all trainer processes have their model


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: Node = MISSING  # responses -> rewards
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sft: SftConfig = field(default_factory=SftConfig)  # the job of `mrl sft`; in `mrl train` a warm start
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    certify: CertifyConfig = field(default_factory=CertifyConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sglang: Node = field(default_factory=dict)  # any ServerArgs field of SGLang, passed on
    megatron: Node = field(default_factory=dict)  # any TransformerConfig field of Megatron, passed on


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
        for node in [schema, *(schema._get_node(f.name) for f in fields(Config))]:
            if isinstance(node, DictConfig):
                stack.enter_context(read_write(node))
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
    "sft.steps",
    "sft.batch_size",
    "sft.lr",
    "trainer.stop_window",
    "trainer.max_tokens_per_micro_batch",
    "trainer.logprob_chunk",
    "algorithm.mini_batches",
    "trainer.timeout_s",
    "certify.prompts",
    "certify.responses_per_prompt",
    "certify.prompt_tokens",
    "certify.response_tokens",
    "certify.lr",
    "weight_sync.bucket_bytes",
    "weight_sync.timeout_s",
    "cluster.start_timeout_s",
]
_NOT_NEGATIVE = [
    "trainer.max_steps",
    "trainer.eval_every",
    "algorithm.clip_grad",
    "algorithm.warmup_steps",
    "algorithm.lr_decay_steps",
    "algorithm.lr_min",
    "sft.warmup_steps",
]


def check(config: Config) -> None:
    """Rules on single values; raises ValueError naming the key, its value and what fits."""
    for key in (*_POSITIVE, *_NOT_NEGATIVE):
        section, _, name = key.partition(".")
        value = vars(vars(config)[section])[name]
        if value < 0 or (value == 0 and key in _POSITIVE):
            raise ValueError(f"{key}={value}: must be {'greater than 0' if key in _POSITIVE else '0 or more'}.")
    if config.trainer.eval_rows is not None and config.trainer.eval_rows < 1:
        raise ValueError(f"trainer.eval_rows={config.trainer.eval_rows}: must be 1 or more, or null for all rows.")
    if config.model.dtype not in ("bfloat16", "float32"):
        raise ValueError(f"model.dtype={config.model.dtype!r}: expected bfloat16 or float32.")
