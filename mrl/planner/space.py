"""Every layout that a model and a number of GPUs allow, by the rules' closed forms; and how many each rule excludes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from models.spec import Architecture
from mrl.planner.machine import Machine
from mrl.planner.sizes import ModelSizes
from mrl.planner.times import Layout

LEAST_TOKENS = 1024  # of the longest sequence on a context-parallel rank; shorter parts are not worth their messages
FIXABLE = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "engine_tp", "num_engines", "mode", "placement")


@dataclass
class Space:
    """Layouts of one model on one machine."""

    arch: Architecture
    sizes: ModelSizes
    machine: Machine
    longest: float  # tokens of the longest sequence
    fixed: Mapping[str, Any] = field(default_factory=dict)  # of FIXABLE: the only value that is looked at
    excluded: Counter[str] = field(default_factory=Counter)  # by reason: layouts of one replica

    def layouts(self) -> Iterator[Layout]:
        """All of them, without recomputation, in one order; counts what it leaves out."""
        for tp in self._tensor():
            for pp, vpp, last in self._pipeline():
                for cp in self._context():
                    for ep, etp in self._experts(tp):
                        layout = Layout(tp, pp, vpp, cp, ep, etp, last)
                        if layout.lane * layout.expert_step > self.machine.gpus:
                            self.excluded["needs more GPUs than there are"] += 1
                        else:
                            yield layout

    def engine_tps(self) -> list[int]:
        """GPUs that one engine can have (mrl/weight_sync/layout.py), in whole nodes or dividing one."""
        t, per_node = self.arch.transformer, self.machine.per_node
        heads = t["num_attention_heads"]
        groups = heads if self.arch.is_latent else t["num_query_groups"]
        return [
            tp
            for tp in self._kept("engine_tp", _divisors(heads))
            if tp <= self.machine.gpus
            and (groups % tp == 0 or tp % groups == 0)
            and all(width % tp == 0 for width in self._widths())
            and (per_node % tp == 0 or tp % per_node == 0)
        ]

    def _widths(self) -> list[int]:
        """Of MLPs, which engines cut over all of their GPUs."""
        t = self.arch.transformer
        dense = [] if all(self.sizes.moe) else [t["ffn_hidden_size"]]
        moe = [t["moe_ffn_hidden_size"]] if self.arch.num_experts else []
        return dense + moe + self._shared()

    def _shared(self) -> list[int]:
        return [w] if (w := self.arch.transformer.get("moe_shared_expert_intermediate_size")) else []

    def _tensor(self) -> Iterator[int]:
        t = self.arch.transformer
        dense = [] if all(self.sizes.moe) else [t["ffn_hidden_size"]]
        common = gcd(t["num_attention_heads"], t["num_query_groups"], *dense, *self._shared())
        for tp in self._kept("tp", _divisors(common)):
            if tp > self.machine.per_node or self.machine.per_node % tp:
                self.excluded["tensor parallelism beyond a node"] += 1
            else:
                yield tp

    def _pipeline(self) -> Iterator[tuple[int, int, int]]:
        """(pp, vpp, layers of the last stage, where it has others than the rest)."""
        layers = self.sizes.layers
        for pp in self._kept("pp", range(1, min(layers, self.machine.gpus) + 1)):
            each = -(-layers // pp)
            last = layers - each * (pp - 1)
            if last < 1:
                self.excluded["layers do not divide into so many stages"] += 1
            elif last != each:
                if self.fixed.get("vpp", 1) == 1:
                    yield pp, 1, last
            else:
                for vpp in self._kept("vpp", _divisors(each) if pp > 1 else [1]):
                    yield pp, vpp, 0

    def _context(self) -> Iterator[int]:
        most = max(1.0, self.longest / LEAST_TOKENS)
        for cp in self._kept("cp", [2**n for n in range(self.machine.gpus.bit_length())]):
            if cp <= most or "cp" in self.fixed:
                yield cp
            else:
                self.excluded["sequences too short to cut"] += 1

    def _experts(self, tp: int) -> Iterator[tuple[int, int]]:
        """(ep, etp): experts are cut as all else is, or not at all."""
        if not self.arch.num_experts:
            yield 1, tp
            return
        for etp in self._kept("etp", sorted({1, tp})):
            if self.arch.transformer["moe_ffn_hidden_size"] % etp == 0:
                for ep in self._kept("ep", _divisors(self.arch.num_experts)):
                    yield ep, etp
            else:
                self.excluded["experts' width does not divide"] += 1

    def _kept(self, name: str, sizes: Iterable[int]) -> list[int]:
        """Those sizes that the user has left open."""
        return [size for size in sizes if self.fixed.get(name, size) == size]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
