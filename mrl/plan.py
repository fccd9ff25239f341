"""A checked Config -> a Plan: every mistake a user can make is found here, before any process starts."""

import difflib
import json
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models.conversion.hf_io import check_checkpoint
from models.families import family_of
from models.megatron_fields import DECIDED, UNEVEN, transformer_fields
from models.spec import Architecture
from mrl.algorithms.advantages import Advantage
from mrl.algorithms.losses import Loss
from mrl.algorithms.reduce import AGGREGATIONS
from mrl.config import Config, Node, SftConfig
from mrl.data.batching import CostModel
from mrl.data.prompts import PromptDataset
from mrl.data.sft import SftDataset
from mrl.plugin import plug_in
from mrl.rewards.base import Reward
from mrl.rollout import recording
from mrl.rollout.server import check_server_args, default_server_args
from mrl.workers.shares import Packing
from parallel.dims import ParallelDims
from parallel.optimizer_settings import AdamW


@dataclass(frozen=True)
class ModelPlan:
    """A model to train and its layout, checked; what supervised training needs."""

    config: Config
    dims: ParallelDims
    optimizer: AdamW
    model_path: str  # where weights come from: model.path, or the warm start made earlier
    arch: Architecture
    packing: Packing

    @property
    def context(self) -> int:
        """Longest sequence of the model, tokens."""
        return self.arch.max_position_embeddings


@dataclass(frozen=True)
class Plan(ModelPlan):
    """A config of reinforcement learning whose every part was built or checked, before any process starts."""

    advantage: Advantage
    loss: Loss
    reward: Reward
    server_args: dict[str, Any]
    warm_start: SftConfig | None  # a supervised stage still to run
    num_prompts: int


def plan_training(config: Config) -> Plan:
    """Check everything a user can get wrong; raises ValueError, starts no process."""
    _check_run_dir(config)
    if config.algorithm.aggregation not in AGGREGATIONS:
        raise ValueError(
            f"algorithm.aggregation={config.algorithm.aggregation!r}; expected one of {', '.join(AGGREGATIONS)}."
        )
    if not config.data.train:
        raise ValueError("data.train must name at least one parquet or jsonl file of prompts (see docs/data.md).")
    parts = dict(
        advantage=plug_in(config.algorithm.advantage, "algorithm.advantage"),
        loss=plug_in(config.algorithm.loss, "algorithm.loss", needs=("zero_without_advantage", "uses_entropy")),
        reward=plug_in(config.reward, "reward"),
    )
    check_server_args(config.sglang)
    make_inputs(config)
    sft = config.sft
    done = sft.output if sft.train and sft.output and Path(sft.output).is_dir() else None
    if done:
        _check_origin(config, done)
    base = _model_plan(config, done or config.model.path)
    num_prompts = _check_prompts(config, base)
    warm_start = sft if sft.train and not done else None
    if warm_start:
        _check_supervised(config, base)
    args = _server_args(config, base.context)
    return Plan(**vars(base), **parts, server_args=args, warm_start=warm_start, num_prompts=num_prompts)


def plan_supervised(config: Config) -> ModelPlan:
    """Check what supervised training needs; raises ValueError, starts no process."""
    if not config.sft.train:
        raise ValueError("sft.train must name a file of prompt/response rows (see docs/sft.md).")
    if config.sft.output and Path(config.sft.output).exists():
        raise ValueError(f"sft.output={config.sft.output} exists already; name another folder, or remove it.")
    _check_run_dir(config)
    make_inputs(config)
    base = _model_plan(config, config.model.path)
    _check_supervised(config, base)
    return base


def plan_certificate(config: Config) -> ModelPlan:
    """Check what `mrl certify` needs; raises ValueError, starts no process."""
    if config.certify.response_tokens < 2:
        raise ValueError(
            f"certify.response_tokens={config.certify.response_tokens}: lengths are drawn from 1 to it; use 2."
        )
    _check_run_dir(config)
    make_inputs(config)
    return _model_plan(config, config.model.path)


def _check_prompts(config: Config, base: ModelPlan) -> int:
    """Check all prompt files, and recorded rollouts to be replayed; returns the number of training prompts."""
    limit = prompt_limit(config, base.context)
    data = PromptDataset.load(config.data.train, base.model_path, limit)
    data.check_vocabulary(base.arch.vocab_size)
    if config.data.test:
        PromptDataset.load(config.data.test, base.model_path, limit).check_vocabulary(base.arch.vocab_size)
    if config.rollout.replay:
        routing = config.rollout.routing_replay
        recording.check(config.rollout.replay, config.trainer.max_steps, routing=routing)
    return len(data)


def _check_supervised(config: Config, base: ModelPlan) -> None:
    assert config.sft.train, "callers look first"
    SftDataset.load(config.sft.train, base.model_path, base.context).check_vocabulary(base.arch.vocab_size)


ORIGIN = "mrl_sft.json"  # in a warm start's folder: what it was made from


def origin(config: Config) -> dict[str, Any]:
    """What decides the weights of a warm start."""
    return dict(
        model=config.model.path, seed=config.run.seed if config.data.inputs is None else None, sft=asdict(config.sft)
    )


