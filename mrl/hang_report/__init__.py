"""Hang reports: which process of a run is stuck or dead, and what the others wait for."""
