"""Variables that steer NCCL, gloo, CUDA and proxies."""

from collections.abc import Iterator

from mrl.doctor.facts import HostFacts
from mrl.doctor.finding import Finding, note, warning
from mrl.doctor.seen import Seen, unlike, usual

NAME = "environment"
SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of a host exchange through its memory instead of NVLink",
    "NCCL_SHM_DISABLE": "processes of a host exchange over the network",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
}
MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "no_proxy")
CHECKS_COLLECTIVES = "TORCH_DISTRIBUTED_DEBUG"


def check(seen: Seen) -> Iterator[Finding]:
    """Left-overs of debugging, proxies in the way, and hosts that are set differently."""
    for host in seen.hosts:
        yield from _own(host, seen)
    for name in sorted({name for host in seen.hosts for name in host.environment if name not in MAY_DIFFER}):
        values = {host.host: host.environment.get(name, "not set") for host in seen.hosts}
        for host, value in unlike(values).items():
            common, interface = usual(values), name.endswith("_SOCKET_IFNAME")
            if interface:
                continue  # hosts may well name theirs differently; whether it works is seen in the connections
            what = f"{name} is {value}; on the other hosts it is {common}"
            mend = f"unset {name} on all hosts" if common == "not set" else f"export {name}={common} on all hosts"
            yield warning(NAME, [host], what, "ranks that choose different ways wait for each other for ever", mend)


def _own(host: HostFacts, seen: Seen) -> Iterator[Finding]:
    found, where = host.environment, [host.host]
    for name, why in SLOW.items():
        if found.get(name) == "1":
            yield warning(NAME, where, f"{name}=1", why, f"unset {name}")
    if found.get(CHECKS_COLLECTIVES) == "DETAIL":
        why = "each collective is compared over all ranks first: many times slower"
        yield note(NAME, where, f"{CHECKS_COLLECTIVES}=DETAIL", why, f"unset {CHECKS_COLLECTIVES}")
    proxies = [name for name in ("http_proxy", "all_proxy") if name in found]
    spared = found.get("no_proxy", "").replace(" ", "").split(",")
    if proxies and not {"127.0.0.1", "*"} & set(spared):
        what = f"{' and '.join(proxies)} set, and no_proxy does not name 127.0.0.1"
        why = "requests to engines on this machine would go to the proxy, which does not find them"
        yield warning(
            NAME,
            where,
            what,
            why,
            "export no_proxy=localhost,127.0.0.1,$no_proxy NO_PROXY=localhost,127.0.0.1,$NO_PROXY",
        )
    segments = found.get("PYTORCH_CUDA_ALLOC_CONF", "") + found.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in segments.lower() and seen.wanted and seen.wanted.engines_take_turns:
        what = "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, and engines give their memory back by turns"
        why = "SGLang's memory saver replaces the allocator, and refuses that"
        yield warning(
            NAME, where, what, why, "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF, or placement=disaggregated"
        )
