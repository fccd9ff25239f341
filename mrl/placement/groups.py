"""Pools on a cluster: a Ray placement group each, a slot a bundle, and which process starts in which."""

import ipaddress
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.faults import check_wait
from mrl.placement.layout import Layout, found
from mrl.placement.pools import Need, Pool, Pools, arranged, check_room
from mrl.slot import Slot

LOOK_S = 0.05  # between looks at a group that Ray is placing
FOR_ALL = 0.99  # of a slot, for all its roles together; the rest is for a look at which GPU it is
FOR_A_LOOK = 0.001


class PlacementError(Exception):
    """Ray has no room for a pool, or for what was lost of it."""


@dataclass(frozen=True)
class PlacedPool:
    """A pool's placement group. Goes along to processes that start others."""

    pool: Pool
    group: PlacementGroup
    gpus: bool  # slots are GPUs
    timeout_s: float  # for Ray to place it, also anew where a node was lost
    _devices: dict[tuple[int, str], str] = field(default_factory=dict)  # by bundle and node, once they were looked at

    def slots(self) -> list[tuple[int, str, str, str]]:
        """(bundle, node, its address, GPU) of every slot: nodes one after another, the fullest first, in them by GPU.

        Waits until Ray has placed all of them. Raises PlacementError after `timeout_s`.
        """
        nodes: dict[int, str] = self._wait()["bundles_to_node_id"]
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        devices, full = self._look(nodes), Counter(nodes.values())

        def order(bundle: int) -> tuple[Any, ...]:
            node, device = nodes[bundle], devices[bundle]
            return -full[node], ipaddress.ip_address(hosts[node]), node, len(device), device, bundle

        return [(bundle, nodes[bundle], hosts[nodes[bundle]], devices[bundle]) for bundle in sorted(nodes, key=order)]

    def _wait(self) -> dict[str, Any]:
        end = time.monotonic() + self.timeout_s
        while (table := placement_group_table(self.group))["state"] != "CREATED":
            if time.monotonic() > end or table["state"] == "REMOVED":
                raise PlacementError(self._no_room())
            check_wait()
            time.sleep(LOOK_S)
        return table

    def _no_room(self) -> str:
        free = ray.available_resources()
        gpus = f"{free.get('GPU', 0):g} GPUs and " if self.gpus else ""
        return (
            f"Ray found no place for pool {self.pool}, {self.pool.strategy}, in cluster.start_timeout_s={self.timeout_s:g} s: "
            f"free now are {gpus}{free.get('CPU', 0):g} CPUs, and a slot takes {'one of each' if self.gpus else 'one'}. Free "
            "some, or bring nodes back."
        )

    def _look(self, nodes: Mapping[int, str]) -> dict[int, str]:
        """The GPU of each bundle; asked of Ray once, and again where a bundle was moved."""
        if not self.gpus:
            return dict.fromkeys(nodes, "")
        unknown = [place for place in nodes.items() if place not in self._devices]
        look = ray.remote(_device)
        asked = [look.options(num_cpus=0, num_gpus=FOR_A_LOOK, **self.at(bundle)).remote() for bundle, _ in unknown]
        try:
            self._devices.update(zip(unknown, ray.get(asked, timeout=self.timeout_s), strict=True))
        except ray.exceptions.RayError as error:
            raise PlacementError(f"pool {self.pool}: no process started on its GPUs: {error}") from error
        return {bundle: self._devices[bundle, node] for bundle, node in nodes.items()}

    def at(self, bundle: int) -> dict[str, Any]:
        """Ray options that put a process into a bundle."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return dict(scheduling_strategy=strategy)


def _device() -> str:
    """Where Ray runs this: the id of the GPU that it is given."""
    (gpu,) = ray.get_gpu_ids()
    return str(gpu)


@dataclass(frozen=True)
class Places:
    """The slots of one role, in the order of its processes, wherever they are now."""

    placed: PlacedPool
    need: Need
    hosted: bool  # the cluster has GPUs or several nodes: an engine runs on the node of its own slots

    def slots(self) -> list[Slot]:
        """By rank; tensor-parallel neighbours, and the ranks of an engine, are on one node as far as that is possible.

        Raises PlacementError where Ray has no room for them, after a deadline.
        """
        slots = self.placed.slots()
        order = arranged([node for _, node, _, _ in slots], self.need.together)
        return [self._slot(*slots[place]) for place in order[: self.need.slots]]

    def options(self) -> list[Mapping[str, Any]]:
        """Ray actor options by rank."""
        return [slot.options for slot in self.slots()]

    def engine(self, number: int) -> list[Slot]:
        """Those of one engine, by its tensor-parallel rank."""
        return self.slots()[number * self.need.together : (number + 1) * self.need.together]

    def _slot(self, bundle: int, node: str, host: str, device: str) -> Slot:
        share = int(1e4 * FOR_ALL / len(self.placed.pool.needs)) / 1e4  # Ray counts in ten thousandths
        taken = dict(num_cpus=0, num_gpus=share) if self.placed.gpus else dict(num_cpus=share)
        return Slot(node, host, device, taken | self.placed.at(bundle))


@contextmanager
def placed(pools: Pools, timeout_s: float) -> Iterator[dict[str, Places]]:
    """The pools on the cluster that this process is connected with; where each role is. Gone with the context.

    Raises ValueError at once where they can never fit, PlacementError where there was no room for `timeout_s`.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = any(node.get("GPU", 0) for node in nodes)
    room = [int(min(node.get("CPU", 0), node.get("GPU", 0)) if gpus else node.get("CPU", 0)) for node in nodes]
    check_room(pools, [count for count in room if count], "GPU" if gpus else "CPU slot")
    bundle = {"GPU": 1, "CPU": 1} if gpus else {"CPU": 1}
    made = []
    try:
        for pool in pools.strictest_first:
            group = placement_group([dict(bundle) for _ in range(pool.size)], pool.strategy)
            made.append(PlacedPool(pool, group, gpus, timeout_s))
        for one in made:
            one.slots()
        hosted = gpus or len(nodes) > 1
        yield {role: Places(one, need, hosted) for one in made for role, need in one.pool.needs.items()}
    finally:
        for one in made:
            remove_placement_group(one.group)


def layout_of(pools: Pools, places: Mapping[str, Places]) -> Layout:
    """Where everything is, for a picture."""
    placed_pools = {one.placed.pool.name: one.placed for one in places.values()}
    slots = {name: one.slots() for name, one in placed_pools.items()}
    names = _names({(node, host) for those in slots.values() for _, node, host, _ in those})
    where = {name: [(names[node], device) for _, node, _, device in those] for name, those in slots.items()}
    return found(pools, where, "GPU" if any(one.gpus for one in placed_pools.values()) else "CPU slot")


def _names(nodes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """(Ray's id, address) of nodes -> by id, the address, with a part of the id where several nodes have it."""
    hosts = Counter(host for _, host in nodes)
    return {node: host if hosts[host] == 1 else f"{host} {node[:6]}" for node, host in nodes}
