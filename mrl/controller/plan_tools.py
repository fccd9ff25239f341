"""Plans of `mrl sft`, `mrl certify`, `mrl replay`, `mrl plan sync` and `mrl plan placement`.

Every function raises ValueError for a mistake in the config. No function starts a process. If data.inputs is set, all functions
except `plan_replay` create its files.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from models.conversion.peft_folder import ADAPTER_FOLDER, base_model
from models.megatron_overrides import UNEVEN_STAGE_FIELDS
from mrl.checkpoint.resume import continues_from_checkpoint
from mrl.checkpoint.run_dir import check_unused
from mrl.config.process_schema import Transport
from mrl.config.schema import Config
from mrl.controller.plan_adapters import AdapterPush, check_adapter_sync, plan_adapter_push, syncs_adapters
from mrl.controller.plan_engine_dtype import check_engine_dtype, is_fp8
from mrl.controller.plan_models import (
    ModelPlan,
    build_pools,
    check_layout,
    drop_lora_path_if_continuing,
    engine_layout,
    gpu_transport,
    make_input_files,
    plan_model,
    plan_models,
    planned_gpus,
)
from mrl.controller.plan_supervised import SupervisedObjective, check_supervised_data
from mrl.controller.plan_train import algorithm_of
from mrl.placement.resource_pools import Pools
from mrl.rollout.engines.server_args import check_server_args
from mrl.weight_sync.engine_layout import ITEM_BYTES, EngineLayout
from mrl.weight_sync.transfer_plan import (
    RelayStep,
    TransferPlan,
    compile_transfer_plan,
    even_pipeline_stages,
    relay_ranks,
    relay_steps,
    trainer_shards,
)
from parallel.dims import ParallelDims

logger = logging.getLogger(__name__)


def plan_supervised(config: Config) -> ModelPlan:
    """Check the config of `mrl sft`, and return its plan."""
    if not config.sft.train:
        raise ValueError("sft.train must name a file of rows (see docs/tutorials/data.md).")
    if config.sft.output and Path(config.sft.output).exists():
        raise ValueError(f"sft.output={config.sft.output} exists already; name another folder, or remove it.")
    check_unused(Path(config.run.dir))
    make_input_files(config)
    model = plan_model(config, config.model.path, head=SupervisedObjective.of(config).head)
    check_supervised_data(config, model)
    logger.info("pools: %s", model.pools)
    return model


def plan_parity(config: Config) -> ModelPlan:
    """Check the config of `mrl certify`, and return its plan."""
    if config.certify.response_tokens < 2:
        raise ValueError(
            f"certify.response_tokens={config.certify.response_tokens}: lengths are drawn from 1 to this number; use 2 or more."
        )
    check_unused(Path(config.run.dir))
    make_input_files(config)
    return plan_model(config, config.model.path)


def plan_engine_check(config: Config) -> tuple[ModelPlan, EngineLayout]:
    """Check the config of `mrl certify engine`, and return the plan of the model and the layout of the engine."""
    if config.rollout.engine_urls:
        raise ValueError(
            f"rollout.engine_urls={config.rollout.engine_urls}: mrl certify engine starts its own engine, which records what it "
            "computes; leave the key out."
        )
    check_server_args(config.sglang)
    if is_fp8(config):
        raise ValueError(
            f"sglang.quantization={config.sglang['quantization']}: mrl certify engine compares only engines with weights in "
            "model.dtype; leave the key out."
        )
    if config.lora.path:
        raise ValueError(
            f"lora.path={config.lora.path}: mrl certify engine starts an engine with the weights in model.path, without "
            "adapters; leave the key out."
        )
    plan = plan_parity(config)
    if plan.arch.vision is not None or plan.arch.has_recurrent_layers:
        raise ValueError(
            f"model.path={config.model.path}: mrl certify engine compares only language models with attention in every layer; "
            "for other models, look at mismatch/logprob_abs_max of a run."
        )
    if plan.arch.has_sparse_attention:
        raise ValueError(
            f"model.path={config.model.path}: mrl certify engine does not know where SGLang computes sparse attention; look at "
            "mismatch/logprob_abs_max of a run."
        )
    longest = config.certify.prompt_tokens + config.certify.response_tokens
    if longest >= plan.context:
        raise ValueError(
            f"certify.prompt_tokens + certify.response_tokens = {longest}: the model's context has {plan.context} tokens; use "
            "smaller values."
        )
    check_engine_dtype(config, plan.hf, config.certify.dtype, config.rollout.deterministic, key="certify.dtype")
    return plan, engine_layout(config, plan)


def plan_replay(config: Config, model_path: str, dims: ParallelDims, reference_dims: ParallelDims) -> ModelPlan:
    """Check the config of `mrl replay`, and return its plan. Both layouts must be able to shard the model in `model_path`.

    `dims`: layout under which the step is replayed. `reference_dims`: layout whose results the replay is compared with.
    If `model_path` is a folder that a run with LoRA has exported, the plan has the base model and the exported adapters.
    """
    adapters = Path(model_path) / ADAPTER_FOLDER
    is_base = Path(model_path).resolve() == Path(config.model.path).resolve()
    if config.lora.rank and adapters.is_dir() and not is_base:
        config = replace(config, lora=replace(config.lora, path=str(adapters)))
        model_path = base_model(adapters)
    model = plan_model(config, model_path)
    for layout in (dims, reference_dims):
        check_layout(config, model.arch, layout)
    return replace(model, dims=dims)


@dataclass(frozen=True)
class SyncPlan:
    """Plan of the weight sync of a run."""

    model: ModelPlan
    adapters: AdapterPush | None  # what weight_sync.lora=adapter sends; None: the weight sync sends all weights
    transfers: TransferPlan  # transfer plan of all weights, also if the weight sync sends only adapters
    # Relay steps of each trainer rank, if engines share GPUs with trainers: trainer ranks pass bytes on to each other, and each
    # rank serves the engine rank on its GPU. None: senders send directly to engine ranks, or write to a folder
    steps: list[list[RelayStep]] | None
    hosts: list[str]  # node of each trainer rank; empty without GPUs
    engine_hosts: list[str] | None = None  # node of each engine rank, if trainer ranks send to them through NCCL


def plan_sync(config: Config) -> SyncPlan:
    """Compile the transfer plan of the run's weight sync. Assumes pipeline stages with equal numbers of layers."""
    models = _plan_run_models(config)
    model = models["actor"]
    check_adapter_sync(config, model)
    adapters = plan_adapter_push(config, model) if syncs_adapters(config) else None
    layout, dims = engine_layout(config, model), model.dims
    if UNEVEN_STAGE_FIELDS & config.megatron.keys():
        raise ValueError(
            "mrl plan sync assumes pipeline stages of equal size; leave out the megatron fields that change the sizes of stages."
        )
    # rows: table of the Hugging Face and Megatron tensors; sizes: Architecture.sizes
    shards = trainer_shards(layout.rows, layout.sizes, dims, even_pipeline_stages(model.arch.num_layers, dims))
    chosen = config.sglang.get("dtype")
    engine_dtype = chosen if chosen in ITEM_BYTES else str(config.model.dtype)

    def dtype_of(param: str) -> tuple[str, int]:
        dtype = layout.dtype_of(param, engine_dtype)
        return dtype, ITEM_BYTES[dtype]

    transfer_plan = compile_transfer_plan(
        shards, layout, config.rollout.num_engines, dtype_of, config.weight_sync.bucket_bytes
    )
    if (devices := planned_gpus(config, _pools_of(config, models))) is None:
        return SyncPlan(model, adapters, transfer_plan, None, [])
    transport, senders, receivers = gpu_transport(config, devices)
    hosts = [location.host for location in senders]
    if transport is not Transport.cuda_ipc:
        grouped = transport is Transport.process_group
        engine_hosts = [location.host for location in receivers] if grouped else None
        return SyncPlan(model, adapters, transfer_plan, None, hosts, engine_hosts)
    return SyncPlan(
        model, adapters, transfer_plan, relay_steps(transfer_plan, relay_ranks(senders, receivers), hosts), hosts
    )


def plan_placement(config: Config, weights: bool = True) -> Pools:
    """Return the resource pools of an RL run. If `weights` is False, only config.json is read from each model's folder."""
    return _pools_of(config, _plan_run_models(config, weights))


def _plan_run_models(config: Config, weights: bool = True) -> dict[str, ModelPlan]:
    required_inputs = algorithm_of(config).required_inputs
    make_input_files(config)
    return plan_models(
        drop_lora_path_if_continuing(config, continues_from_checkpoint(config)), required_inputs, weights=weights
    )


def _pools_of(config: Config, models: Mapping[str, ModelPlan]) -> Pools:
    return build_pools(config, {role: model.dims for role, model in models.items()})
