"""Measures the CPU time of a training step against a bare Megatron step on the same model and tokens, in one process.

    python benchmarks/training_step.py [--sizes model|small|toy] [--repeats 7] [--profile] [--json FILE]

"mrl" is `MegatronActor.update` on one mini-batch: it packs the rows, runs the forward pass, computes log-probabilities and
entropies of the responses and the PPO loss, runs the backward pass, and takes the optimizer step. "Bare" is a step that a user of
Megatron-Core would write with the same GPTModel and modules and with Megatron's DDP, distributed optimizer and schedule. It has
the same micro-batches, which are packed before the measurement. Its loss is the sum of Megatron's `vocab_parallel_cross_entropy`
times a mask. The mask is `weight * advantage`, so the loss has the gradient of PPO in the first step.

    bare                  computes the logits of all tokens, as GPTModel does for `labels`
    bare, responses only  computes only the logits of response positions, through GPTModel's `output_processor`
    mrl, whole rows       share_prompts=False: the packs are the same as for bare
    mrl                   the default, share_prompts=True: the prompt of a group is computed once
"""

import argparse
import cProfile
import pstats
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import one_process
import torch
from one_process import Sizes, interleaved, ratio
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import measurements
from mrl.core.types import ReplicaBatch, TokenBlock

SIZES = {
    "model": Sizes(256, 8, 8192, groups=2, responses=8, prompt=(64, 256), response=(128, 512)),
    "small": Sizes(128, 4, 2048, groups=2, responses=8, prompt=(64, 256), response=(32, 128)),
    "toy": Sizes(128, 4, 30, groups=64, responses=8, prompt=(4, 8), response=(4, 8)),
}
LR = 1e-9  # so small that float32 rounds Adam's changes of the weights away, and all methods train the same weights


@dataclass(frozen=True)
class PreparedMicroBatch:
    """A micro-batch with L tokens for the bare step. R of its positions are followed by a sampled token."""

    tokens: Tensor  # [1, L]
    labels: Tensor  # [1, L] the token after each position; arbitrary if the mask is 0
    mask: Tensor  # [1, L] factor of the cross-entropy at each position
    packed: object  # PackedSeqParams
    predictor_index: Tensor  # [R] positions whose mask is not 0


