"""Agents: they sample multi-turn responses with tool calls."""
