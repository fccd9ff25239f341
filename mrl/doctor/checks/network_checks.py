"""Checks of the network: names, reachability, interfaces, ports, InfiniBand, and the all-reduces between hosts."""

from collections import defaultdict
from collections.abc import Iterator

from mrl.core.processes import LAST_PORT as LAST_ENGINE_PORT
from mrl.doctor.findings import DoctorFinding, error, format_hosts, warning
from mrl.doctor.host_facts import ClusterFacts, HostFacts, hosts_that_differ, most_common
from mrl.hang_report.network_interfaces import (
    INTERFACE_VARIABLES,
    LOOPBACK,
    NetworkInterface,
    gloo_interface,
    interface_exports,
    is_loopback,
    is_virtual,
    nccl_interfaces,
)

# kind of port (PeerConnection.port) -> text for the ports in messages
PORT_NAMES = {"ray": "6379 (Ray's head)", "engine": "20000-32000 (engines)"}
MIN_OUTGOING_PORTS = 10_000  # fewer ports for outgoing connections give a warning
SET_PORT_RANGE = 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"'
NO_COMMON_INTERFACE = "ask the network's administrator: no interface is reachable from all hosts"


def failed_connections(cluster: ClusterFacts, host: str, address: str) -> dict[str, str]:
    """Return the hosts that cannot connect to `address` of `host` at a free port ("any"): name of the other host -> reason."""
    return {
        other.host: connection.problem
        for other in cluster.hosts
        for connection in other.connections
        if (connection.host, connection.address, connection.port) == (host, address, "any") and connection.problem
    }


def reachable_interfaces(cluster: ClusterFacts, host: HostFacts) -> list[NetworkInterface]:
    """Return those interfaces of `host` that can connect to themselves and that all other hosts can reach.

    Virtual interfaces come last. Among the other interfaces, InfiniBand comes first, and faster interfaces come before slower
    ones.
    """
    interfaces = [
        one
        for one in host.network.interfaces
        if one.up
        and not one.problem
        and not is_loopback(one.address)
        and not failed_connections(cluster, host.host, one.address)
    ]
    return sorted(interfaces, key=lambda one: (is_virtual(one.name), not one.name.startswith("ib"), -one.speed_mbps))


def fix_interfaces(cluster: ClusterFacts) -> str:
    """Return the command that makes NCCL and gloo use an interface that all hosts reach."""
    by_host = {host.host: [one.name for one in reachable_interfaces(cluster, host)] for host in cluster.hosts}
    if not all(by_host.values()):
        return NO_COMMON_INTERFACE
    first, *others = by_host.values()
    common = next((name for name in first if all(name in names for names in others)), None)
    return interface_exports({host: common or names[0] for host, names in by_host.items()})


