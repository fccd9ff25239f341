"""Sweeps: several runs of one command with different values of some keys. This package checks, starts and compares the runs."""
