"""Resource pools: which roles of a run are on which devices, from the config alone. Pure: nothing here knows Ray.

A slot is a device: a GPU where the cluster has any, else a place for a process on a CPU. A pool has as many as the largest of
its roles needs: the roles of a pool share its slots by turns.
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
    "actor": "trains the policy; the reference lives in its processes",
    "critic": "trains the value function",
    "teacher": "is distilled from",
    "engines": "sample responses",
}
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
FIELDS = ("roles", "gpus", "strategy")


@dataclass(frozen=True)
class Need:
    """What a role asks of its pool."""

    slots: int  # one for each of its processes, or for each rank of an engine
    together: int = 1  # so many consecutive ones belong on one node: tensor-parallel neighbours, the ranks of an engine


@dataclass(frozen=True)
class Pool:
    """Slots, and the roles that share them by turns."""

    name: str
    needs: Mapping[str, Need]  # by role, of roles that the run has
    size: int  # slots
    strategy: str = "PACK"  # of Ray: how its slots lie on nodes

    def __str__(self) -> str:
        return f"{self.name} ({self.size} slot{'s' if self.size > 1 else ''}: {', '.join(self.needs)})"


@dataclass(frozen=True)
class Pools:
    """All pools of a run; every role of it is in one."""

    pools: tuple[Pool, ...]

    @property
    def size(self) -> int:
        """Slots in all."""
        return sum(pool.size for pool in self.pools)

    @property
    def least(self) -> int:
        """Slots, if all roles shared one pool."""
        return max(pool.size for pool in self.pools)

    @property
    def strictest_first(self) -> list[Pool]:
        """The order in which pools choose their nodes."""
        return sorted(self.pools, key=lambda pool: -STRATEGIES.index(pool.strategy))

    @property
    def shared(self) -> frozenset[frozenset[str]]:
        """Roles that share devices, of each pool that has more than one."""
        return frozenset(frozenset(pool.needs) for pool in self.pools if len(pool.needs) > 1)

    @property
    def roles(self) -> dict[str, Pool]:
        """The pool of each role."""
        return {role: pool for pool in self.pools for role in pool.needs}

    def __str__(self) -> str:
        return " | ".join(map(str, self.pools))


def needs_of(rollout: RolloutConfig, dims: Mapping[str, ParallelDims]) -> dict[str, Need]:
    """What the roles of a run need; `dims`: layouts of its models by role. Without engines of our own they need nothing."""
    needs = {role: Need(layout.world_size, layout.tp) for role, layout in dims.items()}
    if not (rollout.replay or rollout.engine_urls):
        needs["engines"] = Need(rollout.num_engines * rollout.engine_tp, rollout.engine_tp)
    return needs


def make_pools(section: Mapping[str, Any], needs: Mapping[str, Need]) -> Pools:
    """The pools of `placement.pools` (without any, each role has one of its own), for a run with these roles.

    Raises ValueError: an unknown role or key, a role of the run in no pool or in two, a pool that is too small.
    """
    asked = {name: _asked(name, spec) for name, spec in (section or {role: [role] for role in ROLES}).items()}
    homes: dict[str, str] = {}
    for name, spec in asked.items():
        for role in spec["roles"]:
            if role in homes:
                raise ValueError(
                    f"{KEY}: {role} is in {homes[role]} and in {name}; a role is in one pool: take it out of the other."
                )
            homes[role] = name
    if homeless := [role for role in needs if role not in homes]:
        raise ValueError(
            f"{KEY}: this run has {' and '.join(homeless)}, which no pool names (there are {_listed(asked)}); add "
            f"{'it' if len(homeless) == 1 else 'each'} to one, as in {KEY}.{homeless[0]}=[{homeless[0]}]."
        )
    pools = [_pool(name, spec, {r: needs[r] for r in spec["roles"] if r in needs}) for name, spec in asked.items()]
    return Pools(tuple(pool for pool in pools if pool.needs))


def _asked(name: str, spec: Any) -> dict[str, Any]:
    """A pool as written: roles, and perhaps gpus and strategy; raises ValueError."""
    key = f"{KEY}.{name}"
    found = dict(spec) if isinstance(spec, Mapping) else dict(roles=spec)
    for field in found:
        if field not in FIELDS:
            raise ValueError(f"{key}.{field}: a pool has {_listed(FIELDS)}{_hint(field, FIELDS)}")
    roles = found.get("roles")
    if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise ValueError(f"{key}={roles!r}: expected a list of roles ({_listed(ROLES)}), as in {key}=[actor].")
    for role in roles:
        if role not in ROLES:
            more = " (the reference is in the actor's processes)" if role == "reference" else ""
            raise ValueError(f"{key}: {role!r} is no role{more}; expected {_listed(ROLES)}{_hint(role, ROLES)}")
    if (strategy := found.setdefault("strategy", "PACK")) not in STRATEGIES:
        hint = _hint(str(strategy).upper(), STRATEGIES)
        raise ValueError(f"{key}.strategy={strategy!r}: expected {_listed(STRATEGIES)}{hint}")
    gpus = found.setdefault("gpus", None)
    if gpus is not None and (not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1):
        raise ValueError(f"{key}.gpus={gpus!r}: expected a number of GPUs, 1 or more, or null for what its roles need.")
    return found


def _pool(name: str, spec: Mapping[str, Any], needs: Mapping[str, Need]) -> Pool:
    size, stated = max((need.slots for need in needs.values()), default=0), spec["gpus"]
    if stated is not None and stated < size:
        largest = max(needs, key=lambda role: needs[role].slots)
        raise ValueError(
            f"{KEY}.{name}.gpus={stated}: {largest} needs {size}; leave gpus out, set it to {size}, or make {largest} smaller "
            f"({_KEYS_OF_SIZE[largest]})."
        )
    return Pool(name, needs, stated or size, spec["strategy"])


_KEYS_OF_SIZE = {
    "actor": "parallel.*",
    "critic": "critic.parallel.*",
    "teacher": "teacher.parallel.*",
    "engines": "rollout.num_engines x rollout.engine_tp",
}


def check_room(pools: Pools, nodes: Sequence[int], unit: str) -> None:
    """Raise ValueError where these pools can never be on nodes with so many slots each; `unit` names what a slot is."""
    total, largest = sum(nodes), max(nodes, default=0)
    there = f"the cluster has {total} {unit}s on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    if pools.size > total:
        raise ValueError(
            f"the pools need {pools.size} {unit}s, and {there}: {pools}. Let roles share devices (placement=colocated), make "
            "them smaller (parallel.*, rollout.num_engines), or use more nodes (cluster.nodes, cluster.address)."
        )
    for pool in pools.pools:
        where = f"{KEY}.{pool.name}.strategy={pool.strategy}"
        if pool.strategy == "STRICT_PACK" and pool.size > largest:
            raise ValueError(f"{where}: its {pool.size} {unit}s are not on one node, as {there}; use PACK.")
        if pool.strategy == "STRICT_SPREAD" and pool.size > len(nodes):
            raise ValueError(f"{where}: it wants {pool.size} nodes, and {there}; use SPREAD.")


def slots_per_node(cluster: ClusterConfig, pools: Pools) -> int:
    """Of a node as planned: its GPUs; without any, room for everything."""
    return cluster.gpus_per_node or pools.size


def with_nodes(cluster: ClusterConfig, pools: Pools) -> ClusterConfig:
    """With `nodes`; where the config does not name them, as many as these pools need."""
    if cluster.nodes:
        return cluster
    missing = pools.size - sum(gpus_of_nodes(cluster)[1:])  # those have the other parts of the job
    return replace(cluster, nodes=max(1, ceil(missing / cluster.gpus_per_node)) if cluster.gpus_per_node else 1)


def gpus_of_nodes(cluster: ClusterConfig) -> list[int]:
    """GPUs of each node that the config names; one node, where it does not say how many."""
    own = dict(nodes=cluster.nodes or 1, gpus_per_node=cluster.gpus_per_node)
    parts = [own, *(own | dict(nodes=1) | part for part in cluster.components)]
    return [int(part["gpus_per_node"]) for part in parts for _ in range(int(part["nodes"]))]


def arranged(nodes: Sequence[object], together: int) -> list[int]:
    """An order of slots, given the node of each, in which runs of `together` are on one node as far as that is possible.

    First the runs that fit on a node, node by node; then what is left, which crosses nodes.
    """
    by_node: dict[object, list[int]] = {}
    for slot, node in enumerate(nodes):
        by_node.setdefault(node, []).append(slot)
    fits = {node: len(slots) - len(slots) % together for node, slots in by_node.items()}
    whole = [slot for node, slots in by_node.items() for slot in slots[: fits[node]]]
    return whole + [slot for node, slots in by_node.items() for slot in slots[fits[node] :]]


def _listed(names: Any) -> str:
    *most, last = list(names)
    return f"{', '.join(most)} and {last}" if most else last


def _hint(word: str, words: Any) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {near[0]}?" if near else "."
