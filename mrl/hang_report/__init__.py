"""Hang reports: which process of a run is stuck or dead, and what the other processes wait for."""
