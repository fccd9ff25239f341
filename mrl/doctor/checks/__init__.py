"""Checks: generators that take ClusterFacts and yield findings. `CHECKS` in mrl/doctor/examine.py lists them all."""
