"""Preflight check of hosts: gathers facts on each host, tests connections and all-reduces between hosts, and applies checks."""
