"""Multi-turn responses with tool calls."""