def _check_origin(config: Config, folder: str) -> None:
    """Raise ValueError where an existing warm start was made from another model or with other settings."""
    path = Path(folder) / ORIGIN
    made = json.loads(path.read_text()) if path.is_file() else None
    wanted = json.loads(json.dumps(origin(config)))
    if made != wanted:
        raise ValueError(
            f"sft.output={folder}: was made from other settings ({made}), now wanted: {wanted}; remove the folder to make it "
            "again, name another sft.output, or set sft.train=null to train model.path as it is."
        )


CLAIM = "started"  # in a run's folder: a run has begun to write there


def claim(run_dir: Path) -> None:
    """Take a run's folder for this run alone; raises FileExistsError where another run was faster."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / CLAIM).open("x").close()


def _check_run_dir(config: Config) -> None:
    """Raise ValueError where the run's folder holds the results of another run."""
    for name in (CLAIM, "metrics.jsonl", "sft.jsonl", "checkpoint", "hf"):
        if (Path(config.run.dir) / name).exists():
            raise ValueError(f"run.dir={config.run.dir}: holds {name} of another run; name another folder.")


def make_inputs(config: Config) -> None:
    """Run `data.inputs`, which makes the files that the rest of the config names where they are missing."""
    if config.data.inputs:
        plug_in(config.data.inputs, "data.inputs")()


def _model_plan(config: Config, path: str) -> ModelPlan:
    dims = ParallelDims.of_world(**vars(config.parallel))
    hf = check_checkpoint(path)
    arch = family_of(hf).read(hf)
    arch.check_layout(dims, uneven_stages=bool(UNEVEN & config.megatron.keys()))
    check_megatron(config.megatron, decided=DECIDED | arch.transformer.keys())
    _check_experts(config, arch, dims)
    packing = Packing(config.trainer.max_tokens_per_micro_batch, config.trainer.share_prompts, CostModel(*arch.flops()))
    return ModelPlan(config, dims, _optimizer(config), path, arch, packing)


def _check_experts(config: Config, arch: Architecture, dims: ParallelDims) -> None:
    """Rules of models with experts; raises ValueError."""
    if config.rollout.routing_replay and not arch.num_experts:
        raise ValueError(f"rollout.routing_replay=true: {config.model.path} has no experts; leave it false.")
    check_balance(config.megatron.get("moe_router_load_balancing_type", "none"), dims)
    if config.megatron.get("moe_token_dispatcher_type") == "allgather" and (dims.pp > 1 or dims.lockstep):
        raise ValueError(
            "megatron.moe_token_dispatcher_type=allgather: it exchanges packs of equal length only, so parallel.pp must be 1 "
            f"and ep x etp at most tp x cp; got pp={dims.pp}, ep={dims.ep}, etp={dims.expert_tp}, tp={dims.tp}, "
            f"cp={dims.cp}. Use alltoall, the default."
        )


def check_balance(kinds: str | list[str], dims: ParallelDims) -> None:
    """Balancing losses that mean something for packs; raises ValueError."""
    key = f"megatron.moe_router_load_balancing_type={kinds}"
    if "seq_aux_loss" in kinds:
        raise ValueError(f"{key}: to the router a pack is one sequence, so this would be aux_loss; use that.")
    if "global_aux_loss" in kinds and dims.dp > 1:
        raise ValueError(
            f"{key}: replicas would have to run equally many packs, and it follows the order of packs; with "
            f"dp={dims.dp} use aux_loss."
        )


def check_megatron(overrides: Node, decided: AbstractSet[str] = frozenset()) -> None:
    """Raise ValueError at a name that is no field of Megatron's TransformerConfig, or one `decided` elsewhere."""
    known = transformer_fields()
    for name in overrides:
        if name in decided:
            raise ValueError(
                f"megatron.{name} is decided by the model, model.dtype or the parallel section; set it there."
            )
        if name.startswith("tp_comm_overlap") and overrides[name]:
            raise ValueError(
                f"megatron.{name}={overrides[name]}: its buffers have one size, packs have any; leave it out."
            )
        if name.startswith("fp8") and overrides[name] and find_spec("transformer_engine") is None:
            raise ValueError(
                f"megatron.{name}={overrides[name]}: FP8 needs Transformer Engine, which is not installed."
            )
        if name == "moe_grouped_gemm" and overrides[name] and find_spec("transformer_engine") is None:
            raise ValueError(f"megatron.{name}=true: grouped experts need Transformer Engine, which is not installed.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean megatron.{near[0]}?" if near else ""
            raise ValueError(f"megatron.{name} is not a field of Megatron's TransformerConfig{hint}")


def _optimizer(config: Config) -> AdamW:
    return AdamW(**{f.name: getattr(config.algorithm, f.name) for f in fields(AdamW)})


def prompt_limit(config: Config, context: int) -> int:
    """Longest prompt in tokens that leaves room for the response."""
    room = context - config.rollout.max_response_tokens
    if room < 1:
        raise ValueError(
            f"rollout.max_response_tokens={config.rollout.max_response_tokens}: the model's context of {context} "
            f"tokens leaves no room for a prompt; use at most {context - 1}."
        )
    return min(room, config.data.max_prompt_tokens or room)


def _server_args(config: Config, context: int) -> dict[str, Any]:
    return default_server_args(dtype=config.model.dtype, context_length=context) | config.sglang
