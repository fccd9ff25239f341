"""Preflight check of the hosts on which a run would start.

It gathers facts about each host, tests connections and all-reduces between the hosts, and applies checks to the results.
"""
