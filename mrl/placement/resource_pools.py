"""Resource pools: which roles of a run use which devices. This module computes the pools from the config, without Ray.

A role is a model with its processes, or all engines together (see ROLES). The key `roles` may name more models. A slot is
one device: a GPU, or one CPU if the cluster has no GPUs. A pool is a set of slots that one or several roles time-share. By
default, a pool has as many slots as its largest role needs.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from mrl.config.process_schema import ClusterConfig, RoleConfig
from mrl.config.schema import RolloutConfig
from parallel.dims import ParallelDims

POOLS_KEY = "placement.pools"
ROLES = {
    "actor": "trains the policy; without a role `reference`, its processes also hold the weights of the reference",
    "critic": "trains the value function",
    "reference": "computes the log-probabilities of the reference policy",
    "teacher": "computes the log-probabilities that distillation needs",
    "reward_model": "scores responses",
    "engines": "sample responses",
}
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""Ray's strategies for placing the slots of a pool, the strictest last: PACK uses few nodes, SPREAD uses many.

STRICT_PACK requires a single node. STRICT_SPREAD requires a separate node for each slot.
"""
POOL_FIELDS = ("roles", "gpus", "strategy")  # keys of a pool in the config


@dataclass(frozen=True)
class SlotDemand:
    """Number of slots that one role needs in its pool.

    The ranks of a tensor-parallel group communicate in every layer, so their slots should be on one node. The ranks of an engine
    are such a group.
    """

    slots: int  # one slot for each trainer rank or engine rank of the role
    tp_size: int = 1  # number of slots of each tensor-parallel group


@dataclass(frozen=True)
class Pool:
    """A set of slots, and the roles that time-share them."""

    name: str
    demands: Mapping[str, SlotDemand]  # role -> slots that the role needs; only roles of this run
    size: int  # number of slots
    strategy: str = "PACK"  # one of STRATEGIES

    def __str__(self) -> str:
        return f"{self.name} ({pluralize(self.size, 'slot')}: {', '.join(self.demands)})"


@dataclass(frozen=True)
class Pools:
    """All pools of a run. Every role of the run is in exactly one pool."""

    pools: tuple[Pool, ...]

    @property
    def size(self) -> int:
        """Total number of slots."""
        return sum(pool.size for pool in self.pools)

    @property
    def colocated_size(self) -> int:
        """Size of the largest pool. If all roles shared one pool, the run would need at most this number of slots."""
        return max(pool.size for pool in self.pools)

    @property
    def strictest_first(self) -> list[Pool]:
        """The pools in the order of their placement: strict strategies leave fewer choices, so they come first."""
        return sorted(self.pools, key=lambda pool: -STRATEGIES.index(pool.strategy))

    @property
    def colocated_roles(self) -> frozenset[frozenset[str]]:
        """The sets of roles that share a pool."""
        return frozenset(frozenset(pool.demands) for pool in self.pools if len(pool.demands) > 1)

    @property
    def by_role(self) -> dict[str, Pool]:
        """The pool of each role."""
        return {role: pool for pool in self.pools for role in pool.demands}

    def __str__(self) -> str:
        return " | ".join(map(str, self.pools))


def slot_demands(
    rollout: RolloutConfig, dims: Mapping[str, ParallelDims], served: Mapping[str, RoleConfig] | None = None
) -> dict[str, SlotDemand]:
    """Return the number of slots that each role needs. `dims`: role -> layout of its model. `served`: models that SGLang serves.

    Engines need no slots if the run replays recorded rollouts or uses external servers (rollout.engine_urls).
    """
    demands = {role: SlotDemand(layout.world_size, layout.tp) for role, layout in dims.items()}
    if not (rollout.replay or rollout.engine_urls):
        demands["engines"] = SlotDemand(rollout.num_engines * rollout.engine_tp, rollout.engine_tp)
    return demands | {
        name: SlotDemand(role.num_engines * role.engine_tp, role.engine_tp) for name, role in (served or {}).items()
    }


def make_pools(section: Mapping[str, Any], demands: Mapping[str, SlotDemand]) -> Pools:
    """Build the pools from the config's section `placement.pools`. If the section is empty, each role gets a separate pool.

    `demands`: role -> slots that the role needs. Raises ValueError for an unknown role or key, for a role in no pool or in
    several pools, and for a pool that is too small.
    """
    roles = [*ROLES, *(role for role in demands if role not in ROLES)]
    specs = {
        name: _checked_spec(name, spec, roles) for name, spec in (section or {role: [role] for role in roles}).items()
    }
    pool_names: dict[str, str] = {}
    for name, spec in specs.items():
        for role in spec["roles"]:
            if role in pool_names:
                raise ValueError(
                    f"{POOLS_KEY}: {role} is in pool {pool_names[role]} and in pool {name}; list each role only once."
                )
            pool_names[role] = name
    if missing := [role for role in demands if role not in pool_names]:
        raise ValueError(
            f"{POOLS_KEY}: this run has {' and '.join(missing)}, which no pool contains (pools: {_listed(specs)}); add "
            f"{'it' if len(missing) == 1 else 'each of them'} to a pool, as in {POOLS_KEY}.{missing[0]}=[{missing[0]}]."
        )
    pools = [_pool(name, spec, {r: demands[r] for r in spec["roles"] if r in demands}) for name, spec in specs.items()]
    return Pools(tuple(pool for pool in pools if pool.demands))


