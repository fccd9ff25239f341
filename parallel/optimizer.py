"""Megatron's gradient buffers and (distributed) optimizer around a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from parallel.optimizer_settings import AdamW


def wrap(chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """Give each virtual stage Megatron's flat gradient buffers; gradients are summed, never averaged, over replicas."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, average_in_collective=False, overlap_grad_reduce=False
    )
    with _in_common_buckets(chunks):
        wrapped = [
            DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
    for chunk in wrapped:
        chunk.broadcast_params()
    # Losses carry their global denominators already: no scaling by token counts when gradients are reduced.
    chunks[0].config.finalize_model_grads_func = lambda model, num_tokens=None, **kwargs: finalize_model_grads(
        model, None, force_all_reduce=kwargs.get("force_all_reduce", False)
    )
    return wrapped


@contextmanager
def _in_common_buckets(chunks: list[GPTModel]) -> Iterator[None]:
    """Keep a tied embedding's two copies from having a bucket of their own while buffers are laid out.

    Megatron 0.19 saves optimizer state by offsets that leave out a bucket's padding, and reads it by offsets that count it:
    with more than one bucket the state comes back shifted.
    """
    tied = [p for chunk in chunks for p in chunk.parameters() if getattr(p, "shared_embedding", False)]
    for param in tied:
        param.shared_embedding = False
    try:
        yield
    finally:
        for param in tied:
            param.shared_embedding = True


def build_optimizer(chunks: list[DistributedDataParallel], settings: AdamW) -> MegatronOptimizer:
    """The distributed optimizer over the chunks' buffers, fp32 master weights included; hooked into Megatron's schedule."""
    config = chunks[0].config
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=config.params_dtype == torch.bfloat16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def set_lr(optimizer: MegatronOptimizer, lr: float) -> None:
    """Learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
