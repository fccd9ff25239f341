"""Preflight check of hosts: gathers facts on each host, tests connections and all-reduces between them, applies rules to both."""
