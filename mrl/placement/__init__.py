"""Placement of processes on devices: the Ray cluster, resource pools (as Ray placement groups), and device maps."""
