"""Sweeps: several runs of one command with different values of some keys. Checks, runs and compares them."""
