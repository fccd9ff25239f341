"""Placement of processes on devices: the Ray cluster, resource pools on placement groups, and device maps."""
