"""Preflight check of the hosts on which a run would start.

The preflight check gathers facts about each host, tests connections and all-reduces between the hosts, and reports problems.
"""
