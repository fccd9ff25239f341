"""What would fit where a run does not: the smallest changes to its config, each counted by the same model. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mrl.config.schema import Config
from mrl.planner.run_memory import FRACTION, RunMemory

DEPTH = 4  # changes together at most
BREADTH = 6  # of the sets of changes so far, those that come nearest are changed further
SHOWN = 6  # sets of changes at most
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)

Count = Callable[[Config], RunMemory]
"""Memory of a config; raises ValueError where its layout cannot be."""


@dataclass(frozen=True)
class Change:
    """Overrides of the command line, and what the run needs with them."""

    overrides: tuple[str, ...]
    config: Config
    memory: RunMemory


def advice(config: Config, count: Count) -> list[Change]:
    """The smallest sets of changes with which the run fits, those first that need the fewest GPUs; none within reach: empty."""
    edge = [Change((), config, count(config))]
    seen: set[tuple[str, ...]] = {()}
    for _ in range(DEPTH):
        found = list(_changed(edge, count, seen))
        if fitting := [change for change in found if change.memory.fits]:
            return sorted(fitting, key=lambda change: (change.memory.gpus, change.overrides))[:SHOWN]
        edge = sorted(found, key=lambda change: (len(change.memory.problems), change.memory.excess))[:BREADTH]
    return []


def _changed(edge: list[Change], count: Count, seen: set[tuple[str, ...]]) -> Iterator[Change]:
    """Each of these with one change more."""
    for before in edge:
        for override, config in neighbours(before.config):
            overrides = (*_without(before.overrides, override), *override)
            if (key := tuple(sorted(overrides))) not in seen:
                seen.add(key)
                try:
                    yield Change(overrides, config, count(config))
                except ValueError:
                    continue


def _without(overrides: tuple[str, ...], later: tuple[str, ...]) -> tuple[str, ...]:
    """What a later change to the same key leaves of these."""
    again = {text.split("=")[0] for text in later}
    return tuple(text for text in overrides if text.split("=")[0] not in again)


def neighbours(config: Config) -> Iterator[tuple[tuple[str, ...], Config]]:
    """(overrides, config) of every single change that may save memory."""
    if config.megatron.get("recompute_granularity") != "full":
        overrides = tuple(f"megatron.{name}={value}" for name, value in FULL.items())
        yield overrides, replace(config, megatron=dict(config.megatron) | FULL)
    tokens = config.trainer.max_tokens_per_micro_batch // 2
    yield _set(config, "trainer", max_tokens_per_micro_batch=tokens)
    if config.trainer.logprob_chunk > 256:
        yield _set(config, "trainer", logprob_chunk=config.trainer.logprob_chunk // 2)
    yield from _layouts(config)
    fraction = config.sglang.get("mem_fraction_static") or FRACTION
    for other in (round(fraction - 0.1, 2), round(fraction + 0.1, 2)):
        if 0.2 <= other <= 0.9:
            sglang = dict(config.sglang) | dict(mem_fraction_static=other)
            yield (f"sglang.mem_fraction_static={other}",), replace(config, sglang=sglang)
    wider = config.rollout.engine_tp * 2
    yield _set(config, "rollout", engine_tp=wider, num_engines=max(1, config.rollout.num_engines // 2))
    if config.weight_sync.bucket_bytes > 64 << 20:
        yield _set(config, "weight_sync", bucket_bytes=64 << 20)


def _layouts(config: Config) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Each axis doubled: over the same GPUs where replicas can be given up for it, and over twice as many."""
    p = config.parallel
    for axis in ("tp", "pp", "cp", "ep"):
        more = {axis: vars(p)[axis] * 2}
        if axis == "tp" and p.etp is None and p.ep > 1:
            more["etp"] = 1  # experts stay whole, and are spread
        if p.world_size is not None or axis == "ep":
            yield _set(config, "parallel", **more)
        if p.dp and p.dp % 2 == 0 and axis != "ep":
            yield _set(config, "parallel", **more, dp=p.dp // 2)
        if p.world_size is None and axis != "ep":
            yield _set(config, "parallel", **more)
    if p.world_size is not None:
        yield _set(config, "parallel", world_size=p.world_size * 2)
    else:
        yield _set(config, "parallel", dp=(p.dp or 1) * 2)


def _set(config: Config, section: str, **values: Any) -> tuple[tuple[str, ...], Config]:
    overrides = tuple(f"{section}.{name}={value}" for name, value in values.items())
    return overrides, replace(config, **{section: replace(vars(config)[section], **values)})
