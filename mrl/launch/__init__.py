"""Launching runs on a cluster: Slurm jobs."""
