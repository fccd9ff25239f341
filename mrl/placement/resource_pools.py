"""Resource pools: which roles of a run are on which devices, computed from the config without Ray.

A slot is a device: a GPU if the cluster has any, else one process on a CPU. A pool has as many slots as the largest of its roles
needs. The roles of a pool time-share its slots.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from mrl.config.schema import ClusterConfig, RolloutConfig
from parallel.dims import ParallelDims

KEY = "placement.pools"
ROLES = {
    "actor": "trains the policy; the reference is in its processes",
    "critic": "trains the value function",
    "teacher": "computes the log-probabilities that distillation needs",
    "engines": "sample responses",
}
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
FIELDS = ("roles", "gpus", "strategy")


@dataclass(frozen=True)
class SlotDemand:
    """Slots that one role needs in its pool."""

    slots: int  # one for each of its processes, or for each rank of an engine
    group_size: int = 1  # consecutive slots that should be on one node: a tensor-parallel group, or an engine's ranks


@dataclass(frozen=True)
class Pool:
    """Slots, and the roles that time-share them."""

    name: str
    needs: Mapping[str, SlotDemand]  # role -> slots that it needs; only roles of this run
    size: int  # slots
    strategy: str = "PACK"  # Ray's strategy of distributing the slots over nodes

    def __str__(self) -> str:
        return f"{self.name} ({self.size} slot{'s' if self.size > 1 else ''}: {', '.join(self.needs)})"


@dataclass(frozen=True)
class Pools:
    """All pools of a run. Every role of the run is in exactly one."""

    pools: tuple[Pool, ...]

    @property
    def size(self) -> int:
        """Total number of slots."""
        return sum(pool.size for pool in self.pools)

    @property
    def colocated_size(self) -> int:
        """Number of slots if all roles shared one pool."""
        return max(pool.size for pool in self.pools)

    @property
    def strictest_first(self) -> list[Pool]:
        """Order in which pools are placed on nodes."""
        return sorted(self.pools, key=lambda pool: -STRATEGIES.index(pool.strategy))

    @property
    def colocated_roles(self) -> frozenset[frozenset[str]]:
        """The roles of each pool that has more than one."""
        return frozenset(frozenset(pool.needs) for pool in self.pools if len(pool.needs) > 1)

    @property
    def by_role(self) -> dict[str, Pool]:
        """The pool of each role."""
        return {role: pool for pool in self.pools for role in pool.needs}

    def __str__(self) -> str:
        return " | ".join(map(str, self.pools))


def slot_demands(rollout: RolloutConfig, dims: Mapping[str, ParallelDims]) -> dict[str, SlotDemand]:
    """Return the slots that each role needs. `dims`: layouts of the models by role. External engines need no slots."""
    demands = {role: SlotDemand(layout.world_size, layout.tp) for role, layout in dims.items()}
    if not (rollout.replay or rollout.engine_urls):
        demands["engines"] = SlotDemand(rollout.num_engines * rollout.engine_tp, rollout.engine_tp)
    return demands


def make_pools(section: Mapping[str, Any], demands: Mapping[str, SlotDemand]) -> Pools:
    """Build the pools of the config's section `placement.pools`. If the section is empty, each role gets a separate pool.

    `demands`: slots of the run's roles. Raises ValueError for an unknown role or key, for a role of the run that is in no pool or
    in two pools, and for a pool that is too small.
    """
    specs = {name: _checked_spec(name, spec) for name, spec in (section or {role: [role] for role in ROLES}).items()}
    pool_names: dict[str, str] = {}
    for name, spec in specs.items():
        for role in spec["roles"]:
            if role in pool_names:
                raise ValueError(
                    f"{KEY}: {role} is in {pool_names[role]} and in {name}; a role is in one pool: remove it from the other."
                )
            pool_names[role] = name
    if missing := [role for role in demands if role not in pool_names]:
        raise ValueError(
            f"{KEY}: this run has {' and '.join(missing)}, which no pool contains (pools: {_listed(specs)}); add "
            f"{'it' if len(missing) == 1 else 'each'} to one, as in {KEY}.{missing[0]}=[{missing[0]}]."
        )
    pools = [_pool(name, spec, {r: demands[r] for r in spec["roles"] if r in demands}) for name, spec in specs.items()]
    return Pools(tuple(pool for pool in pools if pool.needs))


def _checked_spec(name: str, spec: Any) -> dict[str, Any]:
    """Return the fields of a pool in the config (roles, gpus, strategy) with defaults. Raises ValueError for a wrong field."""
    key = f"{KEY}.{name}"
    fields = dict(spec) if isinstance(spec, Mapping) else dict(roles=spec)
    for field in fields:
        if field not in FIELDS:
            raise ValueError(f"{key}.{field}: a pool has {_listed(FIELDS)}{_hint(field, FIELDS)}")
    roles = fields.get("roles")
    if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise ValueError(f"{key}={roles!r}: expected a list of roles ({_listed(ROLES)}), as in {key}=[actor].")
    for role in roles:
        if role not in ROLES:
            note = " (the reference is in the actor's processes)" if role == "reference" else ""
            raise ValueError(f"{key}: {role!r} is not a role{note}; expected {_listed(ROLES)}{_hint(role, ROLES)}")
    if (strategy := fields.setdefault("strategy", "PACK")) not in STRATEGIES:
        hint = _hint(str(strategy).upper(), STRATEGIES)
        raise ValueError(f"{key}.strategy={strategy!r}: expected {_listed(STRATEGIES)}{hint}")
    gpus = fields.setdefault("gpus", None)
    if gpus is not None and (not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1):
        raise ValueError(
            f"{key}.gpus={gpus!r}: expected a number of GPUs, 1 or more, or null for as many as its roles need."
        )
    return fields


def _pool(name: str, spec: Mapping[str, Any], demands: Mapping[str, SlotDemand]) -> Pool:
    size, gpus = max((demand.slots for demand in demands.values()), default=0), spec["gpus"]
    if gpus is not None and gpus < size:
        largest = max(demands, key=lambda role: demands[role].slots)
        raise ValueError(
            f"{KEY}.{name}.gpus={gpus}: {largest} needs {size}; leave gpus out, set it to {size}, or make {largest} smaller "
            f"({_SIZE_KEYS[largest]})."
        )
    return Pool(name, demands, gpus or size, spec["strategy"])


_SIZE_KEYS = {
    "actor": "parallel.*",
    "critic": "critic.parallel.*",
    "teacher": "teacher.parallel.*",
    "engines": "rollout.num_engines x rollout.engine_tp",
}


def check_capacity(pools: Pools, nodes: Sequence[int], unit: str) -> None:
    """Raise ValueError if the pools do not fit on empty nodes with these numbers of slots. `unit` names a slot in messages."""
    total, largest = sum(nodes), max(nodes, default=0)
    cluster = f"the cluster has {total} {unit}s on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    if pools.size > total:
        raise ValueError(
            f"the pools need {pools.size} {unit}s, and {cluster}: {pools}. Let roles share devices (placement=colocated), make "
            "them smaller (parallel.*, rollout.num_engines), or use more nodes (cluster.nodes, cluster.address)."
        )
    for pool in pools.pools:
        key = f"{KEY}.{pool.name}.strategy={pool.strategy}"
        if pool.strategy == "STRICT_PACK" and pool.size > largest:
            raise ValueError(f"{key}: its {pool.size} {unit}s do not fit on one node, and {cluster}; use PACK.")
        if pool.strategy == "STRICT_SPREAD" and pool.size > len(nodes):
            raise ValueError(f"{key}: it needs {pool.size} nodes, and {cluster}; use SPREAD.")


def slots_per_node(cluster: ClusterConfig, pools: Pools) -> int:
    """Return the slots of a planned node: its GPUs; all slots of the run if it has none."""
    return cluster.gpus_per_node or pools.size


def with_node_count(cluster: ClusterConfig, pools: Pools) -> ClusterConfig:
    """Return the config with `nodes` set. If the config has none, it is the number of nodes that the pools need."""
    if cluster.nodes:
        return cluster
    missing = pools.size - sum(gpus_of_nodes(cluster)[1:])  # slots that are not on the job's other components
    return replace(cluster, nodes=max(1, ceil(missing / cluster.gpus_per_node)) if cluster.gpus_per_node else 1)


def gpus_of_nodes(cluster: ClusterConfig) -> list[int]:
    """Return the number of GPUs of each node in the config. If the config has no number of nodes, there is one."""
    first = dict(nodes=cluster.nodes or 1, gpus_per_node=cluster.gpus_per_node)
    components = [first, *(first | dict(nodes=1) | component for component in cluster.components)]
    return [int(part["gpus_per_node"]) for part in components for _ in range(int(part["nodes"]))]


def order_by_groups(nodes: Sequence[object], group_size: int) -> list[int]:
    """Return an order of slots in which as many groups of `group_size` consecutive slots as possible are on one node.

    `nodes`: the node of each slot. Groups that fit on a node come first, node by node. The remaining slots form groups that cross
    nodes.
    """
    by_node: dict[object, list[int]] = {}
    for slot, node in enumerate(nodes):
        by_node.setdefault(node, []).append(slot)
    fitting = {node: len(slots) - len(slots) % group_size for node, slots in by_node.items()}
    on_one_node = [slot for node, slots in by_node.items() for slot in slots[: fitting[node]]]
    return on_one_node + [slot for node, slots in by_node.items() for slot in slots[fitting[node] :]]


def _listed(names: Any) -> str:
    *most, last = list(names)
    return f"{', '.join(most)} and {last}" if most else last


def _hint(word: str, words: Any) -> str:
    matches = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {matches[0]}?" if matches else "."
