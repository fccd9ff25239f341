"""Settings of Megatron's data parallelism and optimizers: names, types, refusals, and their way into Megatron's objects."""

import re
from dataclasses import fields

import pytest

from mrl.config import hydra_entry
from mrl.controller.model_processes import model_spec
from mrl.controller.plan_models import plan_models
from mrl.data.synthetic_tasks import make_doubling_task
from parallel import trainer_config
from parallel.trainer_config import DDP_RESERVED, OPTIMIZER_RESERVED, annotations_of


def config(*overrides: str):
    base = ["experiment=quickstart", "run.dir=unused"]
    return hydra_entry.compose_config(hydra_entry.check_overrides([*base, *overrides]))


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.ddp.bucket_sze=1", "trainer.ddp.bucket_sze is not a field of Megatron's DistributedDataParallelConfig; did you "
         "mean trainer.ddp.bucket_size?"),
        ("trainer.ddp.decoupled_weight_decay=false", "DistributedDataParallelConfig; use optim.megatron.decoupled_weight_decay"),
        ("trainer.ddp.bucket_size=many", "trainer.ddp.bucket_size='many': expected int or null."),
        ("trainer.ddp.bucket_size=true", "trainer.ddp.bucket_size=True: expected int or null."),
        ("trainer.ddp.bucket_size=0", "trainer.ddp.bucket_size=0: expected a number greater than 0."),
        ("trainer.ddp.grad_reduce_in_fp32=1", "trainer.ddp.grad_reduce_in_fp32=1: expected bool."),
        ("trainer.ddp.overlap_grad_reduce=true", "cannot be set: use trainer.overlap_grad_reduce."),
        ("trainer.ddp.use_megatron_fsdp=true", "cannot be set: it belongs to Megatron's FSDP"),
        ("trainer.ddp.fsdp_double_buffer=true", "cannot be set: it belongs to Megatron's FSDP"),
        ("trainer.ddp.reduce_scatter_with_fp32_accumulation=true", "gradients are reduced in float32 already"),
        ("critic.ddp.average_in_collective=true", "critic.ddp.average_in_collective=True cannot be set: gradients are summed"),
        ("optim.megatron.lr=1", "optim.megatron.lr=1 cannot be set: use optim.lr."),
        ("critic.optim.megatron.adam_eps=1e-6", "cannot be set: use critic.optim.eps."),
        ("sft.optim.megatron.weight_decay=1", "cannot be set: use sft.optim.weight_decay."),
        ("optim.megatron.muon_momentum=0.9", "optim.megatron.muon_momentum=0.9 cannot be set: mrl trains with AdamW"),
        ("optim.megatron.use_precision_aware_optimizer=true", "expect float32 state"),
        ("optim.megatron.decoupled_weight_deca=true", "did you mean optim.megatron.decoupled_weight_decay?"),
        ("optim.megatron.bucket_size=1", "Megatron's OptimizerConfig; use trainer.ddp.bucket_size"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused_when_the_config_is_read(override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(override)


@pytest.mark.extended
def test_a_bucket_size_without_overlap_is_refused():
    with pytest.raises(ValueError, match=r"there is only one bucket without overlap"):
        config("trainer.overlap_grad_reduce=false", "trainer.ddp.bucket_size=1000")
    config("trainer.overlap_grad_reduce=true", "trainer.ddp.bucket_size=1000")


@pytest.mark.parametrize("key", ["recompute_granularty", "bucket_size", "decoupled_weight_decay"])
def test_the_section_megatron_names_the_key_of_a_field_of_another_class(key):
    from models.megatron_overrides import check_megatron_overrides

    expected = dict(
        recompute_granularty="did you mean megatron.recompute_granularity?",
        bucket_size="use trainer.ddp.bucket_size",
        decoupled_weight_decay="use optim.megatron.decoupled_weight_decay",
    )
    with pytest.raises(ValueError, match=re.escape(expected[key])):
        check_megatron_overrides({key: 1})


def test_the_fields_are_those_of_the_installed_classes_and_each_is_open_or_refused_for_a_reason():
    from parallel import device

    device.patch_megatron_for_cpu()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    ddp = {field.name for field in fields(DistributedDataParallelConfig)}
    optimizer = {field.name for field in fields(OptimizerConfig)}
    assert annotations_of(*trainer_config._DDP).keys() == ddp and DDP_RESERVED.keys() <= ddp
    assert annotations_of(*trainer_config._OPTIMIZER).keys() == optimizer and OPTIMIZER_RESERVED.keys() <= optimizer

    def opened(names: set[str], reserved: dict[str, str]) -> set[str]:
        prefixes = tuple(trainer_config._RESERVED_PREFIXES)
        return {name for name in names - reserved.keys() if not name.startswith(prefixes)}

    assert opened(ddp, DDP_RESERVED) == {
        "grad_reduce_in_fp32", "bucket_size", "pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation"
    }  # fmt: skip
    assert opened(optimizer, OPTIMIZER_RESERVED) == {
        "decoupled_weight_decay", "apply_wd_to_qk_layernorm", "config_logger_dir"
    }  # fmt: skip


@pytest.mark.extended
def test_the_critic_has_the_settings_of_the_actor_except_for_its_own(tmp_path):
    make_doubling_task(tmp_path / "made")
    composed = config(
        f"model.path={tmp_path}/made/model",
        f"data.inputs.folder={tmp_path}/made",
        "algorithm=ppo",
        "trainer.ddp={grad_reduce_in_fp32: false, pad_buckets_for_high_nccl_busbw: true}",
        "critic.ddp.grad_reduce_in_fp32=true",
        "critic.optim.megatron.decoupled_weight_decay=false",
    )
    specs = {role: model_spec(plan) for role, plan in plan_models(composed, frozenset({"values"})).items()}
    assert dict(specs["actor"].ddp) == dict(grad_reduce_in_fp32=False, pad_buckets_for_high_nccl_busbw=True)
    assert dict(specs["critic"].ddp) == dict(grad_reduce_in_fp32=True, pad_buckets_for_high_nccl_busbw=True)
    assert specs["actor"].optimizer and not specs["actor"].optimizer.megatron
    assert specs["critic"].optimizer and specs["critic"].optimizer.megatron == dict(decoupled_weight_decay=False)
