"""Rewards, the scorer that runs them, and the sandbox for untrusted code."""
