"""Responses of several turns with tool calls."""
