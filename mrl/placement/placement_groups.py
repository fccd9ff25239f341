"""Pools on a cluster: a Ray placement group each, a slot a bundle, and which process starts in which."""

import ipaddress
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.core.errors import check_wait
from mrl.core.types import DeviceSlot
from mrl.placement.device_map import Layout, found
from mrl.placement.resource_pools import Pool, Pools, arranged, check_room

LOOK_S = 0.05  # between looks at a group that Ray is placing
FOR_ALL = 0.99  # of a slot, for all its roles together; the rest is for a look at which GPU it is
FOR_A_LOOK = 0.001


class PlacementError(Exception):
    """Ray has no room for a pool, or for what was lost of it."""


class Place(NamedTuple):
    """Where a bundle is now."""

    node: str  # Ray's id of it
    host: str  # its address
    device: str  # GPU; "" on a CPU slot


@dataclass(frozen=True)
class PlacedPool:
    """A pool's placement group. Goes along to processes that start others."""

    pool: Pool
    group: PlacementGroup
    gpus: bool  # slots are GPUs
    timeout_s: float  # for Ray to place it, also anew where a node was lost
    _devices: dict[tuple[int, str], str] = field(default_factory=dict)  # by bundle and node, once they were looked at

    def now(self) -> dict[int, Place]:
        """Where each bundle is, when Ray has placed all of them. Raises PlacementError after `timeout_s`."""
        nodes: dict[int, str] = self._wait()["bundles_to_node_id"]
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        devices = self._look(nodes)
        return {bundle: Place(node, hosts[node], devices[bundle]) for bundle, node in nodes.items()}

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


def in_order(places: Mapping[int, Place]) -> list[int]:
    """Bundles, nodes one after another, the fullest first, and in them by GPU. Ray numbers them as it likes."""
    full = Counter(place.node for place in places.values())

    def key(bundle: int) -> tuple[Any, ...]:
        node, host, device = places[bundle]
        return -full[node], ipaddress.ip_address(host), node, len(device), device, bundle

    return sorted(places, key=key)


@dataclass(frozen=True)
class Places:
    """The slots of one role, in the order of its processes."""

    placed: PlacedPool
    bundles: tuple[int, ...]  # by rank; also when a node was lost, as other processes stay where they are
    together: int  # ranks of an engine
    hosted: bool  # the cluster has GPUs or several nodes: an engine runs on the node of its own slots

    @classmethod
    def of(cls, placed: PlacedPool, role: str, hosted: bool) -> Self:
        """Neighbours are on one node as far as that is possible."""
        places, need = placed.now(), placed.pool.needs[role]
        order = in_order(places)
        ranks = arranged([places[bundle].node for bundle in order], need.together)[: need.slots]
        return cls(placed, tuple(order[rank] for rank in ranks), need.together, hosted)

    def slots(self) -> list[DeviceSlot]:
        """By rank, wherever they are now. Raises PlacementError where Ray has no room for them, after a deadline."""
        places = self.placed.now()
        return [DeviceSlot(*places[bundle], self._options(bundle)) for bundle in self.bundles]

    def options(self) -> list[Mapping[str, Any]]:
        """Ray actor options by rank."""
        return [slot.options for slot in self.slots()]

    def engine(self, number: int) -> list[DeviceSlot]:
        """Those of one engine, by its tensor-parallel rank."""
        return self.slots()[number * self.together : (number + 1) * self.together]

    def _options(self, bundle: int) -> dict[str, Any]:
        share = int(1e4 * FOR_ALL / len(self.placed.pool.needs)) / 1e4  # Ray counts in ten thousandths
        taken = dict(num_cpus=0, num_gpus=share) if self.placed.gpus else dict(num_cpus=share)
        return taken | self.placed.at(bundle)


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
        hosted = gpus or len(nodes) > 1
        yield {role: Places.of(one, role, hosted) for one in made for role in one.pool.needs}
    finally:
        for one in made:
            remove_placement_group(one.group)


def layout_of(pools: Pools, places: Mapping[str, Places]) -> Layout:
    """Where everything is, for a picture."""
    now = {one.placed.pool.name: one.placed.now() for one in places.values()}
    names = _names({(place.node, place.host) for those in now.values() for place in those.values()})
    where = {
        pool: [(names[those[bundle].node], those[bundle].device) for bundle in in_order(those)]
        for pool, those in now.items()
    }
    return found(pools, where, "GPU" if any(one.placed.gpus for one in places.values()) else "CPU slot")


def _names(nodes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """(Ray's id, address) of nodes -> by id, the address, with a part of the id where several nodes have it."""
    hosts = Counter(host for _, host in nodes)
    return {node: host if hosts[host] == 1 else f"{host} {node[:6]}" for node, host in nodes}
