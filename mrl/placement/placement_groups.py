"""Places resource pools on a Ray cluster. Each pool is a Ray placement group, and each slot of the pool is a bundle."""

import ipaddress
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.core.run_errors import check_wait
from mrl.core.types import DeviceSlot
from mrl.placement.device_map import DeviceMap, actual_device_map
from mrl.placement.resource_pools import Pool, Pools, check_capacity, order_by_tp_groups

POLL_INTERVAL_S = 0.05  # PlacedPool waits this long between two reads of the state of its placement group
ROLES_SHARE = 0.99  # fraction of a slot that Ray reserves for the processes of all roles together
PROBE_SHARE = 0.001  # fraction of a slot for the small task that reads the id of the GPU


class PlacementError(Exception):
    """Ray has not placed a pool, or not started a process in it."""


class BundleLocation(NamedTuple):
    """Current location of a bundle. Ray moves the bundles of a lost node to other nodes."""

    node: str  # Ray's id of the node
    host: str  # address of the node
    device: str  # id of the GPU; "" on a CPU slot


@dataclass(frozen=True)
class PlacedPool:
    """A pool and its placement group. Processes that start other processes receive a copy of this object."""

    pool: Pool
    group: PlacementGroup
    has_gpus: bool  # whether the slots are GPUs
    timeout_s: float  # longest time to wait until Ray has placed the group, also after the loss of a node
    _devices: dict[tuple[int, str], str] = field(default_factory=dict)  # (bundle, node) -> id of the GPU

    def locations(self) -> dict[int, BundleLocation]:
        """Wait until Ray has placed all bundles, and return their locations. Raises PlacementError after `timeout_s`."""
        nodes: dict[int, str] = self._wait_until_placed()["bundles_to_node_id"]
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        devices = self._probe_devices(nodes)
        return {bundle: BundleLocation(node, hosts[node], devices[bundle]) for bundle, node in nodes.items()}

    def _wait_until_placed(self) -> dict[str, Any]:
        end = time.monotonic() + self.timeout_s
        while (table := placement_group_table(self.group))["state"] != "CREATED":
            if time.monotonic() > end or table["state"] == "REMOVED":
                raise PlacementError(self._no_room())
            check_wait()  # may raise PreemptedError after a preemption signal
            time.sleep(POLL_INTERVAL_S)
        return table

    def _no_room(self) -> str:
        free = ray.available_resources()
        gpus = f"{free.get('GPU', 0):g} GPUs and " if self.has_gpus else ""
        need = "one GPU and one CPU" if self.has_gpus else "one CPU"
        return (
            f"Ray did not place pool {self.pool} with strategy {self.pool.strategy} within "
            f"cluster.start_timeout_s={self.timeout_s:g} s: {gpus}{free.get('CPU', 0):g} CPUs are free, and each slot needs "
            f"{need}. Stop other processes, or restart lost nodes."
        )

    def _probe_devices(self, nodes: Mapping[int, str]) -> dict[int, str]:
        """Return bundle -> id of its GPU.

        A small Ray task in each bundle finds the id. After a bundle has moved, a new task finds the new id.
        """
        if not self.has_gpus:
            return dict.fromkeys(nodes, "")
        unknown = [location for location in nodes.items() if location not in self._devices]
        probe = ray.remote(_gpu_id)
        ids = [probe.options(num_cpus=0, num_gpus=PROBE_SHARE, **self.bundle_options(b)).remote() for b, _ in unknown]
        try:
            self._devices.update(zip(unknown, ray.get(ids, timeout=self.timeout_s), strict=True))
        except ray.exceptions.RayError as error:
            raise PlacementError(
                f"pool {self.pool}: Ray could not start a task on each of the pool's GPUs: {error}"
            ) from error
        return {bundle: self._devices[bundle, node] for bundle, node in nodes.items()}

    def bundle_options(self, bundle: int) -> dict[str, Any]:
        """Return the Ray options that start a process in a bundle."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return dict(scheduling_strategy=strategy)


def _gpu_id() -> str:
    """Return the id of the GPU that Ray has assigned to this task."""
    (gpu,) = ray.get_gpu_ids()
    return str(gpu)


def sort_bundles(locations: Mapping[int, BundleLocation]) -> list[int]:
    """Return the bundles node by node, and on each node in the order of its GPUs. The node with the most bundles comes first.

    Ray itself assigns the numbers of the bundles to devices in an arbitrary order.
    """
    bundles_on = Counter(location.node for location in locations.values())

    def key(bundle: int) -> tuple[Any, ...]:
        node, host, device = locations[bundle]
        return -bundles_on[node], ipaddress.ip_address(host), node, len(device), device, bundle

    return sorted(locations, key=key)


@dataclass(frozen=True)
class RolePlacement:
    """The slots of one role, in the order of its ranks.

    The bundle of each rank is fixed for the whole run. So if a node is lost, only the ranks of that node move.
    """

    placed: PlacedPool
    bundles: tuple[int, ...]  # bundle of each rank
    tp_size: int  # number of ranks in a tensor-parallel group or an engine; these ranks should be on one node
    # whether engines run on the nodes of their slots; true with GPUs or several nodes. False: engines are child processes of the
    # rollout worker, and use its slot
    pin_engines_to_nodes: bool

    @classmethod
    def of(cls, placed: PlacedPool, role: str, pin_engines_to_nodes: bool) -> Self:
        """Assign a bundle to each rank of a role, so that as many tensor-parallel groups as possible are on one node each."""
        locations, demand = placed.locations(), placed.pool.demands[role]
        order = sort_bundles(locations)
        ranks = order_by_tp_groups([locations[bundle].node for bundle in order], demand.tp_size)[: demand.slots]
        return cls(placed, tuple(order[rank] for rank in ranks), demand.tp_size, pin_engines_to_nodes)

    def slots(self) -> list[DeviceSlot]:
        """Return the current slot of each rank. Raises PlacementError if Ray does not place the pool in time."""
        locations = self.placed.locations()
        return [DeviceSlot(*locations[bundle], self._options(bundle)) for bundle in self.bundles]

    def options(self) -> list[Mapping[str, Any]]:
        """Return Ray actor options for each rank."""
        return [slot.options for slot in self.slots()]

    def engine_slots(self, index: int) -> list[DeviceSlot]:
        """Return the slots of the engine with this index: one slot for each rank of the engine."""
        return self.slots()[index * self.tp_size : (index + 1) * self.tp_size]

    def _options(self, bundle: int) -> dict[str, Any]:
        share = int(1e4 * ROLES_SHARE / len(self.placed.pool.demands)) / 1e4  # Ray's resolution is 1e-4
        resources = dict(num_cpus=0, num_gpus=share) if self.placed.has_gpus else dict(num_cpus=share)
        return resources | self.placed.bundle_options(bundle)


@contextmanager
def place_pools(pools: Pools, timeout_s: float) -> Iterator[dict[str, RolePlacement]]:
    """Place the pools on the connected cluster. Yields the placement of each role, and removes the placement groups on exit.

    Raises ValueError immediately if the pools do not fit on the empty cluster. Raises PlacementError if Ray has not placed the
    pools after `timeout_s`.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_gpus = any(node.get("GPU", 0) for node in nodes)
    slots = [int(min(node.get("CPU", 0), node.get("GPU", 0)) if has_gpus else node.get("CPU", 0)) for node in nodes]
    check_capacity(pools, [count for count in slots if count], "GPU" if has_gpus else "CPU slot")
    bundle = {"GPU": 1, "CPU": 1} if has_gpus else {"CPU": 1}
    placed_pools = []
    try:
        for pool in pools.strictest_first:
            group = placement_group([dict(bundle) for _ in range(pool.size)], pool.strategy)
            placed_pools.append(PlacedPool(pool, group, has_gpus, timeout_s))
        pin_engines = has_gpus or len(nodes) > 1
        yield {
            role: RolePlacement.of(placed, role, pin_engines) for placed in placed_pools for role in placed.pool.demands
        }
    finally:
        for placed in placed_pools:
            # If this fails, Ray removes the placement group when the Ray job or the local cluster ends.
            with suppress(ray.exceptions.RayError, TimeoutError):
                remove_placement_group(placed.group)


def current_device_map(pools: Pools, placements: Mapping[str, RolePlacement]) -> DeviceMap:
    """Return the map that shows on which device each process of the run is now. `placements`: role -> its placement."""
    placed_pools = {placement.placed.pool.name: placement.placed for placement in placements.values()}
    by_pool = {name: placed.locations() for name, placed in placed_pools.items()}
    names = _node_names({(bundle.node, bundle.host) for locations in by_pool.values() for bundle in locations.values()})
    devices = {
        pool: [(names[locations[bundle].node], locations[bundle].device) for bundle in sort_bundles(locations)]
        for pool, locations in by_pool.items()
    }
    has_gpus = any(placed.has_gpus for placed in placed_pools.values())
    return actual_device_map(pools, devices, "GPU" if has_gpus else "CPU slot")


def _node_names(nodes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return Ray id -> name of each node. The name is the address, with a part of the id if several nodes share the address.

    `nodes`: (Ray id, address) of each node.
    """
    hosts = Counter(host for _, host in nodes)
    return {node: host if hosts[host] == 1 else f"{host} {node[:6]}" for node, host in nodes}