def check_names(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Check how each host resolves `localhost`, its own name, and the names of the other hosts."""
    addresses = {host.host: {one.address for one in host.network.interfaces} for host in cluster.hosts}
    for host in cluster.hosts:
        yield from _check_own_names(host)
        for peer, resolved in host.peer_addresses.items():
            yield from _check_peer_name(host.host, peer, resolved, addresses.get(peer, set()))


def _check_own_names(host: HostFacts) -> Iterator[DoctorFinding]:
    network, where = host.network, [host.host]
    if "127.0.0.1" not in network.localhost:
        what = f"localhost resolves to {' and '.join(network.localhost) or 'nothing'}; 127.0.0.1 is expected"
        why = "servers of a run listen on 127.0.0.1, so clients that use localhost do not find them"
        yield error(where, what, why, "echo '127.0.0.1 localhost' >> /etc/hosts")
    if network.ipv6_only:
        yield error(
            where,
            "this host has only IPv6 addresses",
            "Ray, gloo and the engines' servers are tested with IPv4 only and may not be reachable",
            "ask the network's administrator for IPv4 addresses of the compute nodes",
        )
    if not network.own_addresses:
        what = f"its own name, {host.host.partition('#')[0]}, does not resolve"
        why = "gloo looks up its address by that name; without it gloo uses loopback, which other hosts cannot reach"
        yield warning(where, what, why, f"echo 'ADDRESS {host.host}' >> /etc/hosts, or repair the cluster's DNS")
    elif all(":" in address for address in network.own_addresses):
        what = f"its own name, {host.host}, resolves to IPv6 addresses only ({network.own_addresses[0]})"
        why = "gloo would use IPv6, while Ray and the engines use IPv4"
        yield warning(where, what, why, f"echo 'ADDRESS {host.host}' >> /etc/hosts with its IPv4 address")


def _check_peer_name(host: str, peer: str, resolved: list[str], peer_addresses: set[str]) -> Iterator[DoctorFinding]:
    """Check that `host` resolves the name of `peer` to an address of `peer`.

    `resolved`: addresses to which `host` resolves the name. `peer_addresses`: addresses of the peer's interfaces.
    """
    fix = f"getent hosts {peer}; repair /etc/hosts on {host}, or use addresses as names (cluster.address=ADDRESS:6379)"
    why = "a node that joins Ray's head node by this name does not find it, or finds another host"
    if not resolved:
        yield warning([host], f"the name {peer} does not resolve here", why, fix)
    elif peer_addresses and not peer_addresses & set(resolved) and not all(":" in address for address in resolved):
        what = f"the name {peer} resolves to {resolved[0]} here, and no interface of {peer} has that address"
        yield warning([host], what, why, fix)


def check_network(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find hosts, ports and Ray's node addresses that another host cannot reach."""
    for host in cluster.hosts:
        unreachable_from = _unreachable_from(cluster, host.host)
        for other, problem in unreachable_from.items():
            what = f"{other} cannot reach any address of this host ({problem})"
            fix = f"ping -c1 {host.host} on {other}; ip route; ask the administrator for TCP between compute nodes"
            yield error([host.host], what, "Ray, NCCL and gloo connect every host with every other host", fix)
        yield from _check_closed_ports(cluster, host.host, set(unreachable_from))
        yield from _check_ray_address(cluster, host, set(unreachable_from))


def _unreachable_from(cluster: ClusterFacts, host: str) -> dict[str, str]:
    """Return other host -> error of its last attempt, for the hosts that reach no address of `host`."""
    problems = {}
    for other in cluster.hosts:
        attempts = [one for one in other.connections if one.host == host and one.port == "any"]
        if other.host != host and attempts and all(one.problem for one in attempts):
            problems[other.host] = attempts[-1].problem
    return problems


def _check_closed_ports(cluster: ClusterFacts, host: str, unreachable_from: set[str]) -> Iterator[DoctorFinding]:
    closed: dict[str, dict[str, str]] = defaultdict(dict)
    for other in cluster.hosts:
        if other.host in unreachable_from:
            continue
        to_host = [one for one in other.connections if one.host == host]
        reached = {one.address for one in to_host if one.port == "any" and not one.problem}
        for one in to_host:
            if one.address in reached and one.port in PORT_NAMES and one.problem:
                closed[one.port][other.host] = one.problem
    for port, others in closed.items():
        problem = f"{format_hosts(list(others))} ({next(iter(others.values()))})"
        yield error(
            [host],
            f"port {PORT_NAMES[port]} is closed to {problem}, while other ports are open",
            "Ray's nodes join the head node through it"
            if port == "ray"
            else "requests and weights reach engines through it",
            "open all TCP ports between compute nodes, at least 6379, 10002-32000 and 32768-60999 (nft list ruleset)",
        )


def _check_ray_address(cluster: ClusterFacts, host: HostFacts, unreachable_from: set[str]) -> Iterator[DoctorFinding]:
    """Check that the other hosts reach the address that Ray uses for this node."""
    address = host.network.route_address
    failed = {
        other: problem
        for other, problem in failed_connections(cluster, host.host, address).items()
        if other not in unreachable_from
    }
    if failed:
        better = next((one.address for one in reachable_interfaces(cluster, host)), "ADDRESS")
        problem = f"{format_hosts(list(failed))} cannot reach that address ({next(iter(failed.values()))})"
        yield error(
            [host.host],
            f"Ray uses the address {address} for this node, and {problem}",
            "other nodes cannot reach the objects and processes of this node, so calls to them wait forever",
            f"ray start --node-ip-address={better} ... on {host.host}",
        )


def check_interfaces(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find hosts on which NCCL or gloo would choose an interface that does not reach all hosts.

    The choice of NCCL is checked on hosts with GPUs. The choice of gloo is checked if there are several hosts.
    """
    default = LOOPBACK if _starts_local_ray(cluster) else ""
    for host in cluster.hosts:
        chosen: dict[str, NetworkInterface | None] = {}
        if host.gpus.cards:
            variable = host.environment.get(INTERFACE_VARIABLES["NCCL"], default)
            chosen["NCCL"] = next(iter(nccl_interfaces(host.network.interfaces, variable)), None)
        if cluster.multi_host:
            variable = host.environment.get(INTERFACE_VARIABLES["gloo"], "")
            chosen["gloo"] = gloo_interface(host.network.interfaces, host.network.own_addresses, variable)
        for library, interface in chosen.items():
            yield from _check_interface(cluster, host, library, interface)


def _starts_local_ray(cluster: ClusterFacts) -> bool:
    """Return whether the run starts Ray on one host, on loopback. A Slurm job starts Ray on the address of its node."""
    address = cluster.requirements.address if cluster.requirements else None
    return not (cluster.multi_host or address or any(host.machine.slurm_job for host in cluster.hosts))


def _check_interface(
    cluster: ClusterFacts, host: HostFacts, library: str, chosen: NetworkInterface | None
) -> Iterator[DoctorFinding]:
    fix, variable = fix_interfaces(cluster), INTERFACE_VARIABLES[library]
    why = "ranks that open their connections there wait for each other forever, without an error message"
    value = host.environment.get(variable)
    if chosen is None:
        available = ", ".join(one.name for one in host.network.interfaces if one.up)
        reason = f"{variable}={value}: no such interface is up" if value else f"{library} finds no interface"
        yield error([host.host], f"{reason}; this host has {available}", f"{library} fails when it starts", fix)
        return
    what = f"{library} would open its connections on {chosen.name} ({chosen.address})"
    if cluster.multi_host and is_loopback(chosen.address):
        own = " and ".join(host.network.own_addresses) or "nothing"
        reason = f"{variable}={value}" if value else f"this host's name resolves to {own} here"
        yield error([host.host], f"{what}, because {reason}", why, fix)
    elif problem := _interface_problem(cluster, host, chosen):
        yield error([host.host], f"{what}: {problem}", why, fix)


def _interface_problem(cluster: ClusterFacts, host: HostFacts, chosen: NetworkInterface) -> str:
    """Return why connections to this interface of the host fail; "" if they work."""
    if chosen.problem:
        return f"a connection from it to itself fails ({chosen.problem})"
    failed = failed_connections(cluster, host.host, chosen.address)
    return f"a connection from {format_hosts(list(failed))} fails ({next(iter(failed.values()))})" if failed else ""


def check_ports(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Check that Ray's port is free if the job starts Ray, and check the kernel's port range for outgoing connections."""
    starts_ray = not (cluster.requirements and cluster.requirements.address)
    for host in cluster.hosts:
        if starts_ray and (cluster.multi_host or host.machine.slurm_job):
            for port, owner in host.network.busy_ports.items():
                yield warning(
                    [host.host],
                    f"port {port} is used by {owner}",
                    "`ray start --head` needs this port: it fails, or the nodes of this job join another user's cluster",
                    "ray stop, if it is your Ray; otherwise ray start --head --port=6380, and cluster.address=HEAD:6380",
                )
        first, last = host.network.outgoing_ports
        if first <= LAST_ENGINE_PORT:
            what = f"outgoing connections use ports from {first} on, engines use ports up to {LAST_ENGINE_PORT}"
            why = "an outgoing connection can take the port that an engine is about to open: 'Address already in use'"
            yield warning([host.host], what, why, SET_PORT_RANGE)
        elif last - first < MIN_OUTGOING_PORTS:
            what = f"the kernel has {last - first + 1} ports for outgoing connections"
            why = "requests to engines and connections of Ray use them up: 'Cannot assign requested address'"
            yield warning([host.host], what, why, SET_PORT_RANGE)


def check_infiniband(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find InfiniBand ports that are down or missing on a host, and settings that prevent NCCL from using the ports."""
    active = {host.host: tuple(sorted(p.rate for p in host.network.infiniband if p.active)) for host in cluster.hosts}
    for host in cluster.hosts:
        if active[host.host]:
            yield from _check_infiniband_host(host, len(active[host.host]))
    if cluster.multi_host and any(active.values()):
        for name, ports in hosts_that_differ(active).items():
            rates = f" ({', '.join(sorted(set(ports)))})" if ports else ""
            what = f"{len(ports)} InfiniBand ports are up{rates}; on the other hosts {len(most_common(active))} are up"
            yield warning([name], what, "all ranks wait for the slowest link, or NCCL uses TCP", "ibstat; ibdev2netdev")


def _check_infiniband_host(host: HostFacts, num_active: int) -> Iterator[DoctorFinding]:
    where = [host.host]
    down = [port.name for port in host.network.infiniband if not port.active]
    if down:
        why = "NCCL spreads its traffic over the ports that are up, so a step is slower with fewer ports"
        yield warning(
            where, f"InfiniBand ports that are not up: {', '.join(down)}", why, "ibstat; check cable and switch port"
        )
    if host.environment.get("NCCL_IB_DISABLE") == "1":
        what = f"NCCL_IB_DISABLE=1 is set although {num_active} InfiniBand ports are up"
        yield warning(where, what, "NCCL uses TCP, which is much slower", "unset NCCL_IB_DISABLE")
    soft, _ = host.limits.get("memlock", (-1, -1))
    if soft != -1:
        what = (
            f"a process may lock {soft / 2**20:.0f} MiB of memory (ulimit -l); for InfiniBand, this must be unlimited"
        )
        why = "NCCL cannot register its buffers: 'ibv_reg_mr failed' or 'Cannot allocate memory'"
        yield warning(where, what, why, "LimitMEMLOCK=infinity in slurmd's unit; in a container --ulimit memlock=-1")


def check_collectives(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find the first all-reduce that failed or did not finish. Later ones are not reported: a rank stops after a failure."""
    for one in cluster.collectives:
        if one.seconds is None:
            single_host_fix = "NCCL_DEBUG=INFO mrl doctor --all-reduce; nvidia-smi topo -m"
            yield error(
                one.hosts,
                f"an all-reduce with {one.backend} in process group {one.group} fails: {one.problem}",
                "trainer ranks would wait forever at their start or in their first step",
                fix_interfaces(cluster) if cluster.multi_host else single_host_fix,
            )
            return