def _checked_spec(name: str, spec: Any, known_roles: Sequence[str]) -> dict[str, Any]:
    """Return the config of a pool as a mapping with all POOL_FIELDS. `spec` may also be just the list of roles."""
    key = f"{POOLS_KEY}.{name}"
    fields = dict(spec) if isinstance(spec, Mapping) else dict(roles=spec)
    for field in fields:
        if field not in POOL_FIELDS:
            raise ValueError(
                f"{key}.{field}: the fields of a pool are {_listed(POOL_FIELDS)}{_hint(field, POOL_FIELDS)}"
            )
    roles = fields.get("roles")
    if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise ValueError(f"{key}={roles!r}: expected a list of roles ({_listed(known_roles)}), as in {key}=[actor].")
    for role in roles:
        if role not in known_roles:
            raise ValueError(
                f"{key}: {role!r} is not a role; expected {_listed(known_roles)}, or a model in the key `roles` whose column the "
                f"algorithm reads{_hint(role, known_roles)}"
            )
    if (strategy := fields.setdefault("strategy", "PACK")) not in STRATEGIES:
        hint = _hint(str(strategy).upper(), STRATEGIES)
        raise ValueError(f"{key}.strategy={strategy!r}: expected {_listed(STRATEGIES)}{hint}")
    gpus = fields.setdefault("gpus", None)
    if gpus is not None and (not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1):
        raise ValueError(
            f"{key}.gpus={gpus!r}: expected a number of GPUs, 1 or more, or null for the number that the pool's roles need."
        )
    return fields


def _pool(name: str, spec: Mapping[str, Any], demands: Mapping[str, SlotDemand]) -> Pool:
    size, gpus = max((demand.slots for demand in demands.values()), default=0), spec["gpus"]
    if gpus is not None and gpus < size:
        largest = max(demands, key=lambda role: demands[role].slots)
        raise ValueError(
            f"{POOLS_KEY}.{name}.gpus={gpus}: the role {largest} needs {size} GPUs; leave gpus out, set it to {size}, or make "
            f"{largest} smaller ({_SIZE_KEYS.get(largest, f'roles.{largest}.parallel.*')})."
        )
    return Pool(name, demands, gpus or size, spec["strategy"])


_SIZE_KEYS = {
    "actor": "parallel.*",
    "critic": "critic.parallel.*",
    "engines": "rollout.num_engines x rollout.engine_tp",
}
"""Role -> the config keys that determine how many slots the role needs."""


def check_capacity(pools: Pools, nodes: Sequence[int], unit: str) -> None:
    """Raise ValueError if the pools do not fit on the empty cluster.

    `nodes`: number of slots of each node. `unit`: name of a slot in messages.
    """
    total, largest = sum(nodes), max(nodes, default=0)
    cluster = f"the cluster has {pluralize(total, unit)} on {pluralize(len(nodes), 'node')}"
    if pools.size > total:
        raise ValueError(
            f"the pools need {pluralize(pools.size, unit)}, but {cluster}. The pools are {pools}. Let roles share devices "
            "(placement=colocated), make the roles smaller (parallel.*, rollout.num_engines), or use more nodes (cluster.nodes, "
            "cluster.address)."
        )
    for pool in pools.pools:
        key = f"{POOLS_KEY}.{pool.name}.strategy={pool.strategy}"
        if pool.strategy == "STRICT_PACK" and pool.size > largest:
            raise ValueError(f"{key}: the pool's {pool.size} {unit}s do not fit on one node: {cluster}; use PACK.")
        if pool.strategy == "STRICT_SPREAD" and pool.size > len(nodes):
            raise ValueError(f"{key}: the pool needs {pool.size} nodes, but {cluster}; use SPREAD.")


def slots_per_node(cluster: ClusterConfig, pools: Pools) -> int:
    """Return the number of slots of one node: the number of its GPUs, or all slots of the run if nodes have no GPUs."""
    return cluster.gpus_per_node or pools.size


def with_node_count(cluster: ClusterConfig, pools: Pools) -> ClusterConfig:
    """Return `cluster` with `nodes` set. If `nodes` was not set, it becomes the number of nodes that the pools need."""
    if cluster.nodes:
        return cluster
    missing = pools.size - sum(gpus_of_nodes(cluster)[1:])  # slots that cluster.components do not provide
    return replace(cluster, nodes=max(1, ceil(missing / cluster.gpus_per_node)) if cluster.gpus_per_node else 1)


def gpus_of_nodes(cluster: ClusterConfig) -> list[int]:
    """Return the number of GPUs of each node that the config describes. If `cluster.nodes` is not set, one node is assumed.

    `cluster.components` describes further nodes of a heterogeneous Slurm job.
    """
    first = dict(nodes=cluster.nodes or 1, gpus_per_node=cluster.gpus_per_node)
    components = [first, *(first | dict(nodes=1) | component for component in cluster.components)]
    return [int(component["gpus_per_node"]) for component in components for _ in range(int(component["nodes"]))]


def order_by_tp_groups(nodes: Sequence[object], tp_size: int) -> list[int]:
    """Return the indices of slots in an order that keeps tensor-parallel groups on one node if possible.

    In this order, every `tp_size` consecutive slots are a group. `nodes`: the node of each slot. The groups that fit on one
    node come first, node by node. The remaining slots form groups that are on several nodes.
    """
    by_node: dict[object, list[int]] = {}
    for slot, node in enumerate(nodes):
        by_node.setdefault(node, []).append(slot)
    fitting = {node: len(slots) - len(slots) % tp_size for node, slots in by_node.items()}
    on_one_node = [slot for node, slots in by_node.items() for slot in slots[: fitting[node]]]
    return on_one_node + [slot for node, slots in by_node.items() for slot in slots[fitting[node] :]]


def pluralize(count: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is 1."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _listed(names: Any) -> str:
    *most, last = list(names)
    return f"{', '.join(most)} and {last}" if most else last


def _hint(word: str, words: Any) -> str:
    matches = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {matches[0]}?" if matches else "."
