"""Starts commands: as Slurm jobs on a cluster, and in a supervised process that is restarted after a crash."""
