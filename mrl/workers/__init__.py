"""Megatron trainer processes: one per GPU (on a CPU, one per rank)."""
