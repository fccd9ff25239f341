"""Trainer ranks: Megatron processes, one per GPU."""