class BareMegatron:
    """A training step that uses Megatron-Core alone, as Megatron's pre-training script does."""

    def __init__(self, folder: Path, responses_only: bool) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from models.conversion.hf_reader import HFWeights
        from models.conversion.weight_bridge import WeightBridge
        from models.hf_config import HFConfig
        from models.model_builder import build_model

        hf = HFConfig.load(folder)
        (model,) = build_model(hf, one_process.ALONE, torch.float32)
        WeightBridge(hf, [model], one_process.ALONE, "vocabulary").load(HFWeights(folder))
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = DistributedDataParallel(model.config, settings, model)
        adam = OptimizerConfig(
            optimizer="adam", lr=LR, weight_decay=0.0, adam_beta2=0.95, clip_grad=1.0, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        model.config.grad_scale_func = self.optimizer.scale_loss
        model.config.finalize_model_grads_func = finalize_model_grads
        self.responses_only = responses_only
        self.model.train()

    def step(self, micros: list[PreparedMicroBatch]) -> tuple[float, float]:
        """Run one optimizer step. Returns its loss and gradient norm."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(micros),
            model=self.model,
            num_microbatches=len(micros),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        return sum(loss["loss"].item() for loss in losses), norm

    def _forward(self, iterator, model):
        micro = next(iterator)
        arguments = dict(labels=micro.labels)
        if self.responses_only:
            arguments = dict(output_processor=_responses_only, output_processor_context=micro)
        # mrl's rotary embedding reads packed_seq_params.position_ids, which GPTModel passes on to it.
        losses = model(micro.tokens, micro.packed.position_ids[None], None, packed_seq_params=micro.packed, **arguments)
        mask = micro.mask[0, micro.predictor_index] if self.responses_only else micro.mask

        def loss_func(losses: Tensor):
            loss = (losses * mask).sum()
            return loss, torch.zeros((), dtype=torch.int), {"loss": loss.detach()}  # the mask contains the denominator

        return losses, loss_func


def _responses_only(
    *, hidden_states: Tensor, output_layer, output_weight, context: PreparedMicroBatch, **unused
) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits, _ = output_layer(hidden_states.index_select(0, context.predictor_index), weight=output_weight)
    return vocab_parallel_cross_entropy(logits[:, 0].float(), context.labels[0, context.predictor_index])


def prepare(actor, block: TokenBlock, replica_batch: ReplicaBatch, with_advantages: bool) -> list[PreparedMicroBatch]:
    """Return micro-batches for the bare step, with the same rows in the same packs."""
    found = []
    for micro in actor.micro_batches(block, replica_batch):
        labels, mask = micro.tokens.roll(-1), torch.zeros(len(micro.tokens))
        assert torch.equal(labels[micro.predictor_index], micro.targets), "the rows of a pack are not whole"
        mask[micro.predictor_index] = (
            micro.weights * (micro.columns["advantages"] if with_advantages else 1.0)
        ).float()
        found.append(
            PreparedMicroBatch(micro.tokens[None], labels[None], mask[None], micro.packed, micro.predictor_index)
        )
    return found


def check_agreement(
    update: Callable, bares: dict[str, BareMegatron], actor, block: TokenBlock, replica_batches: dict[str, ReplicaBatch]
) -> None:
    """Raise AssertionError if the methods differ in the cross-entropy, in its gradient norm, or in PPO's gradient norm."""
    from mrl.algorithms.losses import CrossEntropy, PPOClip

    for loss, with_advantages in ((CrossEntropy(), False), (PPOClip(), True)):
        found = {}
        for name, replica_batch in replica_batches.items():
            report = update(replica_batch, loss)
            found[name] = (report.sums["loss"], report.maxima["optim/grad_norm"])
        micros = prepare(actor, block, replica_batches["mrl, whole rows"], with_advantages)
        found |= {name: bare.step(micros) for name, bare in bares.items()}
        (expected_loss, expected_norm), *others = found.values()
        for what in others:
            assert abs(what[1] / expected_norm - 1) < 1e-4, f"gradient norms differ: {found}"
            # At a ratio of 1, PPO's loss is -A and the bare loss is A * cross-entropy, so only their gradients agree.
            assert with_advantages or abs(what[0] - expected_loss) < 1e-4, f"losses differ: {found}"
        Console().print(f"{type(loss).__name__}: {found}")


def measure(sizes: Sizes, repeats: int, profile: bool) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return two dictionaries by method: CPU-seconds of each run, and the number of computed tokens."""
    one_process.start()
    from mrl.algorithms.losses import PPOClip
    from mrl.workers.actor_critic import MegatronActor

    folder = one_process.write_model(sizes)
    actor = MegatronActor(one_process.spec_of(folder))
    bares = {"bare": BareMegatron(folder, False), "bare, responses only": BareMegatron(folder, True)}
    block, batch = one_process.make_batch(sizes)
    plans = {
        "mrl, whole rows": one_process.partition(batch, sizes.max_tokens, share_prompts=False),
        "mrl": one_process.partition(batch, sizes.max_tokens, share_prompts=True),
    }
    replica_batches = {name: plan.replica_batches[0] for name, plan in plans.items()}

    def update(replica_batch: ReplicaBatch, loss):
        return actor.update(block, [replica_batch], loss, [LR])[0]

    check_agreement(update, bares, actor, block, replica_batches)
    micros = prepare(actor, block, replica_batches["mrl, whole rows"], with_advantages=True)
    methods: dict[str, Callable] = {name: lambda bare=bare: bare.step(micros) for name, bare in bares.items()}
    methods |= {
        name: lambda replica_batch=replica_batch: update(replica_batch, PPOClip())
        for name, replica_batch in replica_batches.items()
    }
    if profile:
        for name in ("bare", "mrl, whole rows"):
            print_profile(name, methods[name])
    tokens = {name: plan.metrics["batch/computed_tokens"] for name, plan in plans.items()}
    counts = {name: len(replica_batch.micro_batches) for name, replica_batch in replica_batches.items()}
    Console().print(f"micro-batches {counts}, response tokens {batch.response_lengths.sum()}")
    return interleaved(methods, repeats), dict.fromkeys(bares, tokens["mrl, whole rows"]) | tokens


def print_profile(name: str, method: Callable) -> None:
    """Print the time that one step spends in each Python function and in each operator of torch."""
    method()
    python = cProfile.Profile()
    python.runcall(method)
    Console().rule(name)
    pstats.Stats(python).sort_stats("tottime").print_stats(25)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operators:
        method()
    print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=48))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=SIZES, default="model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="first print the time in each function and operator")
    measurements.add_json_option(parser)
    args = parser.parse_args()
    seconds, tokens = measure(SIZES[args.sizes], args.repeats, args.profile)
    table = Table("step", "tokens", "CPU-s", "of bare", "of bare, responses only", title=f"{SIZES[args.sizes]}")
    for name, taken in seconds.items():
        against = [ratio(taken, seconds[base]) for base in ("bare", "bare, responses only")]
        table.add_row(name, f"{tokens[name]:.0f}", f"{sorted(taken)[len(taken) // 2]:.3f}", *against)
    Console(width=140).print(table)
    measurements.write(args.json, measurements_of(seconds, tokens))


def measurements_of(seconds: dict[str, list[float]], tokens: dict[str, float]) -> list[measurements.Measurement]:
    """Return the computed tokens, the CPU-seconds of the bare step, and the CPU-seconds of mrl divided by those of bare steps."""
    result = [measurements.of_repeats("bare: CPU-s", seconds["bare"], "CPU-s", "cpu_s")]
    for name in ("mrl, whole rows", "mrl"):
        result.append(measurements.Measurement(f"{name}: computed tokens", tokens[name], "tokens", "count"))
        for base in ("bare", "bare, responses only"):
            result.append(measurements.paired_ratio(f"{name}: CPU-s over {base}", seconds[name], seconds[base]))
    return result


if __name__ == "__main__":
    main()
