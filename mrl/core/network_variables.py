"""Network variables: environment variables of NCCL, gloo, UCX and torch.distributed.

These variables decide how the processes of a run connect to each other. In all processes, the variables have the same values,
except that names of network interfaces may differ.
"""

from collections.abc import Mapping

NETWORK_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_DEBUG", "GLOO_", "UCX_")
"""Beginnings of the names of network variables."""

INTERFACE_VARIABLES = {"NCCL": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}
"""Library -> the variable that names its network interfaces. On different hosts, interfaces may have different names."""

LOOPBACK = "lo"
"""Default of INTERFACE_VARIABLES in a run that starts Ray on this machine: all processes of the run are on one host."""


def network_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the network variables of an environment, except INTERFACE_VARIABLES."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(NETWORK_PREFIXES) and name not in INTERFACE_VARIABLES.values()
    }


def interface_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that are in INTERFACE_VARIABLES."""
    return {name: environment[name] for name in INTERFACE_VARIABLES.values() if name in environment}
